"""A peer that is stopped in the middle of a write, loses its link, and goes on: nothing lands in memory that was given on.

The peer's device stands half-way in the write, so that the rest lands when the test says so.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
import numpy as np
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheNotFound,
    LLMClusterInfo,
    LLMStatusCode,
    OutOfMemory,
    PeerLost,
    Placement,
    PoolUsage,
)
from aiodatadist._cache.table import Entry
from aiodatadist.testing import Cluster, inside, open_cluster, soft_counters, soft_hold
from tests.faults.test_liveness import BLOCKS, DESC, POOL, Puppet, gone, linked_to, puppet
from tests.held import turns
from tests.profiles import at_night
from tests.stopwatch import lasting
from tests.strict.marks import any_memory

LENT, AGAIN, OTHER = 5, 6, 7
SIZE = 64 << 20
WHOLE = DESC.size * DESC.num_tensors
STOPPABLE: dict[str, Any] = {"heartbeat_interval": 0.1, "heartbeat_misses": 6}
"""A stopped peer is lost in 0.7 s; one that gets no core for half a second is not."""
LOST = {"PeerLost", "LinkClosed", "NotLinked", "LinkError", "TransferTimeout"}
LATE: dict[str, Any] = {"heartbeat_interval": 0.1, "heartbeat_misses": 24, "sync_kv_timeout": 2000}
"""A stopped peer is lost in 2.5 s, when the time of its transfer is over, too."""
modes = pytest.mark.parametrize("one_sided", [True, False], ids=["pushed", "served"])


def usage(cluster: Cluster) -> PoolUsage:
    return cluster.datadist.cache_manager.pool_usage()[Placement.DEVICE]


def entry_of(cluster: Cluster, cache_id: int) -> Entry:
    entry = inside(cluster.datadist).registry.table.find(cache_id)
    assert entry is not None
    return entry


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds: nothing tells a caller."""
    with anyio.fail_after(20):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.001)


class Memory:
    """Memory of the test's cluster into which a peer writes, and what becomes of it when its cache is given up."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.manager = cluster.datadist.cache_manager
        self.arrays: list[Any] = []

    async def lend(self) -> Cache:
        raise NotImplementedError

    async def give_up(self, cache: Cache, peer: Puppet, number: signal.Signals) -> None:
        """Return when the memory has another owner. A withheld peer is sent the signal, where it has to be waited for."""
        raise NotImplementedError

    async def end(self) -> None:
        self.arrays.clear()

    def fill(self) -> None:
        for array in self.arrays:
            array[:] = 0x77

    def check(self) -> None:
        stray = sum(int((array != 0x77).sum()) for array in self.arrays)
        assert stray == 0, f"{stray} bytes in memory that was given on"


class Pool(Memory):
    """Pages of a pool: they are given to another cache, and another. What is withheld is not among them."""

    async def lend(self) -> Cache:
        return await self.manager.allocate_blocks_cache(DESC, BlocksCacheKey(2, LENT))

    async def give_up(self, cache: Cache, peer: Puppet, number: signal.Signals) -> None:
        is_withheld = entry_of(self.cluster, cache.cache_id).is_withheld
        with lasting(1):
            await self.manager.deallocate_blocks_cache(cache)
        assert usage(self.cluster).withheld == (WHOLE if is_withheld else 0)
        assert usage(self.cluster).free == SIZE - usage(self.cluster).withheld
        with suppress(OutOfMemory):  # all that there is
            for model_id in itertools.count(AGAIN):
                again = await self.manager.allocate_blocks_cache(DESC, BlocksCacheKey(2, model_id))
                self.arrays += self.manager.arrays(again)
        assert len(self.arrays) == (2 if is_withheld else 4)
        del again

    async def end(self) -> None:
        await super().end()
        registry = inside(self.cluster.datadist).registry
        for entry in [entry for entry in registry.table if entry.pool is not None]:
            await self.manager.deallocate_blocks_cache(entry.cache)
        await until(lambda: usage(self.cluster).free == SIZE)
        assert usage(self.cluster) == PoolUsage(SIZE, SIZE, SIZE, 0)


class Own(Memory):
    """Memory of the caller's: it is hers when ``unregister_cache`` has returned, which waits for as long as it takes."""

    def make(self) -> list[Any]:
        memory = self.cluster.datadist.device.allocate(WHOLE)
        view = np.frombuffer(memory.view(), np.uint8)
        return [view[: DESC.size], view[DESC.size :]]

    async def lend(self) -> Cache:
        if not self.arrays:
            self.arrays = self.make()
        addresses = [array.ctypes.data for array in self.arrays]
        return await self.manager.register_blocks_cache(DESC, addresses, BlocksCacheKey(2, LENT), True)

    async def give_up(self, cache: Cache, peer: Puppet, number: signal.Signals) -> None:
        is_withheld = entry_of(self.cluster, cache.cache_id).is_withheld
        leaving = asyncio.create_task(self.manager.unregister_cache(cache.cache_id))
        if is_withheld:
            await turns()
            assert not leaving.done(), "a peer may still write there"
            peer.send(number)
            if number is signal.SIGCONT:
                await peer.ask("links")
                assert not leaving.done(), "the peer has not written the rest"
                await peer.ask("resume")
        with anyio.fail_after(20):
            await leaving

    async def end(self) -> None:
        pass


