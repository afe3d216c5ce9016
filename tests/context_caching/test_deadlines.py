"""The time of a call counts from the call, also while it waits for its turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from aiodatadist._context_caching.pools.contract import PoolTimeout
from aiodatadist._context_caching.transfer.pipeline import LATE_TOLERANCE
from aiodatadist._testing.views import take_all_turns, transfers_of
from aiodatadist.context_caching import CcResult, CcStatus, ContextCache, EmsTimeout, HealthGate, MemoryPool
from tests.context_caching.fakes import Foreign, fails_with, never
from tests.context_caching.kit import ROOM, Kv, by_slots, opened
from tests.held import let_pass
from tests.stopwatch import lasting

LIMIT = 0.05
SLACK = 0.1

Call = Callable[[ContextCache, float], Awaitable[CcResult]]
calls = pytest.mark.parametrize(
    "call",
    [
        lambda cache, timeout: cache.save([1, 2], **by_slots([0, 1]), timeout=timeout),
        lambda cache, timeout: cache.load([1, 2], **by_slots([0, 1]), timeout=timeout),
        lambda cache, timeout: cache.save_values(["a", "b"], [[bytearray(8)], [bytearray(8)]], timeout=timeout),
        lambda cache, timeout: cache.load_values(["a", "b"], [[bytearray(8)], [bytearray(8)]], timeout=timeout),
        lambda cache, timeout: cache.start_save([1, 2], **by_slots([0, 1]), timeout=timeout),
        lambda cache, timeout: cache.start_load([1, 2], **by_slots([0, 1]), timeout=timeout),
    ],
    ids=["save", "load", "save_values", "load_values", "start_save", "start_load"],
)


@asynccontextmanager
async def silent(gate: HealthGate | None = None) -> AsyncIterator[ContextCache]:
    """Open a cache whose pool never answers."""
    async with await MemoryPool.open(ROOM) as inner:
        pool = Foreign(inner)
        async with opened(pool, Kv(), gate=gate) as cache:
            pool.misdeeds["exists_many"] = pool.misdeeds["get_many"] = never
            yield cache


class Turnstile:
    """A gate: before it is opened, no call gets a turn."""

    def __init__(self, cache: ContextCache, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aiodatadist._context_caching.transfer.start_limiter.PER_ROUND", 0)
        self._patch = monkeypatch
        take_all_turns(cache)

    async def open_after(self, seconds: float) -> None:
        await let_pass(seconds)
        self._patch.undo()


async def timed_out(cache: ContextCache, call: Call) -> None:
    with anyio.fail_after(20), lasting(LIMIT + SLACK, LIMIT), pytest.raises(EmsTimeout) as caught:
        await call(cache, LIMIT)
    assert caught.value.partial == CcResult(0, 2)
    assert caught.value.partial.details == (CcStatus.TIMEOUT,) * 2
    assert f" within {LIMIT} s" in caught.value.message()  # what was allowed, and not what a late turn left of it


@calls
async def test_a_turn_that_never_comes_costs_the_deadline(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    async with silent() as cache:
        Turnstile(cache, monkeypatch)
        await timed_out(cache, call)
        assert not transfers_of(cache)


@calls
async def test_a_turn_that_comes_late_leaves_the_rest(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    async with silent() as cache, anyio.create_task_group() as group:
        group.start_soon(Turnstile(cache, monkeypatch).open_after, 0.6 * LIMIT)
        await timed_out(cache, call)


async def test_a_deadline_is_said_in_seconds(caplog: pytest.LogCaptureFixture) -> None:
    async with await MemoryPool.open(ROOM) as inner, opened(pool := Foreign(inner), Kv()) as cache:
        await cache.save([1], **by_slots([0]))
        pool.misdeeds["exists_many"] = pool.misdeeds["remove_many"] = pool.misdeeds["get_many"] = never
        with pytest.raises(EmsTimeout, match=r"^load of 1 keys: not done within 0\.05 s "):
            await cache.load([1], **by_slots([0]), timeout=0.05)
        with pytest.raises(EmsTimeout, match=r"^remove of 1 hashes within 0\.05 s: "):
            await cache.remove([1], timeout=0.05)
        with pytest.raises(EmsTimeout, match=r"^remove of 2 keys within 0\.05 s: "):
            await cache.remove_values(["a", "b"], timeout=0.05)
        await cache.exists([1], timeout=0.05)
        assert "exists of 1 hashes found nothing within 0.05 s: " in caplog.text
        pool.misdeeds["get_many"] = fails_with(PoolTimeout("too slow"))
        with pytest.raises(EmsTimeout, match=r"^load of 1 keys within 5 s: too slow "):
            await cache.load([1], **by_slots([0]))
        with pytest.raises(EmsTimeout, match=r"^load of 1 keys: too slow "):
            await cache.load([1], **by_slots([0]), timeout=None)


async def test_exists_does_not_wait_longer_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with silent() as cache:
        Turnstile(cache, monkeypatch)
        with anyio.fail_after(20), lasting(LIMIT + SLACK, LIMIT):
            result = await cache.exists([1, 2], timeout=LIMIT)
        assert result.details == (CcStatus.TIMEOUT,) * 2


async def test_a_turn_that_never_came_is_no_fault_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = HealthGate()
    async with silent(gate) as cache:
        Turnstile(cache, monkeypatch)
        with anyio.fail_after(20):
            with pytest.raises(EmsTimeout):
                await cache.load([1], **by_slots([0]), timeout=0.01)
            await cache.exists([1], timeout=0.01)
        assert gate.is_open


async def test_without_time_a_turn_is_waited_for_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened("memory:", Kv(), read_cache_bytes=ROOM) as cache:
        await cache.save([1], **by_slots([0]))
        async with anyio.create_task_group() as group:
            group.start_soon(Turnstile(cache, monkeypatch).open_after, 2 * LATE_TOLERANCE)
            assert (await cache.exists([1], timeout=0)).success == 1
        async with anyio.create_task_group() as group:
            group.start_soon(Turnstile(cache, monkeypatch).open_after, 2 * LATE_TOLERANCE)
            assert (await cache.load([1], **by_slots([1]), timeout=0)).success == 1
