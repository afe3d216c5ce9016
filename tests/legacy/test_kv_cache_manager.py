"""KvCacheManager: every call, both roles, every status it names, and what is left behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheNotFound,
    CacheTask,
    DataType,
    FeatureNotEnabled,
    LLMException,
    LLMRole,
    LLMStatusCode,
    NotLinked,
    OutOfMemory,
    ParamInvalid,
    Placement,
    TransferConfig,
    TransferTimeout,
)
from aiodatadist.legacy import KvCache, KvCacheManager
from aiodatadist.testing import inside, soft_fault, soft_faults_cleared
from tests.faults.test_cancellation import cancelled_at, hows
from tests.legacy.pairs import (
    BLOCKS,
    OK,
    SLOTS,
    UNSET,
    Pair,
    fill,
    filled,
    held,
    info_of,
    open_one,
    pair,
    uses_of,
    value,
)

S = LLMStatusCode


async def refused(call: Callable[[], Any], status: LLMStatusCode, words: str = ".") -> LLMException:
    """Check that a call raises this status, at once or when it is awaited."""
    with pytest.raises(LLMException, match=words) as caught:
        await call()
    assert caught.value.status_code is status, caught.value
    return caught.value


# ---- pulls ----


async def test_a_slot_is_pulled_once_by_its_key_and_its_memory_goes_back() -> None:
    async with pair() as p:
        free = p.free()
        source = await filled(p.owner, [CacheKey(1, 100), CacheKey(1, 101)])
        target = await p.puller.allocate_cache(SLOTS)
        fill(p.puller, target)
        task = p.puller.pull_cache(CacheKey(1, 101), target, batch_index=2)
        assert isinstance(task, CacheTask)
        assert (await task).bytes == 4 * 512
        after = held(p.puller, target)
        assert [[int(array[slot, 0]) for slot in range(3)] for array in after] == [
            [value(t, 0), value(t, 1), value(t, 1)] for t in range(4)
        ]
        await refused(lambda: p.puller.pull_cache(CacheKey(1, 101), target), S.LLM_KV_CACHE_NOT_EXIST)
        await p.owner.deallocate_cache(source)
        assert source.per_device_tensor_addrs == []
        assert p.free()[0] < free[0], "a key is still bound"
        await p.puller.pull_cache(CacheKey(1, 100), target)
        await p.puller.deallocate_cache(target)
        assert p.free() == free


async def test_offsets_choose_bytes_of_either_slot_and_keep_the_key() -> None:
    async with pair() as p:
        source = await p.owner.allocate_cache(SLOTS, [CacheKey(1, 7)])
        for array in p.owner.arrays(source):
            array[0] = np.arange(512) % 251
        target = await p.puller.allocate_cache(SLOTS)
        for array in p.puller.arrays(target):
            array[:] = 255
        pull = p.puller.pull_cache
        await pull(CacheKey(1, 7), target, 1, 100, src_cache_offset=30, dst_cache_offset=400)
        for array in held(p.puller, target):
            assert (array[1, 400:500] == np.arange(30, 130)).all()
            assert (array[1, :400] == 255).all()
            assert (array[1, 500:] == 255).all()
            assert (array[[0, 2]] == 255).all()
        await pull(CacheKey(1, 7), target, 0, -1, dst_cache_offset=500)
        assert all((array[0, 500:] == np.arange(12)).all() for array in held(p.puller, target))
        await pull(CacheKey(1, 7), target, 0, src_cache_offset=0)  # 0 keeps the key, too
        await pull(CacheKey(1, 7), target, 0)
        await refused(lambda: pull(CacheKey(1, 7), target), S.LLM_KV_CACHE_NOT_EXIST)


@pytest.mark.parametrize(
    ("words", "offsets", "size", "error"),
    [
        ("src_cache_offset is -1", {"src_cache_offset": -1}, -1, ValueError),
        ("dst_cache_offset is -1", {"dst_cache_offset": -1}, -1, ValueError),
        ("src_cache_offset is 9223372036854775808", {"src_cache_offset": 2**63}, -1, ValueError),
        ("dst_cache_offset is '1'", {"dst_cache_offset": "1"}, -1, TypeError),
        ("13 bytes from 500 of slot 0", {"dst_cache_offset": 500}, 13, ParamInvalid),
        ("0 bytes from 512 of slot 0", {"dst_cache_offset": 512}, -1, ParamInvalid),
        ("512 bytes from 1 do not fit: a slot of the source", {"src_cache_offset": 1}, -1, ParamInvalid),
        ("offset is 512: a slot of the source cache", {"src_cache_offset": 512}, 1, ParamInvalid),
    ],
)
async def test_offsets_outside_a_slot_are_refused(
    words: str, offsets: dict[str, Any], size: int, error: type[Exception]
) -> None:
    async with pair() as p:
        await filled(p.owner, [CacheKey(1, 7)])
        target = await p.puller.allocate_cache(SLOTS)
        with pytest.raises(error, match=words):
            await p.puller.pull_cache(CacheKey(1, 7), target, 0, size, **offsets)
        await p.puller.pull_cache(CacheKey(1, 7), target)


async def test_layers_are_pulled_one_by_one_and_the_key_goes_with_the_last() -> None:
    async with pair() as p:
        await filled(p.owner, [CacheKey(1, 7)])
        target = await p.puller.allocate_cache(SLOTS)
        for layer in range(2):
            span = range(layer, layer + 1)
            await p.puller.pull_cache(CacheKey(1, 7), target, src_layer_range=span, dst_layer_range=span)
        assert [int(array[0, 0]) for array in held(p.puller, target)] == [value(t, 0) for t in range(4)]
        await refused(lambda: p.puller.pull_cache(CacheKey(1, 7), target), S.LLM_KV_CACHE_NOT_EXIST)


async def test_a_prefix_is_pulled_any_number_of_times_until_its_key_is_removed() -> None:
    async with pair() as p:
        key = CacheKey(1, UNSET, 0, 5)
        source = await filled(p.owner, [key])
        target = await p.puller.allocate_cache(SLOTS)
        by_id = CacheKeyByIdAndIndex(1, source.cache_id, 0)
        for each in (key, key, by_id, key):
            await p.puller.pull_cache(each, target)
        await p.owner.remove_cache_key(key)
        await p.owner.remove_cache_key(key)
        await refused(lambda: p.puller.pull_cache(key, target), S.LLM_KV_CACHE_NOT_EXIST)


async def test_blocks_are_pulled() -> None:
    async with pair() as p:
        source = await p.owner.allocate_blocks_cache(BLOCKS, BlocksCacheKey(1, 3))
        fill(p.owner, source)
        target = await p.puller.allocate_blocks_cache(BLOCKS)
        await p.puller.pull_blocks(BlocksCacheKey(1, 3), target, [3, 4, 9], [0, 15, 1])
        after = held(p.puller, target)
        assert [[int(a[b, 0]) for b in (0, 15, 1)] for a in after] == [
            [value(t, b) for b in (3, 4, 9)] for t in range(4)
        ]
        pull = p.puller.pull_blocks
        for words, blocks in (("prompt_blocks is empty", ([], [1])), ("decoder_blocks is empty", ([1], []))):
            await refused(partial(pull, BlocksCacheKey(1, 3), target, *blocks), S.LLM_PARAM_INVALID, words)
        await refused(lambda: pull(BlocksCacheKey(1, 3), target, [1, 2], [1]), S.LLM_PARAM_INVALID, "the same length")
        await refused(lambda: pull(BlocksCacheKey(1, 3), target, [16], [1]), S.LLM_PARAM_INVALID, "has 16 blocks")
        await refused(lambda: pull(BlocksCacheKey(1, 4), target, [1], [1]), S.LLM_KV_CACHE_NOT_EXIST)
        with pytest.raises(TypeError, match="must be list"):
            pull(BlocksCacheKey(1, 3), target, (1,), (1,))  # type: ignore[arg-type]


# ---- roles and kinds ----


async def test_a_role_does_what_is_its_own_and_nothing_else() -> None:
    async with pair() as p:
        mine, theirs = await p.owner.allocate_cache(SLOTS), await p.puller.allocate_cache(SLOTS)
        sync, config = AwaitableLayerSynchronizer(2), TransferConfig(2, theirs.tensor_addrs)
        not_mine: dict[str, Callable[[], Any]] = {
            "pull_cache is for LLMRole.DECODER": lambda: p.owner.pull_cache(CacheKey(2, 1), mine),
            "pull_blocks is for LLMRole.DECODER": lambda: p.owner.pull_blocks(BlocksCacheKey(2), mine, [0], [0]),
            "check_link_status is for LLMRole.DECODER": lambda: p.prompt.check_link_status(2),
            "link_clusters is for LLMRole.DECODER": lambda: p.prompt.link_clusters([info_of(p.decoder)]),
            "remove_cache_key is for LLMRole.PROMPT": lambda: p.puller.remove_cache_key(CacheKey(2, 1)),
            "cache_keys is for LLMRole.PROMPT": lambda: p.puller.allocate_cache(SLOTS, [CacheKey(2, 1)]),
            "LLMRole.DECODER has no keys": lambda: p.puller.allocate_blocks_cache(BLOCKS, BlocksCacheKey(2)),
            "transfer_cache_async is for LLMRole.PROMPT": lambda: p.puller.transfer_cache_async(theirs, sync, [config]),
        }
        for words, call in not_mine.items():
            await refused(call, S.LLM_PARAM_INVALID, words)


async def test_memory_of_the_host_is_for_swapping_only() -> None:
    async with open_one(LLMRole.PROMPT, 1) as prompt:
        manager = prompt.kv_cache_manager
        host = CacheDesc(4, [3, 512], DataType.DT_UINT8, Placement.HOST)
        for call in (manager.allocate_cache, manager.allocate_blocks_cache):
            await refused(partial(call, host), S.LLM_PARAM_INVALID, "only device caches are supported")


async def test_a_pool_that_is_full_says_so_with_v1s_status_and_takes_nothing() -> None:
    async with open_one(LLMRole.PROMPT, 1) as prompt:
        manager = prompt.kv_cache_manager
        before = manager.pool_usage()
        large = CacheDesc(2, [1, 3 << 20], DataType.DT_UINT8)
        error = await refused(lambda: manager.allocate_cache(large), S.LLM_DEVICE_OUT_OF_MEMORY, "do not fit")
        assert isinstance(error, OutOfMemory)
        assert isinstance(error.__cause__, OutOfMemory)
        assert manager.pool_usage() == before
        assert before is not None
        assert before.total == int(4194304 * 0.95) // 1024 * 1024
        cache = await manager.allocate_cache(CacheDesc(3, [1, 1], DataType.DT_UINT8))
        assert all(address % 512 == 0 for address in cache.per_device_tensor_addrs[0])


async def test_without_a_pool_there_is_a_hint() -> None:
    async with open_one(LLMRole.PROMPT, 1, ge_options={}) as prompt:
        with pytest.raises(FeatureNotEnabled, match="no memory pool"):
            await prompt.kv_cache_manager.allocate_cache(SLOTS)


# ---- copies ----


async def test_copies_within_a_cluster() -> None:
    async with open_one(LLMRole.DECODER, 2) as decoder:
        manager = decoder.kv_cache_manager
        source, target = await filled(manager, []), await manager.allocate_cache(SLOTS)
        fill(manager, target)
        await manager.copy_cache(target, source, 2, 0, offset=500, size=12, req_id=3)
        for t, array in enumerate(held(manager, target)):
            assert (array[2, 500:] == value(t, 0)).all()
            assert (array[2, :500] == value(t, 2)).all()
        blocks = await manager.allocate_blocks_cache(BLOCKS)
        fill(manager, blocks)
        await manager.copy_blocks(blocks, {3: [0, 15]})
        assert [int(array[b, 0]) for array in held(manager, blocks) for b in (0, 15)] == [
            value(t, 3) for t in range(4) for _ in range(2)
        ]
        await refused(lambda: manager.copy_cache(target, source, 3), S.LLM_PARAM_INVALID, "has 3 slots")
        await refused(lambda: manager.copy_blocks(blocks, {16: [0]}), S.LLM_PARAM_INVALID, "has 16 blocks")
        with pytest.raises(TypeError):
            manager.copy_blocks(blocks, {0: [-1.0]})  # type: ignore[list-item]
        with pytest.raises(ValueError, match="-1"):
            manager.copy_blocks(blocks, {0: [-1]})


async def test_blocks_are_swapped_with_memory_of_the_host() -> None:
    async with open_one(LLMRole.DECODER, 2) as decoder:
        manager = decoder.kv_cache_manager
        device = await manager.allocate_blocks_cache(BLOCKS)
        fill(manager, device)
        desc = CacheDesc(4, [16, 256], DataType.DT_UINT8, Placement.HOST)
        buffers = [(ctypes.c_ubyte * desc.size)() for _ in range(4)]
        addresses = [ctypes.addressof(buffer) for buffer in buffers]
        host = KvCache.create_cpu_cache(desc, [addresses])
        await manager.swap_blocks(device, host, {3: 0})
        assert [buffer[0] for buffer in buffers] == [value(t, 3) for t in range(4)]
        await manager.swap_blocks(host, device, {0: 9})
        assert [int(array[9, 0]) for array in held(manager, device)] == [value(t, 3) for t in range(4)]
        two = KvCache.create_cpu_cache(desc, [addresses, addresses])
        assert two.per_device_tensor_addrs == [addresses, addresses]
        await refused(lambda: manager.swap_blocks(two, device, {0: 1}), S.LLM_PARAM_INVALID, "for 2 devices")
        await refused(lambda: manager.swap_blocks(device, device, {0: 1}), S.LLM_PARAM_INVALID, "one must be HOST")


@pytest.mark.parametrize(
    ("addrs", "placement", "words"),
    [
        ([], Placement.HOST, "addrs is empty"),
        ([1, [1]], Placement.HOST, "1 lists among 2 elements"),
        ([1], Placement.HOST, "1 addresses for 2 tensors"),
        ([[1, 2], [1]], Placement.HOST, "1 addresses for 2 tensors"),
        ([1, 2], Placement.DEVICE, "needs Placement.HOST"),
    ],
)
def test_a_cpu_cache_has_an_address_per_tensor(addrs: Any, placement: Placement, words: str) -> None:
    with pytest.raises(ParamInvalid, match=words):
        KvCache.create_cpu_cache(CacheDesc(2, [4, 64], DataType.DT_UINT8, placement), addrs)


async def test_a_tensor_of_a_cache_is_copied_to_the_host(no_leaks: None) -> None:
    async with open_one(LLMRole.DECODER, 2) as decoder:
        manager = decoder.kv_cache_manager
        cache = await filled(manager, [], CacheDesc(2, [3, 128], DataType.DT_FLOAT))
        (tensor,) = await manager.get_cache_tensors(cache, 1)
        fill(manager, cache)
        await manager.copy_cache(cache, cache, 0, 1)
        assert (tensor.tensor_desc.dtype, tensor.tensor_desc.shape) == (DataType.DT_FLOAT, [3, 128])
        assert [float(tensor.numpy()[slot, 0]) for slot in range(3)] == [value(1, slot) for slot in range(3)]
        for index in (2, -1):
            await refused(partial(manager.get_cache_tensors, cache, index), S.LLM_PARAM_INVALID, "has 2 tensors")
    assert float(tensor.numpy()[2, 127]) == value(1, 2), "it is its own"


# ---- one thing at a time, and in time ----


async def test_what_comes_second_on_a_link_is_told_that_it_is_busy() -> None:
    async with pair(sync_kv_timeout=60_000) as p:
        await filled(p.owner, [CacheKey(1, 7)])
        target = await p.puller.allocate_cache(SLOTS)
        with soft_faults_cleared():
            soft_fault("HcclBatchPut:hang")
            task = p.puller.pull_cache(CacheKey(1, 7), target)
            await until_served(p)
            calls: dict[str, Callable[[], Any]] = {
                "pull_cache": lambda: p.puller.pull_cache(CacheKey(1, 8), target),
                "check_link_status": lambda: p.decoder.check_link_status(1),
                "transfer_cache_async": lambda: transfer(p, target),
            }
            for what, call in calls.items():
                error = await refused(call, S.LLM_LINK_BUSY, "is in use: (pull_cache|a pull that it asked for)")
                assert error.operation == what
            assert await p.decoder.unlink_clusters([info_of(p.decoder)]) == (S.LLM_SUCCESS, [S.LLM_NOT_YET_LINK])
            assert await p.decoder.unlink_clusters([info_of(p.prompt)]) == (S.LLM_LINK_BUSY, [S.LLM_LINK_BUSY])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await p.decoder.check_link_status(1)
        await p.puller.pull_cache(CacheKey(1, 7), target)


async def until_served(p: Pair) -> None:
    """Wait until PROMPT has begun with the request."""
    link = inside(p.prompt).links.find(2)
    async with asyncio.timeout(20):
        while not link.transfers.responder._under_way:  # noqa: ASYNC110
            await asyncio.sleep(0)
        while 2 not in uses_of(p.owner):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def transfer(p: Pair, target: KvCache) -> object:
    synchronizer = AwaitableLayerSynchronizer(2)
    source = await p.owner.allocate_cache(SLOTS)
    return await p.owner.transfer_cache_async(source, synchronizer, [TransferConfig(2, target.tensor_addrs)])


async def test_a_pull_during_a_transfer_is_told_that_the_link_is_busy() -> None:
    async with pair() as p:
        source, other = await filled(p.owner, []), await filled(p.owner, [CacheKey(1, 7)])
        target = await p.puller.allocate_cache(SLOTS)
        synchronizer = AwaitableLayerSynchronizer(2)
        task = p.owner.transfer_cache_async(source, synchronizer, [TransferConfig(2, target.tensor_addrs)])
        await refused(lambda: p.puller.pull_cache(CacheKey(1, 7), target, 1), S.LLM_LINK_BUSY, "transfer_cache_async")
        assert await task.synchronize(1) is S.LLM_WAIT_PROCESS_TIMEOUT
        assert await task.get_results(1) == [S.LLM_WAIT_PROCESS_TIMEOUT]
        for layer in range(2):
            synchronizer.ready(layer)
        assert await task.get_results() == [OK]
        layers = AwaitableLayerSynchronizer(2)
        cancelled = p.owner.transfer_cache_async(source, layers, [TransferConfig(2, target.tensor_addrs)])
        cancelled.cancel()
        assert await cancelled.get_results() == [None]
        assert [int(array[0, 0]) for array in held(p.puller, target)] == [value(t, 0) for t in range(4)]
        await p.puller.pull_cache(CacheKey(1, 7), target, 1)
        assert [int(array[1, 0]) for array in held(p.puller, target)] == [value(t, 0) for t in range(4)]
        await refused(
            lambda: p.owner.transfer_cache_async(other, synchronizer, [], [], [1], 64), S.LLM_PARAM_INVALID, "slots go"
        )


async def test_a_pull_that_takes_too_long_ends_with_v1s_status_and_the_link_goes_on() -> None:
    async with pair(sync_kv_timeout=200) as p:
        await filled(p.owner, [CacheKey(1, 7)])
        target = await p.puller.allocate_cache(SLOTS)
        with soft_faults_cleared():
            soft_fault("HcclBatchPut:hang")
            task = p.puller.pull_cache(CacheKey(1, 7), target)
            error = await refused(lambda: task, S.LLM_WAIT_PROCESS_TIMEOUT, r"0\.2\d* s")
            assert isinstance(error, TransferTimeout)
            assert task.exception() is not None
            assert await task.get_results() == [S.LLM_WAIT_PROCESS_TIMEOUT]
            with pytest.raises(TransferTimeout):
                task.result()
        await p.puller.pull_cache(CacheKey(1, 7), target)


async def test_copies_and_deallocations_have_a_time_limit() -> None:
    async with open_one(LLMRole.DECODER, 2, sync_kv_timeout=100) as decoder:
        manager = decoder.kv_cache_manager
        one, other = await manager.allocate_cache(SLOTS), await manager.allocate_cache(SLOTS)
        free = manager.pool_usage()
        with soft_faults_cleared():
            soft_fault("aclrtMemcpyAsync:hang@*")
            await refused(lambda: manager.copy_cache(one, other), S.LLM_WAIT_PROCESS_TIMEOUT)
            await refused(lambda: manager.get_cache_tensors(one), S.LLM_WAIT_PROCESS_TIMEOUT)
        registry = inside(decoder).registry
        registry.local(one, "one").lease()
        await refused(lambda: manager.deallocate_cache(one), S.LLM_WAIT_PROCESS_TIMEOUT, "deallocate_cache")
        assert manager.pool_usage() != free
        entry = next(iter(registry._deallocations.values())).entry
        entry.release()
        await registry.wait_given_back(one.cache_id)
        await manager.deallocate_cache(other)
        usage = manager.pool_usage()
        assert usage is not None
        assert usage.free == usage.total // 1024 * 1024


# ---- life ----


async def test_a_cache_without_a_reference_left_is_deallocated() -> None:
    async with pair() as p:
        free = p.free()
        cache: KvCache | None = await filled(p.owner, [CacheKey(1, 7)])
        target = await p.puller.allocate_cache(SLOTS)
        cache = None
        gc.collect()
        await p.puller.pull_cache(CacheKey(1, 7), target)
        array = p.puller.arrays(target)[0]
        cache_id = target.cache_id
        del target
        gc.collect()
        await asyncio.sleep(0)
        array[:] = 1  # its memory is there as long as the array is
        assert p.free()[1] < free[1]
        del array
        gc.collect()
        for _ in range(3):  # told on the loop, and by a task of its own
            await asyncio.sleep(0)
        await inside(p.decoder).registry.wait_given_back(cache_id)
        assert p.free() == free
        assert cache is None


async def test_what_is_unknown_or_gone_is_left_alone() -> None:
    async with pair() as p:
        cache = await p.owner.allocate_cache(SLOTS)
        for _ in range(2):
            await p.owner.deallocate_cache(cache)
        await p.owner.deallocate_cache(KvCache(99, SLOTS, [[1, 2, 3, 4]], p.owner))
        await p.owner.remove_cache_key(CacheKey(1, 99))
        await refused(lambda: p.owner.copy_cache(cache, cache), S.LLM_KV_CACHE_NOT_EXIST)
        with pytest.raises(NotLinked):
            p.puller.pull_cache(CacheKey(8, 1), await p.puller.allocate_cache(SLOTS))


async def test_after_finalize_a_manager_says_so() -> None:
    async with open_one(LLMRole.PROMPT, 1) as prompt:
        manager = prompt.kv_cache_manager
        assert manager.is_initialized()
        await prompt.finalize()
        assert not manager.is_initialized()
        await refused(lambda: manager.allocate_cache(SLOTS), S.LLM_ENGINE_FINALIZED)


def test_a_key_names_a_request_or_a_prefix() -> None:
    KvCacheManager.check_cache_key(CacheKey(1, 7))
    KvCacheManager.check_cache_key(CacheKey(1, UNSET, 0, 7))
    for key in (CacheKey(1, UNSET), CacheKey(1, 7, 0, 7)):
        with pytest.raises(ParamInvalid, match="exactly one"):
            KvCacheManager.check_cache_key(key)


@hows
async def test_a_pull_cancelled_at_any_await_gives_back_what_it_held_and_the_link_goes_on(how: str) -> None:
    async with pair() as p:
        free, k, is_cancelled = p.free(), 1, True
        while is_cancelled:
            source, target = await filled(p.owner, [CacheKey(1, 7)]), await p.puller.allocate_cache(SLOTS)

            async def pull(target: KvCache = target) -> None:
                await p.puller.pull_cache(CacheKey(1, 7), target)

            is_cancelled = await cancelled_at(k, pull, how)
            with suppress(CacheNotFound):  # cancelled when all had arrived: its key is consumed
                await p.puller.pull_cache(CacheKey(1, 7), target)
            assert uses_of(p.puller) == uses_of(p.owner) == {}
            await p.puller.deallocate_cache(target)
            await p.owner.deallocate_cache(source)
            assert p.free() == free
            k += 1
        assert k > 2