class Array(Own):
    """The same, of a kind that the peer reaches with process_vm_writev instead of mapping it."""

    def make(self) -> list[Any]:
        return [np.zeros(DESC.size, np.uint8) for _ in range(DESC.num_tensors)]


ARRAY = pytest.param(Array, marks=any_memory, id="Array")


class Scene:
    """A peer that writes into this process's memory without pause, and that can be stopped in the middle of it."""

    def __init__(self, peer: Puppet, cluster: Cluster, memory: Memory, one_sided: bool) -> None:
        self.peer = peer
        self.cluster = cluster
        self.memory = memory
        self.one_sided = one_sided

    async def stop_in_a_write(self) -> Cache:
        """Return the cache into which it wrote, and which is withheld; its link is gone by now."""
        cache = await self.memory.lend()
        if self.one_sided:
            assert await self.peer.ask("push_for_ever", LENT) is None
            await self.peer.ask("halt", "HcclBatchPut")
            self.peer.send(signal.SIGSTOP)
        else:
            await self.served(cache)
        await gone(self.cluster)
        assert entry_of(self.cluster, cache.cache_id).is_withheld
        return cache

    async def served(self, cache: Cache) -> None:
        pull_blocks = self.cluster.datadist.cache_manager.pull_blocks

        async def pull() -> None:
            while True:
                await pull_blocks(BlocksCacheKey(1), cache, BLOCKS, BLOCKS)

        await pull_blocks(BlocksCacheKey(1), cache, BLOCKS, BLOCKS)  # there is a channel that reaches it
        task = asyncio.create_task(pull())
        await self.peer.ask("halt", "HcclBatchPut")
        self.peer.send(signal.SIGSTOP)
        with pytest.raises(PeerLost):
            await task

    async def go_on(self) -> None:
        """Let the peer go on. Return once it knows that it has lost its link, and nothing of its is under way."""
        self.peer.send(signal.SIGCONT)
        await self.peer.ask("resume")
        if self.one_sided:
            assert await self.peer.ask("push_failed") in LOST
        await self.peer.ask("unlinked", 2)

    async def link_again(self) -> None:
        status, each = await self.cluster.datadist.link_clusters([self.peer.info], 10_000)
        assert status is LLMStatusCode.LLM_SUCCESS, each


@asynccontextmanager
async def scene(kind: type[Memory], one_sided: bool) -> AsyncIterator[Scene]:
    options = {**STOPPABLE, "enable_remote_cache_accessible": one_sided}
    async with puppet(**options) as peer, linked_to(peer, **options, mem_pool_cfg=POOL) as (cluster, _):
        yield Scene(peer, cluster, kind(cluster), one_sided)


# ---- given on ----


