"""LLM-DataDist's conformance examples, and a whole exchange step by step, in both modes where they apply."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheNotFound,
    DataType,
    LinkError,
    LLMClusterInfo,
    LLMConfig,
    LLMException,
    LLMRole,
    LLMStatusCode,
    NotLinked,
    ParamInvalid,
    Placement,
    RegisterMemStatus,
    TransferTimeout,
)
from aiodatadist.testing import (
    Cluster,
    cluster_info,
    linked_pair,
    open_cluster,
    pattern,
    soft_counters,
    soft_fault,
    soft_faults_cleared,
    stamp,
    verify,
)
from tests.strict.marks import any_memory

UNSET = 2**64 - 1
POOL = '{"memory_size": 1048576, "page_shift": 16}'
SUCCESS = LLMStatusCode.LLM_SUCCESS
both_modes = pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "request-response"])


@asynccontextmanager
async def two(one_sided: bool = True, **options: Any) -> AsyncIterator[tuple[Cluster, Cluster]]:
    """Link clusters 1 and 2, without caches."""
    options["enable_remote_cache_accessible"] = one_sided
    async with (
        open_cluster(1, LLMRole.PROMPT, **options) as prompt,
        open_cluster(2, LLMRole.DECODER, device_id=1, **options) as decoder,
    ):
        assert (await decoder.datadist.link_clusters([cluster_info(prompt)], 5000))[0] is SUCCESS
        await prompt.datadist.wait_linked(2)
        yield prompt, decoder


def contents(cluster: Cluster, cache: Cache) -> list[bytes]:
    """Return a copy of each tensor."""
    size, view = cache.cache_desc.size, cluster.memory(cache).view()
    return [bytes(view[i * size : (i + 1) * size]) for i in range(cache.cache_desc.num_tensors)]


def expected(desc: CacheDesc, pairs: dict[int, int], tensors: range | None = None) -> list[tuple[int, int, int, int]]:
    """Return the pieces that came from cluster 1. Pieces that are not named are as they were."""
    return [(t, dst, 1, src) for t in tensors or range(desc.num_tensors) for dst, src in pairs.items()]


# ---- 1 to 4: geometry ----


@both_modes
async def test_1_a_slot_is_its_share_of_each_tensor(one_sided: bool) -> None:
    desc = CacheDesc(4, [2, 1048576], DataType.DT_FLOAT16)
    assert (desc.size, desc.stride) == (4194304, 2097152)
    async with linked_pair(desc, slots=True, enable_remote_cache_accessible=one_sided) as (
        prompt,
        decoder,
        source,
        cache,
    ):
        before = contents(decoder, cache)
        report = await decoder.datadist.cache_manager.pull_cache(CacheKey(1, 1), cache, 1)
        assert report.bytes == 4 * 2097152
        for old, new, theirs in zip(before, contents(decoder, cache), contents(prompt, source), strict=True):
            assert new == old[:2097152] + theirs[2097152:4194304]
        for layer, tensors in ((0, range(2)), (1, range(2, 4))):
            stamp(decoder.memory(cache), cache, 2)
            layers = range(layer, layer + 1)
            pull = decoder.datadist.cache_manager.pull_cache
            await pull(CacheKey(1, 1), cache, 1, src_layer_range=layers, dst_layer_range=layers)
            verify(decoder.memory(cache), cache, expected(desc, {1: 1}, tensors), owner=2)


async def test_2_a_push_that_turns_blocks_around_makes_one_copy_of_each() -> None:
    desc = CacheDesc(4, [4, 16], DataType.DT_INT32)
    assert (desc.size, desc.stride) == (256, 64)
    async with linked_pair(desc) as (prompt, decoder, source, cache):
        push = prompt.datadist.cache_manager.push_blocks
        report = await push(BlocksCacheKey(2), source, [0, 1, 2, 3], [3, 2, 1, 0])
        assert report.ranges == 4 * 4
        verify(decoder.memory(cache), cache, expected(desc, {3: 0, 2: 1, 1: 2, 0: 3}), owner=2)


@both_modes
async def test_2_neighbours_are_pulled_with_one_copy(one_sided: bool) -> None:
    desc = CacheDesc(4, [4, 16], DataType.DT_INT32)
    async with two(one_sided) as (prompt, decoder):
        for count, model in ((9, 0), (10, 1)):
            await prompt.blocks(CacheDesc(4, [count, 16], DataType.DT_INT32), model)
        cache = await decoder.blocks(desc)
        pull = decoder.datadist.cache_manager.pull_blocks
        with pytest.raises(ParamInvalid, match=r"src_blocks\[2\] is 9: the source cache has 9 blocks"):
            await pull(BlocksCacheKey(1, 0), cache, [5, 6, 9], [0, 1, 2])
        verify(decoder.memory(cache), cache, [], owner=2)
        report = await pull(BlocksCacheKey(1, 1), cache, [5, 6, 9], [0, 1, 2])
        assert report.ranges == 2 * 4
        verify(decoder.memory(cache), cache, expected(desc, {0: 5, 1: 6, 2: 9}), owner=2)


@both_modes
@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize(
    ("stride", "block", "targets", "wrong", "last"),
    [
        (2_500_000, 1 << 20, [3, 0, 2], [[0, 1], [0, 1, 2, 3]], 402_848),
        (2 << 20, 4 << 20, [2], [[], [0, 1]], 2 << 20),
    ],
    ids=["slot of 2.4 blocks", "slot of half a block"],
)
async def test_3_a_slot_fills_exactly_as_many_blocks_as_it_needs(
    one_sided: bool, slot: int, stride: int, block: int, targets: list[int], wrong: list[list[int]], last: int
) -> None:
    async with two(one_sided) as (prompt, decoder):
        slots = CacheDesc(1, [2, stride], DataType.DT_UINT8)
        source = await prompt.contiguous(slots, [CacheKey(1, 70), CacheKey(1, 71)])
        cache = await decoder.blocks(CacheDesc(1, [4, block], DataType.DT_UINT8))
        pull = decoder.datadist.cache_manager.pull_blocks
        old = contents(decoder, cache)[0]
        for blocks in wrong:
            with pytest.raises(ParamInvalid):
                await pull(CacheKey(1, 70 + slot), cache, [], blocks)
        assert contents(decoder, cache)[0] == old
        want = bytearray(old)
        theirs = contents(prompt, source)[0][slot * stride : (slot + 1) * stride]
        for i, target in enumerate(targets):
            chunk = theirs[i * block : (i + 1) * block]
            want[target * block : target * block + len(chunk)] = chunk
        assert len(chunk) == last
        keys = CacheKey(1, 70 + slot), CacheKeyByIdAndIndex(1, source.cache_id, slot)
        for key in keys:
            cluster_bytes = decoder.memory(cache).view()
            cluster_bytes[:] = old
            report = await pull(key, cache, [], targets)
            assert report.bytes == stride
            assert contents(decoder, cache)[0] == want


@both_modes
async def test_4_a_layer_range_is_whole_layers(one_sided: bool) -> None:
    desc = CacheDesc(8, [4, 64], DataType.DT_UINT8)
    async with linked_pair(desc, enable_remote_cache_accessible=one_sided) as (_, decoder, _, cache):
        pull = decoder.datadist.cache_manager.pull_blocks
        layers: dict[str, Any] = {"src_layer_range": range(1, 3), "dst_layer_range": range(1, 3)}
        await pull(BlocksCacheKey(1), cache, [3], [0], **layers, tensor_num_per_layer=2)
        verify(decoder.memory(cache), cache, expected(desc, {0: 3}, range(2, 6)), owner=2)
        with pytest.raises(ParamInvalid, match="8 tensors are not a whole number of layers of 3"):
            await pull(BlocksCacheKey(1), cache, [3], [0], **layers, tensor_num_per_layer=3)
        await pull(BlocksCacheKey(1), cache, [2], [1], tensor_num_per_layer=3)
        both = expected(desc, {0: 3}, range(2, 6)) + expected(desc, {1: 2})
        verify(decoder.memory(cache), cache, both, owner=2)


# ---- 5 to 7: keys ----


@any_memory
async def test_5_memory_goes_back_with_the_last_reference() -> None:
    desc = CacheDesc(2, [2, 1000], DataType.DT_UINT8)
    async with two(one_sided=False, mem_pool_cfg=POOL) as (prompt, decoder):
        owner, manager = prompt.datadist.cache_manager, decoder.datadist.cache_manager
        cache = await decoder.contiguous(desc)
        free = owner.pool_usage()[Placement.DEVICE].free
        source = await owner.allocate_cache(desc, [CacheKey(1, 10), CacheKey(1, 11)])
        for tensor, array in enumerate(owner.arrays(source)):
            for slot in (0, 1):
                array[slot] = 10 * tensor + slot + 1
        del array
        taken = owner.pool_usage()[Placement.DEVICE].free
        assert taken == free - 2 * 65536
        await manager.pull_cache(CacheKey(1, 10), cache, 0)
        await owner.deallocate_cache(source)
        assert source.tensor_addrs == []
        assert owner.pool_usage()[Placement.DEVICE].free == taken
        with pytest.raises(CacheNotFound):
            await manager.pull_cache(CacheKey(1, 10), cache, 1)
        await manager.pull_cache(CacheKey(1, 11), cache, 1)
        assert contents(decoder, cache) == [
            bytes([1]) * 1000 + bytes([2]) * 1000,
            bytes([11]) * 1000 + bytes([12]) * 1000,
        ]
        await until(lambda: owner.pool_usage()[Placement.DEVICE].free == free)
        with pytest.raises(CacheNotFound):
            await manager.pull_cache(CacheKey(1, 11), cache, 1)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for the condition. The test's own time limit ends the wait."""
    while not condition():  # noqa: ASYNC110 - there is nothing else to wait for
        await asyncio.sleep(0)


