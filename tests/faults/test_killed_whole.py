"""A peer that is killed in the middle of anything costs its own link, and a new one of the same id can be linked at once."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    LinkClosed,
    LinkError,
    LLMException,
    LLMStatusCode,
    NotLinked,
    PeerLost,
)
from aiodatadist.testing import Cluster, inside, open_cluster, soft_counters, verify
from tests.faults.test_liveness import BLOCKS, DESC, Puppet, gone, linked_to, puppet
from tests.held import turns
from tests.stopwatch import lasting
from tests.strict.marks import interruptible

TOLD = 1.0
"""Seconds after which a caller that waits for a dead peer has been told."""


BETWEEN = 0.005
"""Seconds between two pulls of others: what waits for a process to start would otherwise take a whole core from it."""


@asynccontextmanager
async def loses_nothing(cluster: Cluster) -> AsyncIterator[None]:
    """Pull from cluster 3 meanwhile, and check that no pull fails."""
    cache = await cluster.blocks(DESC, 3)
    pulls, ends = 0, asyncio.Event()

    async def pull() -> None:
        nonlocal pulls
        await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(3), cache, [1, 2], [5, 6])
        pulls += 1

    async def go_on() -> None:
        while not ends.is_set():
            await pull()
            await asyncio.sleep(BETWEEN)

    async with asyncio.TaskGroup() as group:
        group.create_task(go_on())
        yield
        ends.set()
    assert pulls
    for _ in range(3):
        await pull()
    verify(cluster.memory(cache), cache, [(t, 5, 3, 1) for t in range(2)])


async def is_back(cluster: Cluster, cache: Cache) -> None:
    """Check that nothing of the dead peer's is left here."""
    entry = inside(cluster.datadist).registry.table.find(cache.cache_id)
    assert entry is not None
    assert entry.leases == 0
    assert not [holder for holder in entry.holders if getattr(holder, "cluster_id", 0) == 1]
    assert not entry.is_poisoned
    assert [link.cluster_id for link in cluster.datadist.statistics().links] == [3]


Waiting = Callable[[Cluster, Cache, Puppet, asyncio.Event], Awaitable[None]]
"""Waits for the peer until it is killed, and sets the event when it is in the middle of that."""


async def pulling(cluster: Cluster, cache: Cache, _: Puppet, begun: asyncio.Event) -> None:
    while True:
        await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, BLOCKS, BLOCKS)
        begun.set()


async def pushing(cluster: Cluster, cache: Cache, _: Puppet, begun: asyncio.Event) -> None:
    while True:
        await cluster.datadist.cache_manager.push_blocks(BlocksCacheKey(1), cache, BLOCKS, BLOCKS)
        begun.set()


async def notifying(cluster: Cluster, _: Cache, __: Puppet, begun: asyncio.Event) -> None:
    for _number in range(64):  # the peer takes none of them
        await cluster.datadist.notify(1, bytes(1000))
    begun.set()
    await cluster.datadist.notify(1, bytes(1000))


async def serving(cluster: Cluster, _: Cache, peer: Puppet, begun: asyncio.Event) -> None:
    """Let the peer pull. No task here waits for the transfers: only the link's end is reported."""
    assert await peer.ask("pull_for_ever") is None
    begun.set()
    why = await cluster.datadist.wait_link_closed(1)
    raise PeerLost(why)


async def halted(cluster: Cluster, cache: Cache, peer: Puppet, begun: asyncio.Event) -> None:
    halting = asyncio.create_task(peer.ask("halt", "HcclBatchPut"))
    halting.add_done_callback(lambda _: begun.set())
    await pulling(cluster, cache, peer, asyncio.Event())


