"""A cache whose closing goes wrong has let go of everything all the same, and says what went wrong."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from aiodatadist._context_caching.pools.contract import KVPool
from aiodatadist._testing.views import transfers_of
from aiodatadist.context_caching import ContextCache, EmsInternalError, MemoryPool, Transfer
from tests.context_caching.kit import ROOM, Kv, by_slots, rank


class Clinging(MemoryPool):
    """Closes, and complains."""

    async def aclose(self) -> None:
        await super().aclose()
        raise OSError("the connection was reset")


@pytest.fixture(autouse=True)
def clinging(monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> None:
    async def open_pool(url: str) -> KVPool:
        return await Clinging.open(ROOM)

    monkeypatch.setattr("aiodatadist._context_caching.cache.open_pool", open_pool)


async def test_the_layout_is_forgotten_and_the_error_is_told() -> None:
    cache = await ContextCache.open(rank())
    await cache.register_kvcache(Kv().layers)
    transfer = cache.start_save([1], **by_slots([0]))
    with pytest.raises(EmsInternalError, match=r"not closed properly.*the connection was reset"):
        await cache.aclose()
    assert transfer.done()
    assert cache._layout is None
    assert not await cache.check_health()
    await cache.aclose()


def test_the_error_is_told_also_when_the_loop_has_ended() -> None:
    cache = asyncio.run(ContextCache.open(rank()))
    with pytest.raises(EmsInternalError, match=r"not closed properly.*the connection was reset"):
        asyncio.run(cache.aclose())
    asyncio.run(cache.aclose())


async def test_who_closes_it_too_waits_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closing, may_close = asyncio.Event(), asyncio.Event()

    class Slow(MemoryPool):
        async def aclose(self) -> None:
            closing.set()
            await may_close.wait()
            await super().aclose()

    async def open_pool(url: str) -> KVPool:
        return await Slow.open(ROOM)

    monkeypatch.setattr("aiodatadist._context_caching.cache.open_pool", open_pool)
    cache = await ContextCache.open(rank())
    first = asyncio.create_task(cache.aclose())
    await closing.wait()
    second = asyncio.create_task(cache.aclose())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not second.done()
    may_close.set()
    await first
    await second


async def test_opening_that_swallows_its_cancellation_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    began = asyncio.Event()

    async def open_pool(url: str) -> KVPool:
        began.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await MemoryPool.open(ROOM)

    monkeypatch.setattr("aiodatadist._context_caching.cache.open_pool", open_pool)
    opening = asyncio.create_task(ContextCache.open(rank()))
    await began.wait()
    opening.cancel()
    done, _ = await asyncio.wait([opening], timeout=10)
    assert done
    assert opening.cancelled()


async def test_an_error_of_closing_is_not_its_own_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(MemoryPool):
        async def aclose(self) -> None:
            await super().aclose()
            raise EmsInternalError("it broke")

    async def open_pool(url: str) -> KVPool:
        return await Failing.open(ROOM)

    monkeypatch.setattr("aiodatadist._context_caching.cache.open_pool", open_pool)
    cache = await ContextCache.open(rank())
    with pytest.raises(EmsInternalError, match="it broke") as caught:
        await cache.aclose()
    assert caught.value.__cause__ is None


@pytest.mark.filterwarnings("ignore:coroutine 'Resident.keep' was never awaited")  # that is the point
def test_a_transfer_whose_task_never_began_has_ended() -> None:
    transfers: list[Transfer] = []

    async def forget_it() -> ContextCache:
        cache = await ContextCache.open(rank())
        await cache.register_kvcache(Kv().layers)
        # In the loop's last round: what it starts is cancelled before it begins.
        asyncio.get_running_loop().call_soon(lambda: transfers.append(cache.start_save([1], **by_slots([0]))))
        return cache

    cache = asyncio.run(forget_it())
    assert transfers[0].cancelled()
    assert not transfers_of(cache)