@pytest.mark.parametrize("by_id", [False, True], ids=["by key", "by id"])
async def test_6_a_key_is_consumed_when_all_of_its_layers_were_pulled(by_id: bool) -> None:
    desc = CacheDesc(8, [2, 100], DataType.DT_UINT8)
    async with two(one_sided=False, mem_pool_cfg=POOL.replace("16}", "10}")) as (prompt, decoder):
        source = await prompt.datadist.cache_manager.allocate_cache(desc, [CacheKey(1, 10), CacheKey(1, 11)])
        cache = await decoder.contiguous(desc)

        async def pull(request: int, layers: range) -> None:
            key = CacheKeyByIdAndIndex(1, source.cache_id, request - 10) if by_id else CacheKey(1, request)
            await decoder.datadist.cache_manager.pull_cache(key, cache, src_layer_range=layers, dst_layer_range=layers)

        async def is_bound(request: int) -> bool:
            """Return True if the request has a cache. One layer alone does not cover it."""
            try:
                await decoder.datadist.cache_manager.pull_cache(
                    CacheKey(1, request), cache, src_layer_range=range(1), dst_layer_range=range(1)
                )
            except CacheNotFound:
                return False
            return True

        await pull(10, range(2))
        await pull(11, range(2))
        await pull(11, range(2))
        assert await is_bound(10)
        assert await is_bound(11)
        await pull(10, range(2, 4))
        assert not await is_bound(10)
        assert await is_bound(11)


