"""Requirements on a context cache, over every pool there is."""

from __future__ import annotations

import asyncio
import gc
import mmap
from collections.abc import Callable, Coroutine
from itertools import product
from time import perf_counter
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from aiodatadist._context_caching.pools.contract import PoolKey
from aiodatadist._device import Device
from aiodatadist._testing.views import pipeline_of
from aiodatadist._values.descriptors import Placement
from aiodatadist.context_caching import (
    CcResult,
    CcStatus,
    ContextCache,
    EmsInternalError,
    EmsInvalidArgument,
    KvBufferWrapper,
    KVCacheType,
    PrimaryKey,
)
from tests.context_caching.conftest import OpenStore
from tests.context_caching.kit import (
    BLOCK,
    BLOCKS,
    ROOM,
    SLOTS,
    Kv,
    block_slots,
    by_chunks,
    by_slots,
    kv_in,
    opened,
    rank,
)
from tests.profiles import examples

HASHES = [11, -12, 13]
ways = pytest.mark.parametrize(
    ("save", "load"), list(product([by_slots, by_chunks], repeat=2)), ids=["a-a", "a-b", "b-a", "b-b"]
)


@ways
@pytest.mark.parametrize("kind", ["host", "device"])
async def test_blocks_saved_from_some_slots_load_into_others(
    pool_factory: OpenStore, kind: str, save: Callable[..., Any], load: Callable[..., Any]
) -> None:
    async with pool_factory(ROOM) as store, kv_in(kind) as kv, opened(await store.client(), kv) as cache:
        saved = kv.rows(block_slots([3, 0, 9]))
        result = await cache.save(HASHES, **save([3, 0, 9]))
        assert (result.success, result.total) == (3, 3)
        kv.wipe()
        assert (await cache.load(HASHES, **load([7, 8, 1]))).success == 3
        assert kv.rows(block_slots([7, 8, 1])) == saved
        others = block_slots([i for i in range(BLOCKS) if i not in {7, 8, 1}])
        assert not any(any(row) for row in kv.rows(others))
        assert cache.statistics.saved_bytes == cache.statistics.loaded_bytes == sum(map(len, saved))
        assert cache.statistics.bytes_in_flight == 0


async def test_scattered_and_descending_slots_make_the_round_trip(pool_factory: OpenStore) -> None:
    slots = [5, 6, 7, 20, 19, 18, 17, 63, 0, 2, 1]
    offsets, elsewhere = [4, 1, 6], [40, 41, 30, 31, 32, 3, 50, 49, 48, 47, 46]
    kv = Kv()
    async with pool_factory(ROOM) as store, opened(await store.client(), kv) as cache:
        saved = kv.rows(slots)
        assert (await cache.save(HASHES, slots=slots, offsets=offsets)).success == 3
        kv.wipe()
        assert (await cache.load(HASHES, slots=elsewhere, offsets=offsets)).success == 3
        assert kv.rows(elsewhere) == saved


async def test_tensors_of_different_sizes_keep_their_bytes_apart(pool_factory: OpenStore) -> None:
    kv = Kv(rows=[[(512,), (64,)], [(3, 5)], [(512,), (64,), (7,)]])
    async with pool_factory(ROOM) as store, opened(await store.client(), kv) as cache:
        saved = kv.rows([9, 8, 33, 34, 35])
        await cache.save([1, 2], slots=[9, 8, 33, 34, 35], offsets=[2, 3])
        kv.wipe()
        await cache.load([2, 1], slots=[0, 1, 2, 62, 61], offsets=[3, 2])
        assert kv.rows([62, 61, 0, 1, 2]) == saved


