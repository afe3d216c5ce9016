"""A client's half of a link is ready one message before the server's: until the server was heard on it, there is no link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from aiodatadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LinkPhase,
    LLMClusterInfo,
    LLMStatusCode,
    NotLinked,
)
from aiodatadist._adapters.peer_links import PeerAddress, PeerLinks
from aiodatadist._adapters.peers import LOOPBACK, Peers
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._link.link import Link
from aiodatadist._testing.views import cut_link
from aiodatadist.testing import ChaosProxy, Cluster, Latency, Slicer, Timeout, cluster_info, inside, open_cluster
from tests.test_parting import SUCCESS, hold_the_last_word, known_as
from tests.test_relink import until

DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
QUICK: dict[str, Any] = {"first_delay": 0.01, "max_delay": 0.05, "wait": 20}
SLOW = Slicer(8, 0, 0.002)
"""A way on which a message takes many times as long as on the other one."""


async def until_half_is_ready(client: Cluster) -> None:
    """Poll until half a link is there: nothing tells of it."""
    while not client.datadist.statistics().links:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def until_not_ready(link: Link) -> None:
    while link.session.is_ready:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.001)


@asynccontextmanager
async def through_a_proxy(**options: Any) -> AsyncIterator[tuple[Cluster, Cluster, ChaosProxy, LLMClusterInfo]]:
    """Open a server, a client and a proxy between them, and return where the client finds it."""
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1, **options) as decoder:
        await prompt.blocks(DESC)
        address = prompt.datadist.listen_address
        assert address is not None
        async with ChaosProxy(address) as proxy:
            info = LLMClusterInfo(1)
            info.append_remote_ip_info(*proxy.address)
            yield prompt, decoder, proxy, info


# ---- there is one ----


async def test_a_client_that_is_told_of_its_link_finds_it_at_the_server_however_slow_the_way_is() -> None:
    async with through_a_proxy() as (prompt, decoder, proxy, info):
        with proxy.under(Latency(0.05)):
            assert await decoder.datadist.link_clusters([info]) == SUCCESS
            assert [link.cluster_id for link in prompt.datadist.statistics().links] == [2]


async def test_the_servers_first_word_is_enough() -> None:
    """Link with the server's first word, whether it has heard a question or not."""
    async with through_a_proxy() as (prompt, decoder, proxy, info):
        proxy.add(SLOW, "upstream")

        async def speak() -> None:
            await prompt.datadist.wait_linked(2)
            await prompt.datadist.notify(2, b"you are linked")
            proxy.add(Timeout(0), "upstream")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(speak)
            assert await decoder.datadist.link_clusters([info], 5000) == SUCCESS
            proxy.heal()


@pytest.mark.parametrize("force", [False, True])
async def test_a_link_that_the_server_ends_at_once_was_made(force: bool) -> None:
    async with through_a_proxy(relink=QUICK) as (prompt, decoder, proxy, info):
        cache = await decoder.blocks(DESC)
        changes = decoder.datadist.link_changes()
        proxy.add(SLOW, "upstream")

        async def unlink() -> None:
            await prompt.datadist.wait_linked(2)
            await prompt.datadist.unlink_clusters(known_as(2), force=force)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(unlink)
            assert await decoder.datadist.link_clusters([info], 10_000) == SUCCESS
        assert [(await anext(changes)).state for _ in range(2)] == [LinkPhase.LINKED, LinkPhase.UNLINKED]
        with pytest.raises(NotLinked):  # at once: it is not made again
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])


async def test_a_link_that_breaks_when_the_server_was_heard_is_made_again() -> None:
    async with through_a_proxy(relink=QUICK) as (prompt, decoder, proxy, info):
        cache = await decoder.blocks(DESC)
        changes = decoder.datadist.link_changes()
        proxy.add(SLOW, "upstream")

        async def end() -> None:
            await prompt.datadist.wait_linked(2)
            await prompt.datadist.notify(2, b"hello")
            heard = await anext(decoder.datadist.notifications())
            assert heard.payload == b"hello"
            proxy.reset()
            proxy.heal()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end)
            assert await decoder.datadist.link_clusters([info], 10_000) == SUCCESS
        await until(changes, LinkPhase.LINKED)
        await until(changes, LinkPhase.LINKED)
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])


# ---- there is none ----


async def test_a_server_that_ends_before_it_knows_makes_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_the_last_word("server", monkeypatch)
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        linking = asyncio.create_task(decoder.datadist.link_clusters([cluster_info(prompt)]))
        await until_half_is_ready(decoder)
        await prompt.datadist.finalize()
        linked = await linking
        assert linked[0] is LLMStatusCode.LLM_LINK_FAILED
        assert "did not accept the link: cluster 1 ended the link: cluster 1 is being finalized" in str(
            linked.errors[0]
        )
        assert not decoder.datadist.statistics().links


@pytest.mark.parametrize("how", ["cancelled", "too late"])
async def test_a_link_that_the_server_did_not_take_is_ended(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_the_last_word("server", monkeypatch)
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        changes = decoder.datadist.link_changes()
        linking = asyncio.create_task(decoder.datadist.link_clusters([cluster_info(prompt)], 500))
        await until_half_is_ready(decoder)
        if how == "cancelled":
            linking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await linking
        else:
            assert (await linking)[0] is LLMStatusCode.LLM_TIMEOUT
        assert not decoder.datadist.statistics().links
        monkeypatch.undo()
        assert await decoder.datadist.link_clusters([cluster_info(prompt)]) == SUCCESS
        assert (await anext(changes)).state is LinkPhase.LINKED, "nothing was told of the other one"


async def test_a_link_that_is_made_again_goes_on_if_the_server_did_not_take_a_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller's comes while the broken one is being given back."""
    gone, shut = asyncio.Event(), Link._shut
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1, relink=QUICK) as decoder:
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        assert await decoder.datadist.link_clusters([cluster_info(prompt)]) == SUCCESS
        first = inside(decoder.datadist).links.find(1)

        async def shut_slowly(self: Link) -> None:
            if self is first:
                await gone.wait()
            await shut(self)

        with monkeypatch.context() as patched:
            patched.setattr(Link, "_shut", shut_slowly)
            await cut_link(first)
            await until_not_ready(first)
            hold_the_last_word("server", patched)
            assert (await decoder.datadist.link_clusters([cluster_info(prompt)], 500))[0] is LLMStatusCode.LLM_TIMEOUT
        gone.set()
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])


async def test_two_adapters_that_want_one_link_wait_for_both_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    said = hold_the_last_word("server", monkeypatch)
    async with (
        open_cluster(1) as prompt,
        open_cluster(2, device_id=1) as decoder,
        anyio.create_task_group() as group,
    ):
        links = PeerLinks(decoder.datadist, Spawner(group), 1, lambda _: None, Peers(LOOPBACK))
        assert prompt.datadist.listen_address is not None
        host, port = prompt.datadist.listen_address
        peer = PeerAddress(cluster_id=1, host=host, port=port)
        both = [asyncio.create_task(links.link(peer, "r"))]
        await said.wait()
        await until_half_is_ready(decoder)
        both.append(asyncio.create_task(links.link(peer, "r")))
        await asyncio.wait(both)
        assert all(task.exception() is not None for task in both), "the server has no link"
        group.cancel_scope.cancel()
