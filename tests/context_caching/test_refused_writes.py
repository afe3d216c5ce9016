"""A pool that answers every question and stores nothing: it is told of, and is unhealthy until it takes a write."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import anyio
import pytest

from aiodatadist._context_caching.pools.contract import PoolKey, PoolUnreachable, PutStatus, Stage
from aiodatadist._testing.views import store_of
from aiodatadist.context_caching import CcStatus, HealthGate, HealthRules, MemoryPool
from tests.context_caching.engine_fixtures import mooncake_master, redis_server
from tests.context_caching.fakes import Foreign
from tests.context_caching.kit import ROOM, Kv, by_slots, opened
from tests.context_caching.servers import MooncakeMaster, RedisServer

__all__ = ["mooncake_master", "redis_server"]

WRONG_STATE = -706
"""A code of Mooncake's that says nothing of room, owners or the master."""


class ReadOnly(Foreign):
    """Answers to a put as it is told.

    Attributes:
        answer: of each key; None: it is put.
    """

    answer: PutStatus | None = None

    async def put_many(self, keys: Sequence[PoolKey], stages: Sequence[Stage], *, deadline: float) -> list[PutStatus]:
        if self.answer is None:
            return await super().put_many(keys, stages, deadline=deadline)
        for stage in stages:
            stage.release()
        return [self.answer] * len(keys)


@asynccontextmanager
async def read_only() -> AsyncIterator[ReadOnly]:
    async with await MemoryPool.open(ROOM) as inner:
        yield ReadOnly(inner)


async def saves(cache: Any, block: int) -> tuple[CcStatus, ...]:
    return tuple((await cache.save([block], **by_slots([block]))).details)


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - health checks make it so
        await anyio.sleep(0.001)


async def test_a_pool_that_refuses_writes_is_told_of_and_unhealthy_until_it_takes_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with read_only() as pool, opened(pool, Kv()) as cache:
        assert await saves(cache, 1) == (CcStatus.OK,)
        assert await cache.check_health()
        pool.answer = PutStatus.FAILED
        with caplog.at_level(logging.WARNING, "aiodatadist"):
            assert await saves(cache, 2) == (CcStatus.IO_ERROR,)
        assert "the foreign pool failed to store 1 of 1 values" in caplog.text
        assert cache.figures().incidents["write_refused"] == 1
        for _ in range(2):
            assert not await cache.check_health()
        assert (await cache.load([1], **by_slots([5]))).success == 1  # reads go on
        assert not await cache.check_health()
        pool.answer = None
        (before,) = await pool.nodes(deadline=math.inf)
        assert await cache.check_health()
        assert await pool.nodes(deadline=math.inf) == [before], "a health check leaves nothing behind"
        pool.asked.clear()
        assert await cache.check_health()
        assert not pool.asked["put_many"], "only a pool that refused is asked to take something"


async def test_a_write_that_is_taken_says_so_without_a_health_check() -> None:
    async with read_only() as pool, opened(pool, Kv()) as cache:
        pool.answer = PutStatus.FAILED
        await saves(cache, 1)
        pool.answer = None
        assert await saves(cache, 1) == (CcStatus.OK,)
        pool.asked.clear()
        assert await cache.check_health()
        assert not pool.asked["put_many"]


async def test_a_full_pool_stays_healthy_since_it_has_what_it_has() -> None:
    async with read_only() as pool, opened(pool, Kv()) as cache:
        pool.answer = PutStatus.REJECTED
        assert await saves(cache, 1) == (CcStatus.REJECTED,)
        assert await cache.check_health()
        pool.answer = PutStatus.FAILED
        await saves(cache, 2)
        pool.answer = PutStatus.REJECTED
        assert await cache.check_health()


async def test_a_gate_closes_and_opens_again() -> None:
    gate = HealthGate(HealthRules(probe_every=0.01, successes=2))
    async with read_only() as pool, opened(pool, Kv(), gate=gate) as cache:
        pool.answer = PutStatus.FAILED
        await saves(cache, 1)
        await until(lambda: not gate.is_open)
        assert await saves(cache, 1) == (CcStatus.SKIPPED,)
        pool.answer = None
        await until(lambda: gate.is_open)
        assert await saves(cache, 1) == (CcStatus.OK,)


async def test_a_pool_that_does_not_answer_to_the_write_of_a_health_check_is_unhealthy() -> None:
    async with read_only() as pool, opened(pool, Kv()) as cache:
        pool.answer = PutStatus.FAILED
        await saves(cache, 1)
        pool.answer = None

        async def gone() -> None:
            raise PoolUnreachable("gone")

        pool.misdeeds["put_many"] = gone
        assert not await cache.check_health()
        pool.misdeeds.clear()
        assert await cache.check_health()


# ---- engines ----


async def test_a_read_only_replica(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, Kv()) as cache:
        assert redis_server.ask("REPLICAOF", "127.0.0.1", "1").startswith(b"+OK")
        try:
            assert await saves(cache, 1) == (CcStatus.IO_ERROR,)
            assert not await cache.check_health()
        finally:
            assert redis_server.ask("REPLICAOF", "NO", "ONE").startswith(b"+OK")
        assert await cache.check_health()
        assert await saves(cache, 1) == (CcStatus.OK,)


@contextmanager
def refusing(pool: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wrap Mooncake's store so that it refuses a put. It is C++: its methods cannot be replaced."""

    class Store:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def batch_put_from(self, keys: list[str], *_: object) -> list[int]:
            return [WRONG_STATE] * len(keys)

    inner = store_of(pool)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_store", Store())
        yield


async def test_a_mooncake_store_that_refuses(
    mooncake_master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from aiodatadist._context_caching.pools.mooncake.pool import MooncakePool  # noqa: PLC0415 - absent elsewhere

    async with aclosing(await MooncakePool.open(mooncake_master.url)) as pool, opened(pool, Kv()) as cache:
        with refusing(pool, monkeypatch):
            with caplog.at_level(logging.WARNING, "aiodatadist"):
                assert await saves(cache, 1) == (CcStatus.IO_ERROR,)
            assert f"refuses to store 1 of 1 values: code {WRONG_STATE}" in caplog.text
            assert not await cache.check_health()
        assert await cache.check_health()
        assert await saves(cache, 1) == (CcStatus.OK,)
