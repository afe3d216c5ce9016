"""A cache whose closing goes wrong has let go of everything all the same, and says what went wrong."""

from __future__ import annotations

import asyncio

import pytest

from aiodatadist.context_caching import ContextCache, EmsInternalError, MemoryPool, Transfer
from aiodatadist.context_caching.pool import KVPool
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

    monkeypatch.setattr("aiodatadist.context_caching.cache.open_pool", open_pool)


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


@pytest.mark.filterwarnings("ignore:coroutine 'Life.keep' was never awaited")  # that is the point
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
    assert not cache._transfers