@pytest.mark.parametrize(
    ("what", "one_sided"),
    [
        pytest.param(pulling, True, id="pull"),
        pytest.param(pushing, True, id="push", marks=pytest.mark.nightly),
        pytest.param(notifying, True, id="notify"),
        pytest.param(serving, True, id="peer_pulls"),
        pytest.param(pulling, False, id="request", marks=pytest.mark.nightly),
        pytest.param(serving, False, id="peer_requests", marks=pytest.mark.nightly),
        pytest.param(halted, False, id="half_a_request"),
    ],
)
async def test_a_peer_killed_while(what: Waiting, one_sided: bool) -> None:
    before = soft_counters()
    options = {"enable_remote_cache_accessible": one_sided}
    async with AsyncExitStack() as stack:
        peer = await stack.enter_async_context(puppet(**options))
        other = await stack.enter_async_context(puppet(3, **options))
        async with linked_to(peer, other, **options) as (cluster, cache), loses_nothing(cluster):
            begun = asyncio.Event()
            waiter = asyncio.ensure_future(what(cluster, cache, peer, begun))
            await begun.wait()
            assert not waiter.done()
            peer.send(signal.SIGKILL)
            with lasting(TOLD), pytest.raises((PeerLost, NotLinked)) as caught:
                await waiter
            assert isinstance(caught.value, LLMException)
            await gone(cluster)
            await is_back(cluster, cache)
            async with puppet(**options) as again:
                with lasting(TOLD):
                    status, _ = await cluster.datadist.link_clusters([again.info], 5000)
                    assert status is LLMStatusCode.LLM_SUCCESS
                await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [5], [6])
                verify(cluster.memory(cache), cache, [(t, 6, 1, 5) for t in range(2)])
                await cluster.datadist.unlink_clusters([again.info])
    after = soft_counters()
    for name in ("device_bytes", "adopted", "imported", "streams", "events", "comms"):
        assert after[name] == before[name], name


def table(members: int) -> str:
    devices = [{"device_id": str(i), "device_ip": f"127.0.0.{i + 1}", "rank_id": str(i)} for i in range(members)]
    return json.dumps(
        {
            "version": "1.0",
            "server_count": "1",
            "status": "completed",
            "server_list": [{"server_id": "127.0.0.1", "device": devices}],
        }
    )


def mapped() -> int:
    """Return how many pieces of memory softnpu has mapped into this process."""
    return Path("/proc/self/maps").read_text().count("/memfd:softnpu")


async def test_a_member_killed_while_the_others_meet() -> None:
    before = soft_counters()
    ranks = {1: 0, 2: 1, 3: 2}
    async with open_cluster(2, device_id=1, link_total_time=2) as cluster:
        cache = await cluster.blocks(DESC)
        async with puppet(device_id=0) as peer:
            mapped_before = mapped()
            theirs = asyncio.create_task(peer.ask("meet", "trio", ranks, table(3)))
            ours = asyncio.create_task(cluster.datadist.link("trio", ranks, table(3)))
            while mapped() == mapped_before:  # the page that two members share; the third never comes
                await turns(1)
            assert not ours.done()
            peer.send(signal.SIGKILL)
            with lasting(2 + TOLD), pytest.raises(LinkError):
                await ours
            with pytest.raises(ValueError, match="Expecting value"):
                await theirs
        async with puppet(device_id=0) as again:
            pair = {1: 0, 2: 1}
            theirs = asyncio.create_task(again.ask("meet", "trio", pair, table(2)))
            with lasting(3):
                number = await cluster.datadist.link("trio", pair, table(2))
                await cluster.datadist.wait_linked(1)
            await theirs
            await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [5], [6])
            verify(cluster.memory(cache), cache, [(t, 6, 1, 5) for t in range(2)])
            again.send(signal.SIGKILL)
            await gone(cluster)
            await cluster.datadist.unlink(number)
    after = soft_counters()
    for name in ("device_bytes", "adopted", "imported", "streams", "events", "comms"):
        assert after[name] == before[name], name


@interruptible
async def test_a_peer_killed_in_any_moment_of_linking() -> None:
    """The client is told in time, whenever it happened, and a new peer of this id is welcome."""
    async with open_cluster(2, device_id=7) as cluster:
        cache = await cluster.blocks(DESC)
        for count in (0, 2, 8, 32, 128):
            async with puppet() as peer:
                link = asyncio.create_task(cluster.datadist.link_clusters([peer.info], 5000))
                await turns(count)
                peer.send(signal.SIGKILL)
                with lasting(TOLD + 1.0):  # a channel that is being opened is looked after once a second
                    await link
                    await gone(cluster)
        async with puppet() as again:
            assert (await cluster.datadist.link_clusters([again.info], 5000))[0] is LLMStatusCode.LLM_SUCCESS
            await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [5], [6])
            again.send(signal.SIGKILL)
            with pytest.raises((PeerLost, LinkClosed, NotLinked)):
                await pulling(cluster, cache, again, asyncio.Event())