@both_modes
async def test_7_placeholders_name_nothing(one_sided: bool) -> None:
    desc = CacheDesc(1, [4, 16], DataType.DT_UINT8)
    nothing = CacheKey(1, UNSET)
    async with two(one_sided, mem_pool_cfg=POOL) as (prompt, decoder):
        owner, manager = prompt.datadist.cache_manager, decoder.datadist.cache_manager
        source = await owner.allocate_cache(desc, [nothing, CacheKey(1, 5)])
        for slot in range(4):
            owner.arrays(source)[0][slot] = slot
        cache = await decoder.contiguous(desc)
        await manager.pull_cache(CacheKey(1, 5), cache, 3)
        assert contents(decoder, cache)[0][48:] == bytes([1]) * 16
        with pytest.raises(ParamInvalid):
            await manager.pull_cache(nothing, cache)
        with pytest.raises(ParamInvalid, match="5 keys for 4 batch slots"):
            await owner.allocate_cache(desc, [CacheKey(1, 20 + i) for i in range(5)])
        await owner.allocate_cache(desc, [nothing, nothing, nothing, CacheKey(1, 6)])
        with pytest.raises(ParamInvalid, match="bound to a slot already"):
            await owner.allocate_cache(desc, [CacheKey(1, 7), nothing, CacheKey(1, 7)])
        await owner.allocate_cache(desc, [CacheKey(1, 7)])


