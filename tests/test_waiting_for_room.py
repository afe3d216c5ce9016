"""An allocation may wait until there is room in the pool, and says why it got none."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheManager,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    OutOfMemory,
    ParamInvalid,
    Placement,
)
from aiodatadist.blocking import LLMDataDist as BlockingLLMDataDist
from aiodatadist.testing import linked_pair, open_cluster, soft_fault, soft_faults_cleared

PAGE = 4096
POOL = {"memory_size": 8 * PAGE, "page_shift": 12}
ALL = CacheDesc(2, [4, PAGE], DataType.DT_UINT8)
"""The whole pool."""
HALF = CacheDesc(2, [2, PAGE], DataType.DT_UINT8)


@asynccontextmanager
async def full() -> AsyncIterator[tuple[LLMDataDist, CacheManager, Cache]]:
    """Open a cluster whose pool is full with one cache."""
    async with open_cluster(1, mem_pool_cfg=POOL) as cluster:
        manager = cluster.datadist.cache_manager
        yield cluster.datadist, manager, await manager.allocate_blocks_cache(ALL)


async def begun(*calls: Awaitable[Cache]) -> list[asyncio.Task[Cache]]:
    """Start the calls, which then wait in this order."""

    async def wait_for(call: Awaitable[Cache]) -> Cache:
        return await call

    tasks = [asyncio.create_task(wait_for(call), name=f"caller {i}") for i, call in enumerate(calls)]
    await anyio.wait_all_tasks_blocked()
    assert not any(task.done() for task in tasks)
    return tasks


async def test_memory_that_comes_back_goes_to_those_that_wait_in_their_order() -> None:
    async with full() as (_, manager, first):
        large, small, smaller = await begun(
            manager.allocate_blocks_cache(ALL, timeout=30),
            manager.allocate_cache(HALF, timeout=30.5),
            manager.allocate_blocks_cache(HALF, BlocksCacheKey(1, 5), timeout=math.inf),
        )
        await manager.deallocate_blocks_cache(first)
        cache = await large
        await anyio.wait_all_tasks_blocked()
        assert not small.done()
        await manager.deallocate_blocks_cache(cache)
        for task in (small, smaller):
            assert (await task).tensor_addrs
        assert manager.pool_usage()[Placement.DEVICE].free == 0


async def test_without_a_timeout_it_fails_at_once_and_does_not_pass_those_that_wait() -> None:
    async with open_cluster(1, mem_pool_cfg=POOL) as cluster:
        manager = cluster.datadist.cache_manager
        half = await manager.allocate_cache(HALF)
        (waiter,) = await begun(manager.allocate_cache(ALL, timeout=30))
        for seconds in (None, 0):
            with pytest.raises(OutOfMemory, match="behind 1 in line: first 2 x 16384 bytes for task 'caller 0'"):
                await manager.allocate_cache(HALF, timeout=seconds)
        await manager.deallocate_cache(half)
        assert (await waiter).tensor_addrs


async def test_a_wait_that_is_too_long_says_what_pins_the_memory() -> None:
    options: dict[str, Any] = {"mem_pool_cfg": POOL, "sync_kv_timeout": 20_000}
    async with linked_pair(ALL, **options) as (_, decoder, _, _):
        manager = decoder.datadist.cache_manager
        target = await manager.allocate_blocks_cache(ALL)
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            pull = manager.pull_blocks(BlocksCacheKey(1), target, [0], [0])
            with pytest.raises(OutOfMemory) as caught:
                await manager.allocate_cache(HALF, timeout=0.1)
            pull.cancel()
        assert caught.value.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY
        message = str(caught.value)
        assert "0 of 32768 bytes are free, the largest piece has 0, 32768 are pinned by transfers and peers" in message
        assert f"(since the longest: cache {target.cache_id}, for " in message
        assert "it waited for 0.1" in message
        await asyncio.wait([asyncio.ensure_future(_ended(pull))])


async def _ended(pull: Any) -> None:
    await pull


async def test_a_key_that_another_bound_meanwhile_is_refused_in_its_turn() -> None:
    async with full() as (_, manager, first):
        one, two, three = await begun(
            manager.allocate_cache(HALF, [CacheKey(1, 7)], timeout=30),
            manager.allocate_cache(HALF, [CacheKey(1, 7)], timeout=30),
            manager.allocate_cache(HALF, [CacheKey(1, 8)], timeout=30),
        )
        await manager.deallocate_blocks_cache(first)
        assert (await one).tensor_addrs
        with pytest.raises(ParamInvalid, match="is bound to a slot already"):
            await two
        assert (await three).tensor_addrs


async def test_a_key_that_is_bound_already_is_not_waited_for() -> None:
    async with full() as (_, manager, _):
        with pytest.raises(ParamInvalid, match="num_tensors"):
            await manager.allocate_cache(CacheDesc(0, [1], DataType.DT_UINT8), timeout=30)
    async with open_cluster(1, mem_pool_cfg=POOL) as cluster:
        manager = cluster.datadist.cache_manager
        await manager.allocate_cache(ALL, [CacheKey(1, 7)])
        with pytest.raises(ParamInvalid, match="is bound to a slot already"):
            await manager.allocate_cache(HALF, [CacheKey(1, 7)], timeout=30)


async def test_a_wait_that_is_cancelled_leaves_nothing() -> None:
    async with full() as (_, manager, first):
        gone, stays = await begun(manager.allocate_cache(ALL, timeout=30), manager.allocate_cache(HALF, timeout=30))
        gone.cancel()
        await asyncio.wait([gone])
        assert gone.cancelled()
        await manager.deallocate_blocks_cache(first)
        await manager.deallocate_cache(await stays)
        usage = manager.pool_usage()[Placement.DEVICE]
        assert usage.free == usage.largest == usage.total


async def test_a_cluster_that_is_finalized_lets_none_wait() -> None:
    async with full() as (datadist, manager, _):
        tasks = await begun(*(manager.allocate_cache(HALF, timeout=math.inf) for _ in range(3)))
        await datadist.finalize()
        for task in tasks:
            with pytest.raises(LLMException, match="cluster 1 is finalized") as caught:
                await task
            assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED


@pytest.mark.parametrize(
    ("timeout", "error", "words"),
    [
        ("1", TypeError, "timeout is '1' of type str: must be a number of seconds"),
        (True, TypeError, "timeout is True of type bool"),
        (-0.5, ValueError, "timeout is -0.5: must be at least 0 seconds"),
        (math.nan, ValueError, "timeout is nan: must be at least 0 seconds"),
    ],
)
async def test_a_timeout_is_a_number_of_seconds(timeout: Any, error: type[Exception], words: str) -> None:
    async with open_cluster(1, mem_pool_cfg=POOL) as cluster:
        manager = cluster.datadist.cache_manager
        allocations: list[Callable[[], Awaitable[Cache]]] = [
            lambda: manager.allocate_cache(HALF, timeout=timeout),
            lambda: manager.allocate_blocks_cache(HALF, timeout=timeout),
        ]
        for allocate in allocations:
            with pytest.raises(error, match=words):
                await allocate()
        assert manager.pool_usage()[Placement.DEVICE].free == 8 * PAGE


def test_a_thread_waits_for_what_another_gives_back() -> None:
    datadist = BlockingLLMDataDist(LLMRole.DECODER, 1)
    datadist.init(LLMConfig(mem_pool_cfg=POOL).generate_options())
    try:
        manager = datadist.cache_manager
        first = manager.allocate_blocks_cache(ALL)
        with pytest.raises(OutOfMemory, match="it waited for"):
            manager.allocate_cache(ALL, timeout=0.05)
        got: list[Cache] = []
        thread = threading.Thread(target=lambda: got.append(manager.allocate_cache(ALL, timeout=30)))
        thread.start()
        manager.deallocate_blocks_cache(first)
        thread.join()
        assert got[0].tensor_addrs
    finally:
        datadist.finalize()
