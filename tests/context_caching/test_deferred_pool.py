"""An engine that is not up when a cache is opened: with a gate the cache misses until it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from aiodatadist._context_caching.pools.contract import PoolKey, PoolRefused, PoolUnreachable
from aiodatadist._context_caching.pools.deferred import DeferredPool
from aiodatadist._context_caching.pools.open import PoolPlace
from aiodatadist._testing.views import pipeline_of
from aiodatadist.context_caching import (
    CcStatus,
    ContextCache,
    EmsIoError,
    HealthGate,
    HealthRules,
    KVPool,
    MemoryPool,
)
from tests.context_caching.fakes import Foreign
from tests.context_caching.kit import ROOM, Kv, by_slots, rank
from tests.context_caching.servers import (
    MooncakeLender,
    MooncakeMaster,
    RedisServer,
    need_mooncake,
    need_redis,
    running,
)

no_leaks = pytest.mark.usefixtures("no_leaks")

OPEN = "aiodatadist._context_caching.pools.open._open_engine"
SOON = HealthRules(probe_every=0.02, successes=2)


class Watched(HealthGate):
    """Says when it opens."""

    def __init__(self, rules: HealthRules = SOON) -> None:
        super().__init__(rules)
        self.opened = anyio.Event()

    def probed(self, healthy: bool, now: float) -> None:
        super().probed(healthy, now)
        if self.is_open:
            self.opened.set()


def redis() -> tuple[str, list[Any]]:
    need_redis()
    server = RedisServer()
    return server.url, [server]


def mooncake() -> tuple[str, list[Any]]:
    need_mooncake()
    master = MooncakeMaster()
    return master.url, [master, MooncakeLender(master)]


@pytest.mark.parametrize("engine", [redis, mooncake])
async def test_an_engine_may_come_up_later(
    engine: Callable[[], tuple[str, list[Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    url, servers = engine()
    kv, gate = Kv(), Watched()
    with pytest.raises(EmsIoError, match="the pool cannot be opened"):
        await ContextCache.open(rank(), url)
    async with await ContextCache.open(rank(), url, gate=gate) as cache:
        assert not gate.is_open
        await cache.register_kvcache(kv.layers)
        assert (await cache.save([1], **by_slots([0]))).details == (CcStatus.SKIPPED,)
        assert (await cache.exists([1])).details == (CcStatus.SKIPPED,)
        assert not await cache.check_health()
        with running(*servers):
            with anyio.fail_after(30):
                await gate.opened.wait()
            assert (await cache.save([1], **by_slots([0]), timeout=20)).success == 1
            saved = kv.rows(range(4))
            kv.wipe()
            assert (await cache.load([1], **by_slots([0]), timeout=20)).success == 1
            assert kv.rows(range(4)) == saved
    assert [m for m in caplog.messages if m.startswith("the pool cannot be opened now; each health check tries again")]


@no_leaks
async def test_who_is_refused_is_told_at_once() -> None:
    need_redis()
    gate = HealthGate()
    with running(server := RedisServer(options=["--requirepass", "secret"])):
        with pytest.raises(EmsIoError, match="the pool cannot be opened"):
            await ContextCache.open(rank(), f"redis://:wrong@127.0.0.1:{server.port}", gate=gate)
        async with await ContextCache.open(rank(), f"redis://:secret@127.0.0.1:{server.port}", gate=gate):
            assert gate.is_open


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Replace the opening of a pool. Yield the outcomes of the next attempts, for tests to change."""
    outcomes: list[Any] = [PoolUnreachable("no server there")]

    async def open_pool(url: str) -> KVPool:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        pool = await outcome()
        assert isinstance(pool, KVPool)
        return pool

    monkeypatch.setattr(OPEN, open_pool)
    yield outcomes
    assert not outcomes


async def in_memory() -> KVPool:
    return Foreign(await MemoryPool.open(ROOM))


@no_leaks
async def test_it_is_tried_again_whatever_went_wrong(opening: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    opening += [PoolUnreachable("still no server"), PoolRefused("who are you?"), RuntimeError("a bug"), in_memory]
    gate = Watched()
    async with await ContextCache.open(rank(), "redis://there", gate=gate) as cache:
        await cache.register_kvcache(Kv().layers)
        with anyio.fail_after(10):
            await gate.opened.wait()
        assert (await cache.save([1], **by_slots([0]))).success == 1
        assert (await cache.exists([1])).success == 1
        assert await cache.remove([1]) == 1
        assert await cache.check_health()
        assert len(await pipeline_of(cache).pool.nodes(deadline=anyio.current_time() + 1)) == 1
    assert [m for m in caplog.messages if m.startswith("the pool cannot be opened: ")] == [
        "the pool cannot be opened: who are you?",
        "the pool cannot be opened: a bug",
    ]
    assert "is probed in 0.0 s" in caplog.text


@no_leaks
async def test_what_needs_the_pool_itself_is_told_why_it_is_not_there(opening: list[Any]) -> None:
    gate = HealthGate()
    async with await ContextCache.open(rank(), "redis://there", gate=gate) as cache:
        with pytest.raises(EmsIoError, match="the pool is not open yet: no server there"):
            await cache.remove_values(["a"])


@no_leaks
@pytest.mark.parametrize("asked", ["stage", "put_many", "get_many", "exists_many", "remove_many", "nodes"])
async def test_a_pool_is_unreachable_until_it_is_there(asked: str) -> None:
    pool = DeferredPool(PoolPlace("redis://there"), PoolUnreachable("no server there"))
    given: dict[str, tuple[Any, ...]] = {"put_many": ([], []), "get_many": ([], []), "nodes": ()}
    with pytest.raises(PoolUnreachable, match="no server there"):
        await getattr(pool, asked)(*given.get(asked, ([PoolKey("a", "b", "c")],)), deadline=0.0)
    assert not await pool.healthy(deadline=0.0)
    await pool.aclose()


@no_leaks
async def test_closing_does_not_wait_for_an_engine_that_does_not_come(opening: list[Any]) -> None:
    began, cancelled = anyio.Event(), anyio.Event()

    async def hang() -> KVPool:
        began.set()
        try:
            await anyio.sleep_forever()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    opening.append(hang)
    async with await ContextCache.open(rank(), "redis://there", gate=Watched()):
        await began.wait()
    assert cancelled.is_set()