class TorchLike:
    """A stand-in for a torch tensor, with the attributes that are read."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        self.shape, self.dtype = array.shape, "torch.float16"

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def is_contiguous(self) -> bool:
        return bool(self._array.flags.c_contiguous)

    def element_size(self) -> int:
        return int(self._array.itemsize)


async def test_what_looks_like_a_torch_tensor_is_one(pool_factory: OpenStore) -> None:
    kv, other = Kv(), Kv(seed=5)
    async with pool_factory(ROOM) as store, opened(await store.client(), kv) as cache:
        await cache.save([1], **by_slots([3]))
        await cache.register_kvcache([[TorchLike(tensor) for tensor in layer] for layer in other.layers])
        assert (await cache.load([1], **by_slots([0]))).success == 1
        assert other.rows(block_slots([0])) == kv.rows(block_slots([3]))


async def test_groups_have_blocks_and_lengths_of_their_own(pool_factory: OpenStore) -> None:
    kv = Kv(rows=[[(8,)], [(6,), (6,)], [(8,)]], blocks=[16, 5, 16])
    groups = [[0, 2], [1]]
    chunks = [[(0, 7), (10, 4)], [(2, 3), (99, 0)]]
    async with pool_factory(ROOM) as store, await ContextCache.open(rank(), await store.client()) as cache:
        await cache.register_kvcache(kv.layers, groups)
        first = kv.rows(range(7), [0, 2]), kv.rows(range(2, 5), [1])
        second = kv.rows(range(10, 14), [0, 2])
        assert (await cache.save([1, 2], chunks=chunks)).success == 2
        kv.wipe()
        moved = [[(20, 7), (40, 4)], [(10, 3), (0, 0)]]
        assert (await cache.load([1, 2], chunks=moved)).success == 2
        assert (kv.rows(range(20, 27), [0, 2]), kv.rows(range(10, 13), [1])) == first
        assert kv.rows(range(40, 44), [0, 2]) == second
        assert not any(any(row) for row in kv.rows([*range(10), *range(13, 20)], [1]))
        assert (await cache.exists([1, 2, 3])).success == 2
        wanted_more = await cache.load([1, 2], chunks=[moved[0], [(10, 3), (13, 1)]])
        assert wanted_more.details == (CcStatus.OK, CcStatus.MISS)  # the second group has nothing of the second hash


async def test_counting_ends_at_the_first_gap(pool_factory: OpenStore) -> None:
    kv, hashes = Kv(), list(range(100, 110))
    async with pool_factory(ROOM) as store, opened(await store.client(), kv) as cache:
        await cache.save(hashes, **by_slots(range(10)))
        saved = kv.rows(block_slots(range(3)))
        assert await cache.remove([103]) == 1
        kv.wipe()
        assert (await cache.exists(hashes)).success == 3
        assert await cache.match_prefix(hashes) == 3
        result = await cache.load(hashes, **by_slots(range(10)))
        assert (result.success, result.total, result.details[3]) == (3, 10, CcStatus.MISS)
        assert kv.rows(block_slots(range(3))) == saved


async def test_a_block_of_another_number_of_tokens_is_a_miss(pool_factory: OpenStore) -> None:
    kv = Kv()
    async with pool_factory(ROOM) as store, opened(await store.client(), kv) as cache:
        await cache.save([1], slots=[0, 1, 2], offsets=[3])
        before = kv.image()
        result = await cache.load([1], slots=[8, 9], offsets=[2])
        assert result.details == (CcStatus.MISS,)
        assert kv.image() == before


async def test_the_first_writer_wins_and_the_second_moves_nothing(pool_factory: OpenStore) -> None:
    kv = Kv()
    async with pool_factory(ROOM) as store, opened(await store.client(), kv) as cache:
        await cache.save([1], **by_slots([0]))
        before = kv.rows(block_slots([0]))
        moved = cache.statistics.saved_bytes
        assert (await cache.save([1], **by_slots([5]))).success == 1
        assert cache.statistics.saved_bytes == moved
        assert cache.statistics.present == 1
        await cache.load([1], **by_slots([9]))
        assert kv.rows(block_slots([9])) == before


@pytest.mark.parametrize("write_rcache", [True, False])
@pytest.mark.parametrize("read_local_only", [True, False])
@pytest.mark.parametrize("fill_on_read", [True, False])
async def test_local_read_cache(
    pool_factory: OpenStore, write_rcache: bool, read_local_only: bool, fill_on_read: bool
) -> None:
    kv, other = Kv(seed=1), Kv(seed=2)
    async with (
        pool_factory(ROOM) as store,
        opened(await store.client(), kv, read_cache_bytes=ROOM, fill_on_read=fill_on_read) as cache,
        opened(await store.client(), other, read_cache_bytes=ROOM, fill_on_read=fill_on_read) as second,
    ):
        saved = kv.rows(block_slots([0, 1]))
        await cache.save([1, 2], **by_slots([0, 1]), write_rcache=write_rcache)
        result = await cache.load([1, 2], **by_slots([4, 5]), read_local_only=read_local_only)
        assert result.success == (2 if write_rcache or not read_local_only else 0)
        assert cache.statistics.local == (2 if write_rcache else 0)
        assert (await second.load([1, 2], **by_slots([6, 7]), read_local_only=True)).success == 0
        assert (await second.load([1, 2], **by_slots([6, 7]))).success == 2
        assert other.rows(block_slots([6, 7])) == saved
        again = await second.load([1, 2], **by_slots([8, 9]), read_local_only=True)
        assert again.success == (2 if fill_on_read else 0)
        assert (await second.exists([1, 2], read_local_only=True)).success == again.success
        if fill_on_read:
            assert other.rows(block_slots([8, 9])) == saved
            await second.remove([1])
            assert (await second.load([1], **by_slots([8]), read_local_only=True)).success == 0


async def test_without_a_local_read_cache_reading_only_it_misses(pool_factory: OpenStore) -> None:
    kv = Kv()
    async with pool_factory(ROOM) as store, opened(await store.client(), kv) as cache:
        await cache.save([1], **by_slots([0]))
        assert (await cache.load([1], **by_slots([0]), read_local_only=True)).success == 0


def other_ways() -> list[tuple[dict[str, Any], dict[str, Any], str]]:
    return [
        ({"model_id": "other"}, {}, "float16"),
        ({}, {"access_id": "tenant-2"}, "float16"),
        ({"tp_world_size": 2, "rank_in_tp_group": 1}, {}, "float16"),
        ({"tp_world_size": 2}, {}, "float16"),
        ({"llm_engine": "another"}, {}, "float16"),
        ({"kvcache_type": KVCacheType.MHA}, {}, "float16"),
        ({}, {}, "int16"),
    ]


async def test_the_same_hash_of_others_is_another_value(pool_factory: OpenStore) -> None:
    async with pool_factory(ROOM) as store:
        saved = {}
        everyone = [({}, {}, "float16"), *other_ways()]
        for i, (fields, options, dtype) in enumerate(everyone):
            kv = Kv(seed=i, dtype=dtype)
            async with opened(await store.client(), kv, config=rank(**fields), **options) as cache:
                assert (await cache.exists([1])).success == 0, fields
                await cache.save([1], **by_slots([0]))
                assert cache.statistics.present == 0
                saved[i] = kv.rows(block_slots([0]))
        for i, (fields, options, dtype) in enumerate(everyone):
            kv = Kv(seed=99, dtype=dtype)
            async with opened(await store.client(), kv, config=rank(**fields), **options) as cache:
                assert (await cache.load([1], **by_slots([3]))).success == 1
                assert kv.rows(block_slots([3])) == saved[i]


async def test_ranks_with_mla_share_their_blocks(pool_factory: OpenStore) -> None:
    kv = Kv()
    fields: dict[str, Any] = {"tp_world_size": 2, "kvcache_type": KVCacheType.MLA}
    async with pool_factory(ROOM) as store:
        async with opened(await store.client(), kv, config=rank(**fields)) as first:
            await first.save([1], **by_slots([0]))
        async with opened(await store.client(), kv, config=rank(**fields, rank_in_tp_group=1)) as second:
            assert (await second.load([1], **by_slots([1]))).success == 1
            assert kv.rows(block_slots([0])) == kv.rows(block_slots([1]))


async def test_a_scheduler_without_a_cache_asks_for_one_rank_or_for_all(pool_factory: OpenStore) -> None:
    fields: dict[str, Any] = {"tp_world_size": 2, "pp_world_size": 2}
    ranks = [{"rank_in_tp_group": tp, "rank_in_pp_group": pp} for tp in range(2) for pp in range(2)]
    async with pool_factory(ROOM) as store, await ContextCache.open(rank(**fields), await store.client()) as scheduler:
        for i, place in enumerate(ranks):
            assert (await scheduler.exists([1, 2, 3], all_ranks=True)).success == 0
            kv = Kv(rows=[[(8,)]] * (2 + place["rank_in_pp_group"]))  # stages have layers of their own
            async with opened(await store.client(), kv, config=rank(**fields, **place)) as worker:
                await worker.save([1, 2, 3][: 3 - i % 2], **by_slots(range(3 - i % 2)))
        assert (await scheduler.exists([1, 2, 3])).success == 3
        assert (await scheduler.exists([1, 2, 3], all_ranks=True)).success == 2
        assert (await scheduler.exists([4, 1])).success == 0


async def test_every_hash_is_itself(pool_factory: OpenStore) -> None:
    hashes = [-1, 2**64 - 1, -(2**63), 2**63, 0, 1, 2**64, 2**128 - 1]
    kv = Kv()
    async with pool_factory(ROOM) as store, opened(await store.client(), kv) as cache:
        saved = [kv.rows(block_slots([i])) for i in range(len(hashes))]
        for i, value in enumerate(hashes):
            assert (await cache.exists([value])).success == 0
            await cache.save([value], **by_slots([i]))
        kv.wipe()
        for i, value in enumerate(hashes):
            assert (await cache.load([value], **by_slots([15 - i]))).success == 1
            assert kv.rows(block_slots([15 - i])) == saved[i]


# ---- keys of the caller's own ----


async def test_values_may_be_cut_differently_when_they_are_read(pool_factory: OpenStore) -> None:
    async with pool_factory(ROOM) as store, opened(await store.client()) as cache:
        parts = [bytearray(b"abc" * 100), bytearray(b"de" * 50), bytearray(b"fgh" * 100)]
        keys: list[PrimaryKey | str] = [PrimaryKey("prefix", "layer 0"), "prefix"]
        result = await cache.save_values(keys, [parts, [KvBufferWrapper.from_buffer(parts[1])]])
        assert result.success == 2
        whole, rest = bytearray(700), bytearray(100)
        result = await cache.load_values(keys, [[memoryview(whole)[:1], memoryview(whole)[1:]], [rest]])
        assert result.success == 2
        assert whole == b"".join(parts)
        assert rest == parts[1]
        longer = bytearray(101)
        assert (await cache.load_values(["prefix"], [[longer]])).details == (CcStatus.MISS,)
        assert not any(longer)
        assert await cache.remove_values(keys) == 2
        await cache.save_values(["prefix"], [[longer]])
        assert (await cache.load_values(["prefix"], [[longer]])).success == 1


async def test_an_address_of_memory_that_may_not_be_written_is_for_saving_only(pool_factory: OpenStore) -> None:
    fixed = np.frombuffer(mmap.mmap(-1, 8192, prot=mmap.PROT_READ), np.uint8)
    region = [[KvBufferWrapper(fixed.ctypes.data, fixed.nbytes)]]
    async with pool_factory(ROOM) as store, opened(await store.client()) as cache:
        assert (await cache.save_values(["a"], region)).success == 1
        with pytest.raises(EmsInvalidArgument, match=r"8192 bytes from .* that can be written"):
            await cache.load_values(["a"], region)


async def test_pinned_memory_that_is_shorter_than_it_is_said_to_be_is_an_error(pool_factory: OpenStore) -> None:
    async with pool_factory(ROOM) as store, opened(await store.client()) as cache:
        device = await Device.open(0)
        try:
            memory = device.allocate(1 << 16, Placement.HOST)
            whole, beyond = KvBufferWrapper(memory.address, 1 << 16), KvBufferWrapper(memory.address, 1 << 40)
            assert (await cache.save_values(["a"], [[whole]])).success == 1
            with pytest.raises(EmsInvalidArgument, match=f"{1 << 40} bytes from .* that can be read"):
                await cache.save_values(["b"], [[beyond]])
            memory.free()
        finally:
            await device.aclose()


async def test_device_memory_that_was_freed_is_an_error_and_no_crash(pool_factory: OpenStore) -> None:
    async with kv_in("device") as kv:
        tensor = kv.layers[0][0]
        gone = KvBufferWrapper(tensor.ctypes.data, tensor.nbytes)
        del tensor
    async with pool_factory(ROOM) as store, opened(await store.client()) as cache:
        with pytest.raises(EmsInternalError, match="a device address with nothing behind it"):
            await cache.save_values(["a"], [[gone]])


async def test_values_in_device_memory(pool_factory: OpenStore) -> None:
    async with pool_factory(ROOM) as store, kv_in("device") as kv, opened(await store.client()) as cache:
        buffers = [[tensor for layer in kv.layers for tensor in layer]]
        before = kv.image()
        await cache.save_values(["all"], buffers)
        kv.wipe()
        assert (await cache.load_values(["all"], buffers)).success == 1
        assert kv.image() == before
        buffers.clear()


async def test_an_address_of_nothing_is_an_error_and_no_crash(pool_factory: OpenStore) -> None:
    async with pool_factory(ROOM) as store, opened(await store.client()) as cache:
        here, nothing = KvBufferWrapper.from_buffer(bytearray(b"ab" * 2500)), KvBufferWrapper(4096, 5000)
        words = r"buffers\[1\]\[0\] is 5000 bytes from 0x1000: they must be memory of this process"
        with pytest.raises(EmsInvalidArgument, match=words) as wrong:
            await cache.save_values(["a", "b"], [[here], [nothing]])
        assert wrong.value.partial == CcResult(0, 2)
        assert cache.statistics.saved == 0
        assert (await cache.save_values(["a", "b"], [[here], [here]])).success == 2
        with pytest.raises(EmsInvalidArgument, match=words):
            await cache.load_values(["a", "b"], [[here], [nothing]])
        with pytest.raises(EmsInvalidArgument, match=words):
            await cache.load_values(["c", "d"], [[here], [nothing]])  # also where nothing would have been written
        assert (await cache.load_values(["a", "b"], [[here], [here]])).success == 2


# ---- limits, many at a time, giving up ----


async def test_many_at_a_time_stay_within_the_bytes_in_flight(pool_factory: OpenStore) -> None:
    blocks, limit = 2 * examples(40), 20_000  # nine blocks reach it
    kv = Kv(blocks=blocks)
    asyncio.get_running_loop().set_debug(False)  # it takes longer than the work
    async with pool_factory(16 * ROOM) as store, opened(await store.client(), kv, bytes_in_flight=limit) as cache:
        saved = kv.image()

        async def save(i: int) -> None:
            assert (await cache.save([i], **by_slots([i]), timeout=30)).success == 1

        async def load(i: int) -> None:
            assert (await cache.load([i], **by_slots([i]), timeout=30)).success == 1

        for work in (save, load):
            async with anyio.create_task_group() as group:
                for i in range(blocks):
                    group.start_soon(work, i)
            if work is save:
                kv.wipe()
        assert kv.image() == saved
        assert 0 < cache.statistics.most_bytes_in_flight <= limit
        assert cache.statistics.bytes_in_flight == 0


STALL = 0.05
"""Seconds of the loop's that a thousand tasks may cost others: under 0.02 where it is quiet; 0.1 if all begin at once."""