@modes
@pytest.mark.parametrize("kind", [Pool, Own, ARRAY])
async def test_no_byte_lands_in_memory_that_was_given_on(kind: type[Memory], one_sided: bool) -> None:
    async with scene(kind, one_sided) as s:
        for is_again in (False, True):
            if is_again:
                await s.link_again()
            cache = await s.stop_in_a_write()
            await s.memory.give_up(cache, s.peer, signal.SIGCONT)
            s.memory.fill()
            await s.go_on()
            s.memory.check()
            await s.memory.end()


@pytest.mark.parametrize("kind", [Pool, ARRAY])
async def test_memory_comes_back_when_the_peer_is_killed(kind: type[Memory]) -> None:
    async with scene(kind, one_sided=True) as s:
        cache = await s.stop_in_a_write()
        await s.memory.give_up(cache, s.peer, signal.SIGKILL)
        s.memory.fill()
        if kind is Pool:  # else it was killed already
            s.peer.send(signal.SIGKILL)
        await until(lambda: not usage(s.cluster).withheld)
        s.memory.check()
        await s.memory.end()


# ---- while it is withheld ----


async def test_a_cache_is_not_usable_while_the_channel_of_a_lost_link_is_being_closed() -> None:
    """Withhold the cache until the channel is closed: until then it is not known what the peer writes.

    Other peers that hold the cache do not matter.
    """
    options: dict[str, Any] = STOPPABLE
    async with scene(Pool, one_sided=True) as s:
        manager = s.cluster.datadist.cache_manager
        cache = await s.memory.lend()
        async with open_cluster(3, device_id=3, **options) as healthy:
            await pull_one(s.cluster, healthy)
            assert await s.peer.ask("push_for_ever", LENT) is None
            await s.peer.ask("halt", "HcclBatchPut")
            with soft_hold("HcclCommDestroy") as closing:
                s.peer.send(signal.SIGSTOP)
                await closing.arrived()
                assert not entry_of(s.cluster, cache.cache_id).is_withheld
                usable = asyncio.create_task(manager.wait_usable(cache))
                await turns()
                assert not usable.done(), "the peer is in the middle of a write"
            await gone(s.cluster)
            await turns()
            assert not usable.done()
            await s.go_on()
            await usable
        await manager.deallocate_blocks_cache(cache)
        await s.memory.end()


async def pull_one(cluster: Cluster, healthy: Cluster) -> None:
    """Have another cluster told of the cache."""
    mine, address = await healthy.blocks(DESC), cluster.datadist.listen_address
    assert address is not None
    assert (await healthy.datadist.link_clusters([_info(2, address)], 10_000))[0] is LLMStatusCode.LLM_SUCCESS
    await healthy.datadist.cache_manager.pull_blocks(BlocksCacheKey(2, LENT), mine, [0], [0])


async def test_a_request_fails_when_its_destination_is_withheld_and_not_before() -> None:
    """Its callbacks are the first to know, and may want the blocks for something else."""
    async with scene(Pool, one_sided=False) as s:
        manager = s.cluster.datadist.cache_manager
        cache = await s.memory.lend()
        entry = entry_of(s.cluster, cache.cache_id)
        await manager.pull_blocks(BlocksCacheKey(1), cache, BLOCKS, BLOCKS)  # there is a channel that reaches it
        seen: list[bool] = []

        async def pull() -> None:
            while True:
                request = manager.pull_blocks(BlocksCacheKey(1), cache, BLOCKS, BLOCKS)
                request.add_done_callback(lambda _: seen.append(entry.is_withheld))
                await request

        pulling = asyncio.create_task(pull())
        await s.peer.ask("halt", "HcclBatchPut")
        s.peer.send(signal.SIGSTOP)
        with pytest.raises(PeerLost):
            await pulling
        assert seen[-1], "a callback could have used the blocks"
        await s.go_on()
        await manager.wait_usable(cache)
        await manager.deallocate_blocks_cache(cache)
        await s.memory.end()


