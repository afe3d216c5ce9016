"""Links between two devices: one, many, idle, and what becomes of a peer that dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import anyio
import pytest

from aiodatadist import LLMException, LLMStatusCode, NotLinked, PeerLost
from tests.hardware.conftest import Pair, linked
from tests.hardware.member import member
from tests.hardware.place import Place, places
from tests.hardware.remote import Remote, started

LINKS = 64
ROUNDS = 5
IDLE_SECONDS = float(os.environ.get("AIODATADIST_IDLE_SECONDS", "3"))


async def test_a_link_between_two_processes(pair: Pair) -> None:
    assert await pair.there.ask("links", cluster_id=1) == [2]
    await pair.here.pull(1, [3], [5])
    found = await pair.here.whose()
    assert [tensor[5] for tensor in found] == [(1, number, 3) for number in range(8)]


async def test_a_link_that_the_other_end_makes(mine: Place, peer: Remote) -> None:
    await peer.open(1)
    async with member(mine, 2) as here:
        await here.allocate(2, 4, 4096)
        await peer.ask("allocate", cluster_id=1, tensors=2, blocks=4, nbytes=4096)
        assert here.datadist.listen_address is not None
        host, port = here.datadist.listen_address
        assert await peer.ask("link", cluster_id=1, to=2, host=host, port=port) == "LLM_SUCCESS"
        await here.datadist.wait_linked(1)
        await here.pull(1, [0], [3])
        await peer.ask("pull", cluster_id=1, of=2, source=[1], target=[2])
        assert [tensor[3] for tensor in await here.whose()] == [(1, 0, 0), (1, 1, 0)]
        assert [tensor[2] for tensor in await peer.whose()] == [(2, 0, 1), (2, 1, 1)]


async def test_a_link_is_made_anew_after_it_was_ended(pair: Pair) -> None:
    for number in range(ROUNDS):
        status, _ = await pair.here.datadist.unlink_clusters([pair.there.info(1)], 60_000)
        assert status is LLMStatusCode.LLM_SUCCESS
        await pair.there.link(pair.here, 1)
        await pair.here.pull(1, [number], [15])
        assert [tensor[15] for tensor in await pair.here.whose()] == [(1, t, number) for t in range(8)]


async def test_two_devices_of_one_process() -> None:
    ends = places()[:2]
    async with member(ends[0], 2) as one, member(ends[1], 1) as two:
        await one.allocate(2, 4, 4096)
        await two.allocate(2, 4, 4096)
        status, each = await one.datadist.link_clusters([two.info], 60_000)
        assert status is LLMStatusCode.LLM_SUCCESS, each
        await one.pull(1, [0, 1], [2, 3])
        assert await one.whose() == [[(2, t, 0), (2, t, 1), (1, t, 0), (1, t, 1)] for t in range(2)]


async def test_many_links(mine: Place, peer: Remote) -> None:
    numbers = range(101, 101 + LINKS)
    for number in numbers:
        await peer.open(number, pool=2 << 20)
        await peer.ask("allocate", cluster_id=number, tensors=2, blocks=2, nbytes=4096)
    async with member(mine, 2) as here:
        await here.allocate(2, LINKS, 4096)
        await peer.link(here, *numbers)
        assert len(here.datadist.statistics().links) == LINKS
        await asyncio.gather(*(here.pull(number, [1], [number - 101]) for number in numbers))
        assert await here.whose() == [[(number, t, 1) for number in numbers] for t in range(2)]
        await here.fill()
        await asyncio.gather(*(here.push(number, [number - 101], [0]) for number in numbers))
        for number in numbers:
            assert await peer.whose(number) == [[(2, t, number - 101), (number, t, 1)] for t in range(2)]


async def test_an_idle_link_stays(pair: Pair) -> None:
    await pair.here.pull(1, [0], [1])
    with anyio.move_on_after(IDLE_SECONDS):
        reason = await pair.here.datadist.wait_link_closed(1)
        pytest.fail(f"the idle link ended: {reason}")
    await pair.here.pull(1, [2], [1])
    assert [tensor[1] for tensor in await pair.here.whose()] == [(1, number, 2) for number in range(8)]


async def test_a_peer_that_dies_is_lost_and_its_successor_can_be_linked(mine: Place, peer: Remote) -> None:
    if peer.process is None:
        pytest.skip("the peer runs on another server: it is not killed")
    async with linked(mine, peer) as pair:
        await pair.allocate(2, 4, 4096)
        await pair.here.pull(1, [0], [1])
        peer.process.send_signal(signal.SIGKILL)
        with contextlib.suppress(NotLinked):  # it is gone already
            await pair.here.datadist.wait_link_closed(1)
        with pytest.raises((PeerLost, NotLinked)):
            await pair.here.pull(1, [0], [2])
        async with started(places()[1]) as successor:
            await successor.open(1)
            await successor.ask("allocate", cluster_id=1, tensors=2, blocks=4, nbytes=4096)
            await successor.link(pair.here, 1)
            await pair.here.pull(1, [3], [2])
            assert [tensor[2] for tensor in await pair.here.whose()] == [(1, 0, 3), (1, 1, 3)]


async def test_a_wrong_address_is_a_status(mine: Place, peer: Remote) -> None:
    await peer.open(1)
    async with member(mine, 2) as here:
        await here.allocate(1, 2, 4096)
        status, _ = await here.datadist.link_clusters([peer.info(1, port=1)], 5000)
        assert status is not LLMStatusCode.LLM_SUCCESS
        with pytest.raises(LLMException):
            await here.pull(1, [0], [1])
        await peer.link(here, 1)