@pytest.mark.measures
async def test_many_at_a_time_do_not_block_the_loop(pool_factory: OpenStore) -> None:
    kv = Kv(blocks=1000)
    asyncio.get_running_loop().set_debug(False)  # it takes longer than the work
    async with pool_factory(16 * ROOM) as store, opened(await store.client(), kv) as cache:
        gc.collect()
        gc.disable()

        async def work(i: int) -> None:
            await cache.save([i], **by_slots([i % 1000]), timeout=30)
            await cache.load([i], **by_slots([i % 1000]), timeout=30)

        try:
            woken = min([await longest_round(nothing, 0) for _ in range(5)])
            turns = 0
            while (stall := await longest_round(work, 1000 * turns) - woken) >= STALL and turns < 4:
                turns += 1  # the machine stood still, perhaps
        finally:
            gc.enable()
    assert stall < STALL


async def nothing(_: int) -> None:
    """Take as long as it takes to wake the tasks."""


async def longest_round(work: Callable[[int], Coroutine[Any, Any, None]], first: int) -> float:
    """Return the seconds of the event loop's longest round while 1000 tasks work that all begin in one round."""
    longest, last = 0.0, perf_counter()
    go = anyio.Event()

    async def watch() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0)
            now = perf_counter()
            longest, last = max(longest, now - last), now

    async def one(i: int) -> None:
        await go.wait()
        await work(i)

    async with anyio.create_task_group() as watching:
        async with anyio.create_task_group() as group:
            for i in range(1000):
                group.start_soon(one, first + i)
            await asyncio.sleep(0)  # to make so many tasks takes as long as all that they do in a round
            last = perf_counter()
            watching.start_soon(watch)
            go.set()
        watching.cancel_scope.cancel()
    return longest


