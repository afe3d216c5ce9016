"""The calls of a context cache are counted by operation and status."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiodatadist._context_caching.pools.contract import PoolUnreachable
from aiodatadist.context_caching import (
    CcConfig_v1,
    ContextCache,
    EmsInvalidArgument,
    EmsIoError,
    HealthGate,
    MemoryPool,
)

CONFIG = CcConfig_v1(rank_id=0, device_id=0, model_id="model")
CHUNKS = [[(0, 16), (16, 16)]]


class Failing(MemoryPool):
    """Every question finds no answer once it is told to."""

    is_gone = False

    async def exists_many(self, *args: object, **kwargs: object) -> list[bool]:
        if self.is_gone:
            raise PoolUnreachable("gone")
        return await super().exists_many(*args, **kwargs)  # type: ignore[arg-type]


async def opened(pool: MemoryPool, gate: HealthGate | None = None) -> ContextCache:
    cache = await ContextCache.open(CONFIG, pool, gate=gate)
    await cache.register_kvcache([[np.zeros((4, 16, 8), np.float16)]])
    return cache


async def test_calls_are_counted_by_operation_and_status() -> None:
    pool = await MemoryPool.open(1 << 20)
    async with await opened(pool) as cache:
        await cache.save([1, 2], chunks=CHUNKS)
        await cache.load([1, 2], chunks=CHUNKS)
        await cache.load([3, 4], chunks=CHUNKS)
        assert await cache.match_prefix([1, 2, 3]) == 2
        await cache.remove([1])
        with pytest.raises(EmsInvalidArgument):
            await cache.load([], chunks=CHUNKS)
        stopped = cache.start_load([2, 5], chunks=CHUNKS)
        assert cache.figures().calls["load"].running == 1
        stopped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped
        figures = cache.figures()
    statuses = {operation: dict(flow.statuses) for operation, flow in figures.calls.items()}
    assert statuses == {
        "save": {"LLM_SUCCESS": 1},
        "load": {"LLM_SUCCESS": 2, "CANCELLED": 1},
        "exists": {"LLM_SUCCESS": 1},
        "remove": {"LLM_SUCCESS": 1},
    }
    assert all(flow.running == 0 for flow in figures.calls.values())
    assert figures.calls["load"].seconds > 0
    assert (figures.statistics.saved, figures.statistics.loaded, figures.statistics.missed) == (2, 2, 2)
    assert (figures.pool, figures.is_used) == (pool.capabilities.name, True)
    await pool.aclose()


async def test_a_pool_that_does_not_answer_is_counted_and_then_not_asked() -> None:
    pool = await Failing.open(1 << 20)
    async with await opened(pool, HealthGate()) as cache:
        pool.is_gone = True
        with pytest.raises(EmsIoError):
            await cache.save([1, 2], chunks=CHUNKS)
        assert (await cache.load([1, 2], chunks=CHUNKS)).success == 0
        assert (await cache.exists([1, 2])).success == 0
        figures = cache.figures()
    assert not figures.is_used
    statuses = {operation: dict(flow.statuses) for operation, flow in figures.calls.items()}
    assert statuses == {"save": {"EMS_IO_ERROR": 1}, "load": {"SKIPPED": 1}, "exists": {"SKIPPED": 1}}


async def test_exists_that_finds_no_answer_is_no_success() -> None:
    pool = await Failing.open(1 << 20)
    async with await opened(pool) as cache:
        pool.is_gone = True
        await cache.exists([1])
        await cache.exists_values(["a"])
        calls = cache.figures().calls
    assert calls["exists"].statuses == {"EMS_IO_ERROR": 1}
    assert calls["exists_values"].statuses == {"EMS_IO_ERROR": 1}
