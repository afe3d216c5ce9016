"""Acceptance check 6 of ContextCaching: what is saved into a full pool makes room for itself.

But no part of one call takes the place of another.

Apart from the others, since this process can have one Mooncake store at a time.
"""

from __future__ import annotations

import re

import anyio
import pytest

from aiodatadist.context_caching import CcStatus, MemoryPool
from tests.context_caching.conftest import SmallStore
from tests.context_caching.engine_fixtures import mooncake_master, redis_server
from tests.context_caching.kit import BLOCK, Kv, block_slots, by_slots, opened
from tests.context_caching.servers import (
    MooncakeLender,
    MooncakeMaster,
    RedisServer,
    need_mooncake,
    need_redis,
    running,
)

__all__ = ["mooncake_master", "redis_server"]

VALUE = 1024
ROOM = 8


async def test_a_full_pool_keeps_the_newest(small_store: SmallStore) -> None:
    kv = Kv(rows=[[(small_store.nbytes // 8 // BLOCK // 2,)]], blocks=20, dtype="int16")  # of which 8 fit
    async with small_store.open(small_store.nbytes) as store, opened(await store.client(), kv) as cache:
        hashes = list(range(20))
        saved = kv.rows(block_slots([19]))
        for few in range(0, 20, 5):
            result = await cache.save(hashes[few : few + 5], **by_slots(range(few, few + 5)), timeout=30)
            assert result.success == 5 or small_store.rejects
        with anyio.fail_after(20):
            while not (await cache.exists([19])).success:
                assert small_store.rejects
                await cache.save([19], **by_slots([19]))
        kv.wipe()
        assert (await cache.load([19], **by_slots([0]))).success == 1
        assert kv.rows(block_slots([0])) == saved
        present = [h for h in hashes if (await cache.exists([h])).success]
        if small_store.is_exact:
            assert present == hashes[-len(present) :]
            assert 5 <= len(present) <= 8
        assert len(present) < 16


def small_kv() -> Kv:
    """Return a cache with blocks of ``VALUE`` bytes."""
    return Kv(rows=[[(VALUE // BLOCK // 2,)]], blocks=20, dtype="int16")


async def test_a_prompt_that_is_larger_than_the_pool_keeps_its_beginning(caplog: pytest.LogCaptureFixture) -> None:
    kv, hashes = small_kv(), list(range(20))
    async with await MemoryPool.open(ROOM * VALUE) as pool, opened(pool, kv) as cache:
        await cache.save([100, 101, 102], **by_slots([17, 18, 19]))  # they are older, and give way
        for _ in range(2):
            result = await cache.save(hashes, **by_slots(range(20)))
            assert result.details == (CcStatus.OK,) * (ROOM - 1) + (CcStatus.REJECTED,) * (21 - ROOM)
            assert cache.statistics.saved == 3 + ROOM - 1, "what is there stays"
        saved = kv.rows(block_slots(range(ROOM - 1)))
        kv.wipe()
        assert (await cache.load(hashes, **by_slots(range(20)))).success == ROOM - 1
        assert kv.rows(block_slots(range(ROOM - 1))) == saved
        assert cache.statistics.rejected == 2 * (21 - ROOM)
    assert [message for message in caplog.messages if message.startswith("no room")][-1] == (
        "no room in the memory pool for 13 of 20 values, the largest of 1024 bytes: the pool has 8192 (bytes=), which must "
        "hold everything that one call saves"
    )


async def test_a_call_may_fill_the_pool() -> None:
    async with await MemoryPool.open(ROOM * VALUE) as pool, opened(pool) as cache:
        for _ in range(2):
            assert (await cache.save_values(list("abcdefgh"), [[bytearray(VALUE)]] * ROOM)).success == ROOM
        assert pool.evicted == 0
    kv = small_kv()
    async with (
        await MemoryPool.open(ROOM * VALUE + 1) as pool,
        opened(pool, kv) as cache,
    ):  # a page for the layout's note
        for _ in range(2):
            assert (await cache.save(list(range(ROOM)), **by_slots(range(ROOM)))).success == ROOM
        assert pool.evicted == 0
    async with await MemoryPool.open(VALUE) as pool, opened(pool, kv) as cache:
        for _ in range(3):
            assert (await cache.save([1], **by_slots([0]))).success == 1
            assert (await cache.exists([1])).success == 1
        assert (cache.statistics.saved, pool.evicted) == (1, 0), "no note takes its place"
        result = await cache.save([2, 3], slots=range(2 * BLOCK + 1), offsets=[BLOCK + 1, BLOCK])
        assert result.details == (CcStatus.REJECTED, CcStatus.OK), "nor of one that is as large as the pool"


async def test_what_is_there_counts_as_stored_also_behind_what_fits() -> None:
    keys, data = list("abcdefgh"), [[bytearray([i]) * VALUE] for i in range(8)]
    async with await MemoryPool.open(8 * VALUE) as pool, opened(pool) as cache:
        for name, value in zip(keys, data, strict=True):
            assert (await cache.save_values([name], [value])).success == 1
        assert (await cache.save_values(keys, data)).success == 8


async def test_a_value_that_is_larger_than_all_costs_no_other_its_place() -> None:
    data = [bytearray([i]) * nbytes for i, nbytes in enumerate((VALUE, ROOM * VALUE + 1, 2 * VALUE))]
    async with await MemoryPool.open(ROOM * VALUE) as pool, opened(pool) as cache:
        result = await cache.save_values(["a", "b", "c"], [[value] for value in data])
        assert result.details == (CcStatus.OK, CcStatus.REJECTED, CcStatus.OK)


async def rejected(url: str, nbytes: int, caplog: pytest.LogCaptureFixture) -> str:
    """Return the message about a value of ``nbytes`` bytes for which there is no room."""
    async with opened(url) as cache:
        assert (await cache.save_values(["a"], [[bytearray(nbytes)]])).details == (CcStatus.REJECTED,)
    return [message for message in caplog.messages if message.startswith("no room in the ")][-1]


async def test_a_value_larger_than_the_memory_for_stages_names_that_option(
    redis_server: RedisServer, mooncake_master: MooncakeMaster, caplog: pytest.LogCaptureFixture
) -> None:
    told = await rejected(f"{redis_server.url}?memory=1MiB", 1 << 20, caplog)
    assert re.search(r"of 10486\d\d bytes: values on their way have 1048576 bytes: see memory= in the URL$", told)
    told = await rejected(f"{mooncake_master.url}&memory=16MiB", 16 << 20, caplog)
    assert re.search(r"of 167772\d\d bytes: values on their way have 16773120 bytes: see memory= in the URL$", told)


async def test_a_redis_server_that_is_full_is_named(caplog: pytest.LogCaptureFixture) -> None:
    need_redis()
    with running(server := RedisServer(2 << 20, policy="noeviction")):
        told = await rejected(server.url, 4 << 20, caplog)
    assert told.endswith(" bytes: the server is full: see its maxmemory and maxmemory-policy")


async def test_a_mooncake_master_without_lenders_is_named(caplog: pytest.LogCaptureFixture) -> None:
    need_mooncake()
    with running(master := MooncakeMaster()):
        told = await rejected(master.url, 1000, caplog)
        assert told.endswith(" lends memory to this master: see segment= in the URL")
        with running(MooncakeLender(master, 32 << 20)):
            told = await rejected(f"{master.url}&memory=64MiB", 40 << 20, caplog)
        assert told.endswith(" bytes: no segment that is lent to this master has room")