async def test_a_value_larger_than_the_bytes_in_flight_goes_alone(pool_factory: OpenStore) -> None:
    kv = Kv()
    async with pool_factory(ROOM) as store, opened(await store.client(), kv, bytes_in_flight=100) as cache:
        assert (await cache.save(HASHES, **by_slots([0, 1, 2]))).success == 3
        assert (await cache.load(HASHES, **by_slots([3, 4, 5]))).success == 3
        value = len(b"".join(kv.rows(block_slots([0]))))
        assert value <= cache.statistics.most_bytes_in_flight <= value + 64


async def test_a_cancelled_transfer_gives_its_slots_back_when_it_has_quiesced(pool_factory: OpenStore) -> None:
    kv = Kv(blocks=100, rows=[[(1024,), (1024,)]] * 4)
    saved, new = list(range(100)), list(range(100, 200))
    async with pool_factory(16 * ROOM) as store, opened(await store.client(), kv) as cache:
        await cache.save(saved, **by_slots(range(100)), timeout=None)
        for start, hashes in ((cache.start_save, new), (cache.start_load, saved)):
            transfer = start(hashes, **by_slots(range(100)), timeout=None)
            assert not transfer.done()
            assert transfer.cancel()
            await transfer.quiesced()
            assert transfer.cancelled()
            with pytest.raises(asyncio.CancelledError):
                transfer.result()
            before = kv.image()
            assert (await start(hashes[:5], **by_slots(range(5)))).success == 5
            assert kv.rows(range(20, 400)) == [row[20 * 2048 :] for row in before]