# ---- 8 to 11: arguments and options ----


async def test_8_links_are_refused_by_the_kind_of_mistake() -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        link, info = decoder.datadist.link_clusters, cluster_info(prompt)
        assert await link([]) == (LLMStatusCode.LLM_PARAM_INVALID, [])
        with pytest.raises(LLMException, match="timeout is 0") as caught:
            await link([info], timeout=0)
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
        with pytest.raises(TypeError, match="timeout is '1'"):
            await link([info], timeout="1")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="timeout is 2147483648: the int32 range"):
            await link([info], timeout=2**31)
        assert decoder.datadist.statistics().links == ()


async def test_9_giving_up_what_is_not_there_succeeds() -> None:
    async with open_cluster(1, mem_pool_cfg=POOL) as cluster:
        manager = cluster.datadist.cache_manager
        await manager.remove_cache_key(CacheKey(1, 77))
        for make, drop in (
            (manager.allocate_cache, manager.deallocate_cache),
            (manager.allocate_blocks_cache, manager.deallocate_blocks_cache),
        ):
            cache = await make(CacheDesc(1, [1, 16], DataType.DT_UINT8))
            await drop(cache)
            await drop(cache)
        assert manager.pool_usage()[Placement.DEVICE].free == 1048576
        await manager.unregister_cache(4711)
        stranger = LLMClusterInfo(99)
        stranger.append_remote_ip_info("127.0.0.1", 1)
        for force in (False, True):
            assert await cluster.datadist.unlink_clusters([stranger], force=force) == (SUCCESS, [SUCCESS])


@pytest.mark.parametrize(("value", "kind"), [("abc", LLMException), (0, LLMException), (1.5, TypeError)])
def test_10_a_time_limit_is_digits_above_zero(value: Any, kind: type[Exception]) -> None:
    config = LLMConfig(sync_kv_timeout=400)
    with pytest.raises(kind, match=f"sync_kv_timeout is .*{value}"):
        config.sync_kv_timeout = value
    assert config.generate_options()["llm.SyncKvCacheWaitTime"] == "400"


def test_10_digits_as_text_are_a_time_limit() -> None:
    config = LLMConfig()
    config.sync_kv_timeout = "250"  # type: ignore[assignment]
    assert config.generate_options()["llm.SyncKvCacheWaitTime"] == "250"


async def test_11_a_pool_is_made_of_pages() -> None:
    async with open_cluster(1, mem_pool_cfg=POOL) as cluster:
        manager = cluster.datadist.cache_manager

        def free_pages() -> float:
            return manager.pool_usage()[Placement.DEVICE].free / 65536

        assert free_pages() == 16
        first = await manager.allocate_cache(CacheDesc(1, [1, 65537], DataType.DT_UINT8))
        assert free_pages() == 14
        other = await manager.allocate_cache(CacheDesc(1, [1, 65536], DataType.DT_UINT8))
        assert free_pages() == 13
        base = min(first.tensor_addrs + other.tensor_addrs)
        assert all((address - base) % 65536 == 0 for address in first.tensor_addrs + other.tensor_addrs)
        await manager.deallocate_cache(first)
        await manager.deallocate_cache(other)
        assert free_pages() == manager.pool_usage()[Placement.DEVICE].largest / 65536 == 16


@pytest.mark.parametrize("shift", [9, 31])
async def test_11_a_page_has_its_limits(shift: int) -> None:
    with pytest.raises(ParamInvalid, match=f"page_shift.*{shift}"):
        async with open_cluster(1, mem_pool_cfg=f'{{"memory_size": 4294967296, "page_shift": {shift}}}'):
            pass


