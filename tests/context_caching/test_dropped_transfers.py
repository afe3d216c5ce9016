"""A save or load that fails is raised where it is asked for, or else logged once: never both, never neither."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import pytest

from aiodatadist._context_caching.pools.contract import PoolUnreachable
from aiodatadist.context_caching import ContextCache, EmsIoError, MemoryPool
from tests.context_caching.fakes import Foreign
from tests.context_caching.kit import ROOM, Kv, by_slots, opened


@asynccontextmanager
async def failing() -> AsyncIterator[ContextCache]:
    async with await MemoryPool.open(ROOM) as inner:
        pool = Foreign(inner)
        async with opened(pool, Kv()) as cache:
            pool.misdeeds["put_many"] = unreachable
            yield cache


async def unreachable() -> NoReturn:
    raise PoolUnreachable("gone")  # a new one each time: it keeps what was under way


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect()
    return [each.getMessage() for each in caplog.records if each.name == "aiodatadist._context_caching.transfer.handle"]


@pytest.mark.parametrize("ask", ["save", "await", "result"])
async def test_what_is_asked_for_is_raised_and_not_logged(ask: str, caplog: pytest.LogCaptureFixture) -> None:
    async def asking(cache: ContextCache) -> None:
        if ask == "save":
            await cache.save([1], **by_slots([0]))
        transfer = cache.start_save([1], **by_slots([0]))
        if ask == "await":
            await transfer
        await transfer.quiesced()
        transfer.result()

    async with failing() as cache:
        with pytest.raises(EmsIoError, match="gone"):
            await asking(cache)
    assert told(caplog) == []


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_is_dropped_is_logged_once(when: str, caplog: pytest.LogCaptureFixture) -> None:
    async with failing() as cache:
        transfer = cache.start_save([1], **by_slots([0]))
        over = asyncio.Event()
        transfer.add_done_callback(lambda _: over.set())
        if when == "after":
            await over.wait()
            assert told(caplog) == []
        del transfer
        await over.wait()
    (line,) = told(caplog)
    assert line.startswith("save of 1 keys failed, and its exception was never retrieved: ")
    assert "gone" in line
    assert f"; it was started at {__file__}:" in line
    assert line.endswith(", in test_what_is_dropped_is_logged_once")