async def test_slots_in_use_are_refused(pool_factory: OpenStore) -> None:
    kv = Kv()
    async with pool_factory(ROOM) as store, opened(await store.client(), kv) as cache:
        await cache.save([1], **by_slots([0]))
        saving = cache.start_save([2], **by_slots([3]))
        also = cache.start_save([3], **by_slots([3]))  # readers share
        with pytest.raises(ValueError, match=r"slots\[4\] is 12, which another save or load uses"):
            cache.start_load([1, 2], **by_slots([0, 3]))
        with pytest.raises(ValueError, match="2 saves and loads use"):
            await cache.register_kvcache(kv.layers)
        assert (await saving).success + (await also).success == 2
        loading = cache.start_load([1], **by_slots([3]))
        with pytest.raises(ValueError, match="which another save or load uses"):
            cache.start_save([4], **by_chunks([3]))
        assert (await loading).success == 1
        await cache.register_kvcache(kv.layers)
        cache.unregister_kvcache()
        with pytest.raises(ValueError, match="no KV cache is registered"):
            cache.start_load([1], **by_slots([3]))


async def test_closing_cancels_what_is_under_way(pool_factory: OpenStore, no_leaks: None) -> None:
    kv = Kv()
    async with pool_factory(ROOM) as store:
        cache = await ContextCache.open(rank(), await store.client(), read_cache_bytes=ROOM)
        await cache.register_kvcache(kv.layers)
        transfers = [cache.start_save([i], slots=[i], offsets=[1]) for i in range(SLOTS)]
        await cache.aclose()
        await cache.aclose()
        assert all(transfer.done() for transfer in transfers)
        with pytest.raises(ValueError, match="this cache is closed"):
            cache.start_save([1], slots=[0], offsets=[1])