# ---- 12 to 14: failures ----


@both_modes
async def test_12_who_is_not_linked_and_oneself_are_not_pulled_from(one_sided: bool) -> None:
    desc = CacheDesc(1, [4, 64], DataType.DT_UINT8)
    async with linked_pair(desc, enable_remote_cache_accessible=one_sided) as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager
        with pytest.raises(NotLinked, match="cluster 3 is not linked") as caught:
            await manager.pull_blocks(BlocksCacheKey(3), cache, [0], [0])
        assert caught.value.status_code is LLMStatusCode.LLM_NOT_YET_LINK
        with pytest.raises(ParamInvalid, match="names this cluster itself"):
            await manager.pull_blocks(BlocksCacheKey(2), cache, [0], [0])


@any_memory
async def test_13_an_offset_counts_in_both_slots() -> None:
    async with open_cluster(1) as cluster:
        manager = cluster.datadist.cache_manager
        src = await cluster.contiguous(CacheDesc(2, [1, 100], DataType.DT_UINT8))
        dst = await cluster.contiguous(CacheDesc(2, [1, 80], DataType.DT_UINT8))
        cluster.memory(dst).view()[:] = bytes(160)
        with pytest.raises(ParamInvalid, match="90 bytes from 10 do not fit: a slot of the destination cache has 80"):
            await manager.copy_cache(dst, src, offset=10, size=-1)
        assert contents(cluster, dst) == [bytes(80)] * 2
        await manager.copy_cache(dst, src, offset=10, size=70)
        assert contents(cluster, dst) == [bytes(10) + theirs[10:80] for theirs in contents(cluster, src)]


def tasks() -> int:
    """Count the tasks that softnpu's streams were given so far."""
    counters = soft_counters()
    return counters["tasks_inline"] + counters["tasks_queued"]


@both_modes
async def test_14_a_timeout_concerns_its_transfer_only_and_nothing_stale_is_handed_out(one_sided: bool) -> None:
    desc = CacheDesc(2, [8, 64], DataType.DT_UINT8)
    options: dict[str, Any] = {"sync_kv_timeout": 300, "enable_remote_cache_accessible": one_sided}
    async with (
        linked_pair(desc, **options) as (prompt, decoder, source, cache),
        open_cluster(3, device_id=2, **options) as third,
    ):
        manager, now = decoder.datadist.cache_manager, asyncio.get_running_loop().time
        await third.blocks(desc)
        assert (await decoder.datadist.link_clusters([cluster_info(third)]))[0] is SUCCESS
        for cluster_id in (1, 3):  # so that all is known that has to be asked for
            await manager.pull_blocks(BlocksCacheKey(cluster_id), cache, [7], [7], deadline=20)
        stamp(decoder.memory(cache), cache, 2)
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang" if one_sided else "HcclBatchPut:hang")
            before, began = tasks(), now()
            slow = manager.pull_blocks(BlocksCacheKey(1), cache, [0, 1], [0, 1])
            await until(lambda: tasks() > before)
            await manager.pull_blocks(BlocksCacheKey(3), cache, [5], [6], deadline=20)
            assert not slow.done()
            with pytest.raises(TransferTimeout) as caught:
                await slow
            assert 0.25 < now() - began < 2
        assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
        assert caught.value.peer == 1

        stamp(prompt.memory(source), source, 41)  # what comes late, or from before, can be told from this
        stamp(decoder.memory(cache), cache, 2)
        try:
            await manager.pull_blocks(BlocksCacheKey(1), cache, [3], [4], deadline=20)
        except (NotLinked, LinkError):
            await decoder.datadist.unlink_clusters([cluster_info(prompt)], force=True)
            assert (await decoder.datadist.link_clusters([cluster_info(prompt)]))[0] is SUCCESS
            await manager.pull_blocks(BlocksCacheKey(1), cache, [3], [4], deadline=20)
        await manager.pull_blocks(BlocksCacheKey(3), cache, [5], [6], deadline=20)
        found = [(t, piece, 41, 3) for t in range(2) for piece in (4,)] + [(t, 6, 3, 5) for t in range(2)]
        verify(decoder.memory(cache), cache, found, owner=2)


