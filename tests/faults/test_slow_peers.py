"""Peers whose event loop, or network, takes seconds for each step: a link to them is made again all the same."""

from __future__ import annotations

import anyio
import pytest

from aiodatadist import LinkError, LinkTimeout, LLMClusterInfo, LLMStatusCode
from aiodatadist._cluster.initiator import LinkInitiator
from aiodatadist.testing import ChaosProxy, Latency, cluster_info, open_cluster
from tests.hostile.test_strangers import port_of
from tests.hostile.test_unproved import Impostor
from tests.test_relink import GIVEN_UP, LINKED, QUICK, Door, cut, until

KEY = b"k" * 32
POLICY = {**QUICK, "duration": 100.0}


@pytest.mark.autojump
@pytest.mark.parametrize("seconds", [0.9, 1.2], ids=["proved after 3.6 s", "asked after 6 s"])
async def test_a_peer_that_proves_late_is_linked_by_the_first_attempt(seconds: float) -> None:
    """Keep the first attempt: if it were given up, the peer would have to begin from the start, over and over."""
    async with (
        open_cluster(1, auth_key=KEY) as prompt,
        ChaosProxy(("127.0.0.1", port_of(prompt))) as proxy,
        open_cluster(2, device_id=1, auth_key=KEY, relink=POLICY) as decoder,
    ):
        info = LLMClusterInfo(1)
        info.append_remote_ip_info(*proxy.address)
        linked = await decoder.datadist.link_clusters([info], 60_000)
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        changes = decoder.datadist.link_changes()
        with proxy.under(Latency(seconds)):
            await cut(prompt)
            told = await until(changes, LINKED, GIVEN_UP)
        assert (told[-1].state, told[-1].attempt) == (LINKED, 1), told


@pytest.mark.autojump
async def test_connections_that_look_for_the_peer_have_more_time_if_they_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Give kept connections more time: a cluster whose event loop is busy is slow on each connection.

    A cluster that refuses is not slow. A connection kept in vain does not delay the next one: the cluster may listen by then.
    """
    given, pauses, impostor = list[float](), list[float](), Impostor(None)
    ended: float | None = None
    late, refused = LinkTimeout("it did not prove who it is"), LinkError("it refused")
    errors = iter([late, late, refused, late])
    async with (
        open_cluster(1, auth_key=KEY) as prompt,
        open_cluster(2, device_id=1, auth_key=KEY, relink=POLICY) as decoder,
    ):
        linked = await decoder.datadist.link_clusters([cluster_info(prompt)], 3_600_000)
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        door, changes = Door(prompt), decoder.datadist.link_changes()
        await door.close()

        async def meet(_: LinkInitiator, address: tuple[str, int], cluster_id: int, seconds: float) -> str:
            assert (address, cluster_id) == (("127.0.0.1", door.port), 1)
            nonlocal ended
            given.append(seconds)
            if ended is not None:
                pauses.append(anyio.current_time() - ended)
            ended = anyio.current_time()
            if (error := next(errors, None)) is not None:
                raise error
            return "the instance"

        monkeypatch.setattr(LinkInitiator, "meet", meet)
        async with impostor.at(door.port):
            await cut(prompt)
            told = [await anext(changes)]
            while told[-1].attempt < 2:
                told.append(await anext(changes))
        assert "did not prove within 1 s that it is cluster 1" in str(told[-1].reason)
        assert given == [1.0, 2.0, 4.0, 4.0, 8.0]
        assert pauses == pytest.approx([1.0] * 4)