async def test_a_cache_that_is_withheld_is_not_used_until_the_peer_goes_on() -> None:
    options: dict[str, Any] = STOPPABLE
    async with scene(Pool, one_sided=True) as s:
        manager = s.cluster.datadist.cache_manager
        cache = await s.stop_in_a_write()
        async with open_cluster(3, device_id=3, **options) as healthy:
            await check_refused(s.cluster, healthy, cache)
        await s.go_on()
        entry = entry_of(s.cluster, cache.cache_id)
        await until(lambda: not entry.is_withheld)
        await manager.copy_blocks(cache, {0: [1]})
        await manager.deallocate_blocks_cache(cache)
        await s.memory.end()


async def check_refused(cluster: Cluster, healthy: Cluster, cache: Cache) -> None:
    """Check that its owner cannot use the cache and no peer learns of it, while all else continues."""
    manager = cluster.datadist.cache_manager
    assert usage(cluster) == PoolUsage(SIZE, SIZE - WHOLE, SIZE - WHOLE, WHOLE, WHOLE)
    with pytest.raises(CacheNotFound, match="withheld"):
        await manager.copy_blocks(cache, {0: [1]})
    mine = await healthy.blocks(DESC)
    address = cluster.datadist.listen_address
    assert address is not None
    assert (await healthy.datadist.link_clusters([_info(2, address)], 10_000))[0] is LLMStatusCode.LLM_SUCCESS
    await healthy.datadist.cache_manager.pull_blocks(BlocksCacheKey(2), mine, [0], [0])
    with pytest.raises(CacheNotFound):
        await healthy.datadist.cache_manager.pull_blocks(BlocksCacheKey(2, LENT), mine, [0], [0])
    await manager.allocate_blocks_cache(DESC, BlocksCacheKey(2, AGAIN))
    with pytest.raises(OutOfMemory, match=f"{WHOLE} of them by peers that were stopped"):
        await manager.allocate_blocks_cache(DESC, BlocksCacheKey(2, OTHER))


def _info(cluster_id: int, address: tuple[str, int]) -> LLMClusterInfo:
    info = LLMClusterInfo(cluster_id)
    info.append_remote_ip_info(*address)
    return info


@pytest.mark.parametrize("kind", [Pool, ARRAY])
async def test_a_cluster_is_finalized_while_memory_is_withheld(
    kind: type[Memory], caplog: pytest.LogCaptureFixture
) -> None:
    async with puppet(**STOPPABLE) as peer:
        before = soft_counters()
        with ExitStack() as ending:
            async with linked_to(peer, **STOPPABLE, mem_pool_cfg=POOL) as (cluster, _):
                s = Scene(peer, cluster, kind(cluster), one_sided=True)
                await s.stop_in_a_write()
                ending.enter_context(lasting(5))  # a stopped peer keeps no caller waiting
        after = soft_counters()
        for name in ("device_bytes", "pinned_bytes", "adopted", "imported", "streams", "events", "comms"):
            assert after[name] == before[name], name
        await s.go_on()
    assert f"process {peer.pid}) stopped in the middle of writing" in caplog.text
    if kind is Array:
        assert "do not use its memory" in caplog.text


# ---- readers ----


@pytest.mark.parametrize("options", [STOPPABLE, at_night(LATE)], ids=["lost", "late"])
async def test_a_pull_that_was_stopped_does_not_succeed_with_the_bytes_of_another_cache(
    options: dict[str, Any],
) -> None:
    async with puppet(**options) as peer, linked_to(peer, **options, mem_pool_cfg=POOL) as (cluster, _):
        s = Scene(peer, cluster, Pool(cluster), one_sided=True)
        for _ in range(2):
            cache = await s.memory.lend()
            for array in cluster.datadist.cache_manager.arrays(cache):
                array[:] = 0x11
            del array
            assert await peer.ask("pull_checked", LENT, 0x11) is None
            await peer.ask("halt", "HcclBatchGet")
            peer.send(signal.SIGSTOP)
            await gone(cluster)
            assert not entry_of(cluster, cache.cache_id).is_withheld, "who reads keeps nothing"
            await s.memory.give_up(cache, peer, signal.SIGCONT)
            s.memory.fill()
            await s.go_on()
            await s.memory.end()
            await s.link_again()