# ---- a whole exchange ----


def rank_table() -> str:
    devices = [{"device_id": str(i), "device_ip": f"127.0.0.{i + 1}", "rank_id": str(i)} for i in range(2)]
    servers = [{"server_id": "127.0.0.1", "device": devices}]
    return json.dumps({"version": "1.0", "server_count": "1", "status": "completed", "server_list": servers})


async def link_both(prompt: Cluster, decoder: Cluster) -> tuple[int, int]:
    """Link as a serving program does: at both ends, then ask until the memory is registered."""
    both = [cluster.datadist for cluster in (prompt, decoder)]
    first, second = await asyncio.gather(*(one.link("pd_comm_a_b", {1: 0, 2: 1}, rank_table()) for one in both))
    for one, number in zip(both, (first, second), strict=True):
        query = partial(one.query_register_mem_status, number)
        await until(lambda query=query: query() is not RegisterMemStatus.PREPARING)  # type: ignore[misc]
        assert query() is RegisterMemStatus.OK
    return first, second


@both_modes
@any_memory
async def test_a_whole_exchange_over_a_communicator(one_sided: bool) -> None:
    desc = CacheDesc(8, [16, 8, 2, 4], DataType.DT_FLOAT16)
    assert (desc.size, desc.stride) == (2048, 128)
    config: dict[str, Any] = {
        "enable_cache_manager": True,
        "enable_remote_cache_accessible": one_sided,
        "sync_kv_timeout": 33064,
        "listen_ip_info": None,
    }
    async with AsyncExitStack() as stack:
        prompt = await stack.enter_async_context(open_cluster(1, LLMRole.PROMPT, device_id=0, **config))
        decoder = await stack.enter_async_context(open_cluster(2, LLMRole.DECODER, device_id=1, **config))
        source, cache = await prompt.blocks(desc), await decoder.blocks(desc)
        _, number = await link_both(prompt, decoder)
        pull = decoder.datadist.cache_manager.pull_blocks
        blocks = ([3, 4, 9], [0, 1, 7])
        filled = prompt.memory(source).view()
        for tensor in range(8):
            for block in blocks[0]:
                start = tensor * 2048 + block * 128
                filled[start : start + 128] = pattern(77, tensor, block, 128)
        before = bytes(filled)
        there = [(t, dst, 77, src) for t in range(8) for src, dst in zip(*blocks, strict=True)]
        for _ in range(2):  # the keys of blocks are never consumed
            await pull(BlocksCacheKey(1), cache, *blocks)
            verify(decoder.memory(cache), cache, there, owner=2)
            assert bytes(filled) == before
        for key, wrong, status in (
            (BlocksCacheKey(1, 5), blocks, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST),
            (BlocksCacheKey(3), blocks, LLMStatusCode.LLM_NOT_YET_LINK),
            (BlocksCacheKey(1), ([3, 4], [0]), LLMStatusCode.LLM_PARAM_INVALID),
            (BlocksCacheKey(1), ([16], [0]), LLMStatusCode.LLM_PARAM_INVALID),
            (BlocksCacheKey(1), ([0], [16]), LLMStatusCode.LLM_PARAM_INVALID),
        ):
            with pytest.raises(LLMException) as caught:
                await pull(key, cache, *wrong)
            assert caught.value.status_code is status
            await pull(BlocksCacheKey(1), cache, *blocks)
        verify(decoder.memory(cache), cache, there, owner=2)
        await decoder.datadist.unlink(number)
        with pytest.raises(LLMException) as caught:
            await pull(BlocksCacheKey(1), cache, *blocks)
        assert caught.value.status_code is LLMStatusCode.LLM_NOT_YET_LINK
        stamp(decoder.memory(cache), cache, 2)
        await link_both(prompt, decoder)
        await pull(BlocksCacheKey(1), cache, *blocks)
        verify(decoder.memory(cache), cache, there, owner=2)
