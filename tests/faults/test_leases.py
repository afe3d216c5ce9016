"""Memory is given back when nothing can land in it, or be read from it, any more: not earlier, and not never."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheNotFound,
    DataType,
    LinkError,
    LLMException,
    LLMStatusCode,
    OutOfMemory,
    ParamInvalid,
    Placement,
    StuckError,
    TransferTimeout,
)
from aiodatadist.testing import (
    Cluster,
    cluster_info,
    inside,
    linked_pair,
    open_cluster,
    soft_counters,
    soft_fault,
    soft_faults_cleared,
)
from tests import children
from tests.faults.test_liveness import BRISK, DESC, DETECTED, POOL, gone, linked_to, puppet
from tests.stopwatch import lasting

BLOCKS = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
SLOTS = CacheDesc(2, [4, 1 << 16], DataType.DT_UINT8)
modes = pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "request"])


@asynccontextmanager
async def owner_and_pullers(
    count: int, owner_timeout: int = 1000, puller_timeout: int = 1000, **options: Any
) -> AsyncIterator[tuple[Cluster, list[Cluster]]]:
    async with AsyncExitStack() as stack:
        options = {"mem_pool_cfg": POOL, **options}
        owner = await stack.enter_async_context(open_cluster(1, sync_kv_timeout=owner_timeout, **options))
        pullers = []
        for i in range(2, 2 + count):
            puller = open_cluster(i, device_id=i, sync_kv_timeout=puller_timeout, **options)
            pullers.append(await stack.enter_async_context(puller))
            status, _ = await pullers[-1].datadist.link_clusters([cluster_info(owner)], 5000)
            assert status is LLMStatusCode.LLM_SUCCESS
        yield owner, pullers


def fill(cluster: Cluster, cache: Cache, value: int) -> None:
    for array in cluster.datadist.cache_manager.arrays(cache):
        array[:] = value


def free(cluster: Cluster) -> int:
    return cluster.datadist.cache_manager.pool_usage()[Placement.DEVICE].free


# ---- waiting for peers ----


@pytest.mark.parametrize("puller_timeout", [800, 30_000], ids=["transfer_times_out", "revocation_stops_it"])
async def test_a_deallocation_waits_for_a_peer_that_reads(puller_timeout: int) -> None:
    async with owner_and_pullers(1, 800, puller_timeout) as (owner, (puller,)):
        whole = free(owner)
        lent = await owner.datadist.cache_manager.allocate_blocks_cache(BLOCKS, BlocksCacheKey(1))
        into = await puller.blocks(BLOCKS)
        pull = puller.datadist.cache_manager.pull_blocks
        await pull(BlocksCacheKey(1), into, [0], [0])
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            task = pull(BlocksCacheKey(1), into, [1], [1])
            with lasting(0.8 + 0.5, at_least=0.7):
                deallocation = asyncio.create_task(owner.datadist.cache_manager.deallocate_blocks_cache(lent))
                await task.get_results(200)
                assert not task.done()
                assert not deallocation.done()
                assert free(owner) < whole, "it was given back while a peer reads"
                await deallocation
        assert task.done()
        assert free(owner) == whole
        if puller_timeout == 300:
            assert isinstance(task.exception(), TransferTimeout)
        await owner.blocks(BLOCKS, 7)
        await pull(BlocksCacheKey(1, 7), into, [1], [1])


async def test_a_peer_that_never_gives_back_costs_its_link_not_the_memory() -> None:
    async with puppet(**BRISK) as peer, linked_to(peer, **BRISK, mem_pool_cfg=POOL) as (cluster, _):
        whole = free(cluster)
        manager = cluster.datadist.cache_manager
        lent = await manager.allocate_blocks_cache(DESC, BlocksCacheKey(2, 5))
        await peer.ask("push_for_ever", 5)
        peer.send(signal.SIGSTOP)
        with lasting(DETECTED):
            await manager.deallocate_blocks_cache(lent)
        withheld = manager.pool_usage()[
            Placement.DEVICE
        ].withheld  # all of it, if it was stopped in the middle of a write
        assert free(cluster) == whole - withheld
        assert "gone already" in await gone(cluster) or not cluster.datadist.statistics().links


async def test_one_key_is_removed_while_a_peer_asks_for_another_of_the_same_cache() -> None:
    async with owner_and_pullers(1, 300, 300) as (owner, (puller,)):
        manager, pull = owner.datadist.cache_manager, puller.datadist.cache_manager.pull_cache
        lent = await manager.allocate_cache(SLOTS, [CacheKey(1, 1), CacheKey(1, 2)])
        into = await puller.contiguous(SLOTS)
        await pull(CacheKey(1, 1), into, 0)
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            hangs = pull(CacheKey(1, 1), into, 0)
            removal = asyncio.create_task(manager.remove_cache_key(CacheKey(1, 1)))
            await anyio.wait_all_tasks_blocked()
            asks = pull(CacheKey(1, 2), into, 1)  # its lookup is answered when the cache was given back
            await hangs.synchronize()
            await asks
            with anyio.fail_after(20):
                await removal
        with pytest.raises(CacheNotFound):
            await pull(CacheKey(1, 1), into, 0)
        await pull(CacheKey(1, 2), into, 0)
        await manager.deallocate_cache(lent)


async def test_a_cancelled_removal_is_waited_for_by_the_next_one() -> None:
    async with owner_and_pullers(1, 300, 300) as (owner, (puller,)):
        manager, pull = owner.datadist.cache_manager, puller.datadist.cache_manager.pull_cache
        lent = await manager.allocate_cache(SLOTS, [CacheKey(1, 1), CacheKey(1, 2)])
        into = await puller.contiguous(SLOTS)
        await pull(CacheKey(1, 1), into, 0)
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            hangs = pull(CacheKey(1, 1), into, 0)
            with anyio.move_on_after(0):
                await manager.remove_cache_key(CacheKey(1, 1))
            await manager.remove_cache_key(CacheKey(1, 1))
            with pytest.raises(CacheNotFound):
                await pull(CacheKey(1, 1), into, 1)
            await hangs.synchronize()
        await pull(CacheKey(1, 2), into, 0)
        await manager.deallocate_cache(lent)


# ---- keys ----


async def test_a_key_is_consumed_once_also_by_two_pulls_at_the_same_time() -> None:
    async with owner_and_pullers(3, 5000, 5000, enable_remote_cache_accessible=False) as (owner, pullers):
        whole = free(owner)
        lent = await owner.datadist.cache_manager.allocate_cache(SLOTS, [CacheKey(1, 9)])
        caches = [await puller.contiguous(SLOTS) for puller in pullers]
        tasks = [
            pullers[i % 3].datadist.cache_manager.pull_cache(CacheKey(1, 9), caches[i % 3], i % 4) for i in range(50)
        ]
        results = [(await task.get_results(5000))[0] for task in tasks]
        assert results.count(LLMStatusCode.LLM_SUCCESS) == 1
        assert results.count(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST) == 49
        await owner.datadist.cache_manager.deallocate_cache(lent)
        assert free(owner) == whole


# ---- memory that has another owner now ----


@modes
async def test_a_deallocated_cache_is_never_pulled_again(one_sided: bool) -> None:
    async with owner_and_pullers(1, enable_remote_cache_accessible=one_sided) as (owner, (puller,)):
        manager, pull = owner.datadist.cache_manager, puller.datadist.cache_manager.pull_blocks
        into = await puller.blocks(BLOCKS)
        old = await manager.allocate_blocks_cache(BLOCKS, BlocksCacheKey(1, 1))
        where, old_id = list(old.tensor_addrs), old.cache_id
        by_id = CacheKeyByIdAndIndex(1, old_id)
        await pull(BlocksCacheKey(1, 1), into, [0], [0])
        await pull(by_id, into, [0], [0])
        await manager.deallocate_blocks_cache(old)
        new = await manager.allocate_blocks_cache(BLOCKS, BlocksCacheKey(1, 2))
        assert list(new.tensor_addrs) == where, "not the same pages: nothing is tested"
        fill(owner, new, 0x99)
        memory = puller.memory(into)
        memory.view()[:] = bytes(memory.nbytes)
        for key in (BlocksCacheKey(1, 1), by_id):
            with pytest.raises(CacheNotFound):
                await pull(key, into, [0], [0])
        assert not any(memory.view())


@modes
async def test_a_pull_that_meets_a_deallocation_brings_the_old_bytes_or_none(one_sided: bool) -> None:
    patience = {"owner_timeout": 20_000, "puller_timeout": 20_000}
    async with owner_and_pullers(1, **patience, enable_remote_cache_accessible=one_sided) as (owner, (puller,)):
        manager, pull = owner.datadist.cache_manager, puller.datadist.cache_manager.pull_blocks
        into = await puller.blocks(BLOCKS)
        view = puller.memory(into).view()
        seen = set()
        for round_ in range(60):
            old = await manager.allocate_blocks_cache(BLOCKS, BlocksCacheKey(1, 1))
            fill(owner, old, 0x11)
            if round_ % 3:
                await pull(BlocksCacheKey(1, 1), into, [0], [0])
            view[:] = bytes(len(view))

            async def give_away(old: Any = old, ticks: int = round_ // 3) -> None:
                for _ in range(ticks % 10):
                    await asyncio.sleep(0)
                await manager.deallocate_blocks_cache(old)
                new = await manager.allocate_blocks_cache(BLOCKS, BlocksCacheKey(1, 2))
                fill(owner, new, 0x99)
                await manager.deallocate_blocks_cache(new)

            giving = asyncio.create_task(give_away())
            for _ in range(round_ % 7):
                await asyncio.sleep(0)
            try:
                await pull(BlocksCacheKey(1, 1), into, range(8), range(8))
                seen.add("old bytes")
                assert set(view) == {0x11}
            except CacheNotFound:
                seen.add("none")
                assert set(view) == {0}
            await giving
        assert seen == {"old bytes", "none"}


# ---- memory that the device keeps ----


@pytest.mark.parametrize("whose", ["own", "owner"])
async def test_memory_that_the_device_does_not_let_go_of_is_never_handed_out_again(whose: str) -> None:
    """In a process of its own, which it spoils."""
    process = await children.create_subprocess_exec(sys.executable, "-m", "tests.faults.test_leases", whose)
    with anyio.fail_after(30):
        assert await process.wait() == 0


async def spoil(whose: str) -> None:
    try:
        await (_spoil() if whose == "own" else _spoil_as_its_owner())
    except ParamInvalid as error:  # finalize() cannot take the memory back; what failed before is its context
        if error.__context__ is not None or "still bound" not in str(error):
            raise


async def _spoil() -> None:
    async with linked_pair(BLOCKS, mem_pool_cfg='{"memory_size": 1048576}') as (_, decoder, _, other):
        manager = decoder.datadist.cache_manager
        cache = await manager.allocate_blocks_cache(BLOCKS)
        rest = free(decoder)
        pages = [range(a, a + BLOCKS.size) for a in cache.tensor_addrs]
        await manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang;aclrtStreamAbort:fail=507000@*")
            submitted = tasks()
            task = manager.pull_blocks(BlocksCacheKey(1), cache, [1], [1])
            waiter = asyncio.ensure_future(_wait(task))
            await asyncio.sleep(0)
            while tasks() == submitted:  # noqa: ASYNC110 - softnpu has no event for it; one that has not begun is not stuck
                await asyncio.sleep(0.001)
            waiter.cancel()
            with lasting(5), pytest.raises(asyncio.CancelledError):
                await waiter
            assert isinstance(task.exception(), StuckError), task.exception()
            why = await gone(decoder)
            assert "let go" in why or why == "gone already", why
            with pytest.raises(LLMException, match="never released"):
                await manager.deallocate_blocks_cache(cache)
            assert free(decoder) == rest
            taken = []
            small = CacheDesc(1, [1, 4096], DataType.DT_UINT8)
            with contextlib.suppress(OutOfMemory):
                for _ in range(1000):
                    taken.append(await manager.allocate_blocks_cache(small))
            assert 0 < len(taken) < 1000
            for each in taken:
                assert not any(each.tensor_addrs[0] in page for page in pages)
                await manager.deallocate_blocks_cache(each)
            entry = inside(decoder.datadist).registry.table.find(other.cache_id)
            assert entry is not None
            assert not entry.is_poisoned, "a cache that had no part in it"


async def _spoil_as_its_owner() -> None:
    """Hold the destination at the owner's device until the channel closes. An answer would say that nothing lands."""
    options: dict[str, Any] = {"mem_pool_cfg": '{"memory_size": 1048576}', "enable_remote_cache_accessible": False}
    async with linked_pair(BLOCKS, **options) as (prompt, decoder, _, _):
        manager = decoder.datadist.cache_manager
        cache = await manager.allocate_blocks_cache(BLOCKS)
        await manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        with soft_faults_cleared():
            soft_fault("HcclBatchPut:hang;aclrtStreamAbort:fail=507000@*")
            task = manager.pull_blocks(BlocksCacheKey(1), cache, [1], [1])
            with pytest.raises(LinkError):
                await task
            await gone(prompt, 2)
            await gone(decoder)


def tasks() -> int:
    """Count the tasks that streams got so far."""
    counters = soft_counters()
    return counters["tasks_inline"] + counters["tasks_queued"]


async def _wait(task: Any) -> None:
    await task


if __name__ == "__main__":
    anyio.run(spoil, sys.argv[1])
