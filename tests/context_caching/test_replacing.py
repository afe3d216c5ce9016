"""Replacing: the next save replaces what a load found to be damaged. All else stays: the first writer wins."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiodatadist._testing.views import entries_of, pipeline_of, store_of
from aiodatadist.context_caching import CcStatus, ContextCache, KVPool, MemoryPool
from tests.context_caching.fakes import Foreign
from tests.context_caching.kit import ROOM, Kv, block_slots, by_slots, opened

both = pytest.mark.parametrize("is_foreign", [False, True], ids=["embedded", "foreign"])


@asynccontextmanager
async def caches(is_foreign: bool) -> AsyncIterator[tuple[Kv, ContextCache, MemoryPool]]:
    kv = Kv()
    async with await MemoryPool.open(ROOM) as inner:
        pool: KVPool = Foreign(inner) if is_foreign else inner
        async with opened(pool, kv, read_cache_bytes=ROOM) as cache:
            yield kv, cache, inner


async def test_a_damaged_value_is_replaced() -> None:
    async with caches(True) as (kv, cache, inner):
        await cache.save([1, 2], **by_slots([0, 1]), write_rcache=False)
        _, entry = list(entries_of(inner).items())[1]
        with store_of(inner).view(entry.address, entry.nbytes) as view:
            view[100] ^= 1
        result = await cache.load([1, 2], **by_slots([8, 9]))
        assert result.details == (CcStatus.OK, CcStatus.MISS)
        assert (await cache.save([1, 2], **by_slots([0, 1]), write_rcache=False)).success == 2
        assert cache.statistics.saved == 3
        assert (await cache.load([1, 2], **by_slots([8, 9]))).success == 2
        assert kv.rows(block_slots([8, 9])) == kv.rows(block_slots([0, 1]))


async def test_a_value_that_came_after_a_damaged_one_stays() -> None:
    async with caches(True) as (_, cache, inner):
        await cache.save([1], **by_slots([0]), write_rcache=False)
        key, entry = next(iter(entries_of(inner).items()))
        with store_of(inner).view(entry.address, entry.nbytes) as view:
            view[100] ^= 1
        assert (await cache.load([1], **by_slots([8]))).success == 0
        store_of(inner).drop(key)
        for _ in range(2):
            assert (await cache.save([1], **by_slots([0]), write_rcache=False)).success == 1
        assert (cache.statistics.saved, cache.statistics.present) == (2, 1)


@both
@pytest.mark.parametrize("write_rcache", [False, True])
async def test_a_value_of_another_length_is_replaced_when_it_was_removed(is_foreign: bool, write_rcache: bool) -> None:
    async with caches(is_foreign) as (kv, cache, _):
        first = kv.rows([0, 1])
        assert (await cache.save([1], slots=[0, 1], offsets=[2], write_rcache=write_rcache)).success == 1
        assert (await cache.load([1], **by_slots([8]))).details == (CcStatus.MISS,)
        assert (await cache.save([1], **by_slots([0]), write_rcache=write_rcache)).success == 1
        assert cache.statistics.present == 1
        assert (await cache.load([1], **by_slots([8]))).details == (CcStatus.MISS,)
        assert (await cache.load([1], slots=[4, 5], offsets=[2])).success == 1
        assert kv.rows([4, 5]) == first
        await cache.remove([1])
        assert (await cache.save([1], **by_slots([0]), write_rcache=write_rcache)).success == 1
        assert (await cache.load([1], **by_slots([8]))).success == 1
        assert kv.rows(block_slots([8])) == kv.rows(block_slots([0]))


@both
async def test_a_value_that_no_load_missed_stays(is_foreign: bool) -> None:
    async with caches(is_foreign) as (kv, cache, _):
        first = kv.rows(block_slots([0]))
        await cache.save([1], **by_slots([0]), write_rcache=False)
        assert (await cache.load([1], **by_slots([8]))).success == 1
        kv.layers[0][0][0] += 1  # the same hash, and other contents: no engine does that
        assert (await cache.save([1], **by_slots([0]))).success == 1
        assert cache.statistics.present == 1
        await cache.load([1], **by_slots([9]))
        assert kv.rows(block_slots([9])) == first


async def test_so_many_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodatadist._context_caching.transfer.pipeline.DAMAGED", 2)
    async with caches(True) as (_, cache, inner):
        hashes = [1, 2, 3]
        await cache.save(hashes, **by_slots([0, 1, 2]), write_rcache=False)
        for entry in list(entries_of(inner).values())[:3]:
            with store_of(inner).view(entry.address, entry.nbytes) as view:
                view[100] ^= 1
        for h in hashes:
            assert (await cache.load([h], **by_slots([h]))).success == 0
        damaged = pipeline_of(cache)._damaged
        assert len(damaged) == 2
        await cache.save(hashes, **by_slots([4, 5, 6]), write_rcache=False)
        assert not damaged
        assert [(await cache.load([h], **by_slots([8]))).success for h in hashes] == [0, 1, 1]