async def test_shards_of_one_block_have_one_distribute_key(pool_factory: OpenStore) -> None:
    asked: list[PoolKey] = []
    kv = Kv(rows=[[(8,)], [(8,)]])
    async with pool_factory(ROOM) as store, await ContextCache.open(rank(), await store.client()) as cache:
        await cache.register_kvcache(kv.layers, [[0], [1]])
        pool = pipeline_of(cache).pool
        put = pool.put_many

        async def listen(keys: Any, *args: Any, **kwargs: Any) -> Any:
            asked.extend(keys)
            return await put(keys, *args, **kwargs)

        pool.put_many = listen
        await cache.save([0xABC, -1], chunks=[[(0, BLOCK), (8, BLOCK)]] * 2)
        pool.put_many = put
    blocks = [key for key in asked if key.distribute_key != "layout"]
    assert [key.distribute_key for key in blocks] == ["abc", "abc", "-1", "-1"]
    assert len(set(blocks)) == 4


# ---- what changes ----


async def test_what_was_removed_while_it_was_read_is_not_kept(pool_factory: OpenStore) -> None:
    old, new, seen = bytearray(b"old" * 100), bytearray(b"new" * 100), bytearray(300)
    async with pool_factory(ROOM) as store, opened(await store.client(), read_cache_bytes=ROOM) as cache:
        for turn in range(5):
            key = PrimaryKey("prefix", str(turn))
            await cache.save_values([key], [[old]], write_rcache=False)
            async with anyio.create_task_group() as group:
                group.start_soon(cache.load_values, [key], [[bytearray(300)]])
                group.start_soon(cache.remove_values, [key])
            await cache.save_values([key], [[new]], write_rcache=False)
            assert (await cache.load_values([key], [[seen]])).success == 1
            assert seen == new


async def test_a_scheduler_hears_of_another_layout(pool_factory: OpenStore) -> None:
    async with pool_factory(ROOM) as store:
        for rows in ([[(8,)]] * 2, [[(8,)]] * 3):
            async with opened(await store.client(), Kv(rows=rows)) as worker:
                await worker.save([1, 2], **by_slots([0, 1]))
            async with await ContextCache.open(rank(), await store.client()) as scheduler:
                assert (await scheduler.exists([1, 2])).success == 2
