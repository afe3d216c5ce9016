"""Request/response mode: the owner writes, keys are looked up when the request comes, and consumed."""

from __future__ import annotations

import asyncio
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
    FeatureNotEnabled,
    LinkClosed,
    LLMStatusCode,
    ParamInvalid,
    Placement,
    TransferTimeout,
)
from aiodatadist._wire.messages import MAX_INDEXES, Pull
from aiodatadist.testing import (
    Cluster,
    cluster_info,
    inside,
    linked_pair,
    open_cluster,
    soft_fault,
    soft_faults_cleared,
    verify,
)
from tests.stopwatch import lasting
from tests.strict.marks import any_memory
from tests.test_pull import BLOCKS, SLOTS, moved, transports

POOL = '{"memory_size": 1048576, "page_shift": 12}'


async def slots(cluster: Cluster, keys: list[CacheKey], fill: int = 0) -> Cache:
    """Allocate a cache from the pool: slot ``s`` of tensor ``t`` is full of ``fill + 16 * t + s``."""
    manager = cluster.datadist.cache_manager
    cache = await manager.allocate_cache(SLOTS, keys)
    for tensor, array in enumerate(manager.arrays(cache)):
        for slot in range(4):
            array[slot] = fill + 16 * tensor + slot
    return cache


def first_bytes(cluster: Cluster, cache: Cache, slot: int) -> list[int]:
    return [int(array[slot][0]) for array in cluster.datadist.cache_manager.arrays(cache)]


@transports
async def test_blocks_are_written_by_their_owner(transport: str) -> None:
    pair = linked_pair(BLOCKS, enable_remote_cache_accessible=False, transport=transport)
    async with pair as (prompt, decoder, source, cache):
        report = await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3, 4, 9], [0, 1, 7])
        assert (report.bytes, report.ranges) == (3 * 8 * BLOCKS.stride, 2 * 8)
        verify(decoder.memory(cache), cache, moved(BLOCKS, {0: 3, 1: 4, 7: 9}))
        verify(prompt.memory(source), source, [(t, p, 1, p) for t in range(8) for p in range(16)])
        by_id = CacheKeyByIdAndIndex(1, source.cache_id)
        await decoder.datadist.cache_manager.pull_blocks(by_id, cache, [12], [2])
        verify(decoder.memory(cache), cache, moved(BLOCKS, {0: 3, 1: 4, 7: 9, 2: 12}))


async def test_a_request_that_comes_while_its_owner_unlinks_ends_with_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked_pair(BLOCKS, enable_remote_cache_accessible=False) as (prompt, decoder, _, cache):
        link, unlinking = inside(prompt.datadist).links.find(2), list[asyncio.Task[None]]()
        begin = link.transfers.responder.begin

        def leave_and_begin(message: Pull) -> None:
            unlinking.append(asyncio.create_task(link.disconnect("it was enough", 5.0)))
            asyncio.get_running_loop().call_soon(begin, message)  # when that task has begun

        monkeypatch.setattr(link.transfers.responder, "begin", leave_and_begin)
        with pytest.raises(
            LinkClosed, match=r"cluster 1 has ended the link, and said: .* was unlinked: it was enough"
        ) as told:
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        assert (told.value.peer, told.value.status_code) == (1, LLMStatusCode.LLM_NOT_YET_LINK)
        await unlinking[0]


async def test_a_key_is_consumed_with_its_last_layer_and_the_memory_with_the_last_key() -> None:
    async with linked_pair(BLOCKS, enable_remote_cache_accessible=False, mem_pool_cfg=POOL) as (prompt, decoder, _, _):
        owner, puller = prompt.datadist.cache_manager, decoder.datadist.cache_manager
        source = await slots(prompt, [CacheKey(1, 100), CacheKey(1, 101)])
        target = await slots(decoder, [], 200)
        free = owner.pool_usage()[Placement.DEVICE].free
        for _ in range(2):
            await puller.pull_cache(CacheKey(1, 100), target, 1, src_layer_range=range(1), dst_layer_range=range(1))
        await puller.pull_cache(CacheKey(1, 100), target, 1, src_layer_range=range(1, 2), dst_layer_range=range(1, 2))
        assert first_bytes(decoder, target, 1) == [0, 16, 32, 48]
        with pytest.raises(CacheNotFound):
            await puller.pull_cache(CacheKey(1, 100), target, 1)
        await owner.deallocate_cache(source)
        assert source.tensor_addrs == []
        assert owner.pool_usage()[Placement.DEVICE].free == free
        await puller.pull_cache(CacheKeyByIdAndIndex(1, source.cache_id, 1), target, 2)
        assert first_bytes(decoder, target, 2) == [1, 17, 33, 49]
        assert owner.pool_usage()[Placement.DEVICE].free > free
        with pytest.raises(CacheNotFound):
            await puller.pull_cache(CacheKeyByIdAndIndex(1, source.cache_id, 1), target, 2)


async def test_prefixes_and_registered_caches_are_not_consumed() -> None:
    async with linked_pair(SLOTS, slots=True, enable_remote_cache_accessible=False, mem_pool_cfg=POOL) as (p, d, _, c):
        await slots(p, [CacheKey(1, 2**64 - 1, prefix_id=5)])
        for key in (CacheKey(1, 2**64 - 1, prefix_id=5), CacheKey(1, 3)):
            for _ in range(2):
                await d.datadist.cache_manager.pull_cache(key, c, 0)


async def test_keys_bound_after_linking_are_found() -> None:
    async with linked_pair(SLOTS, slots=True, enable_remote_cache_accessible=False, mem_pool_cfg=POOL) as (p, d, _, c):
        with pytest.raises(CacheNotFound):
            await d.datadist.cache_manager.pull_cache(CacheKey(1, 500), c, 0)
        await slots(p, [CacheKey(1, 500)])
        await d.datadist.cache_manager.pull_cache(CacheKey(1, 500), c, 0)


async def test_what_the_owner_refuses_comes_with_its_status_and_leaves_the_link_as_it_was() -> None:
    async with linked_pair(BLOCKS, enable_remote_cache_accessible=False, mem_pool_cfg=POOL) as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager
        with pytest.raises(CacheNotFound):
            await manager.pull_blocks(BlocksCacheKey(1, 9), cache, [0], [0])
        with pytest.raises(ParamInvalid, match=r"src_blocks\[0\] is 16: the source cache has 16 blocks"):
            await manager.pull_blocks(BlocksCacheKey(1), cache, [16], [0])
        with pytest.raises(FeatureNotEnabled, match="one-sided"):
            await manager.push_blocks(BlocksCacheKey(1), cache, [0], [0])
        large = await decoder.blocks(CacheDesc(1, [MAX_INDEXES + 1, 16], DataType.DT_UINT8), model_id=None)
        many = range(MAX_INDEXES + 1)
        with pytest.raises(ParamInvalid, match="pull them with several calls"):
            await manager.pull_blocks(BlocksCacheKey(1), large, many, many)
        await manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])


async def test_an_owner_that_hangs_is_told_to_stop() -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": False, "sync_kv_timeout": 200}
    async with linked_pair(BLOCKS, **options) as (_, decoder, _, cache):
        pull = decoder.datadist.cache_manager.pull_blocks
        with soft_faults_cleared():
            soft_fault("HcclBatchPut:hang")
            with lasting(2, at_least=0.15), pytest.raises(TransferTimeout) as caught:
                await pull(BlocksCacheKey(1), cache, [0], [1])
            assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
        before = bytes(decoder.memory(cache).view())
        await pull(BlocksCacheKey(1), cache, [9], [2], deadline=20)
        assert bytes(decoder.memory(cache).view())[: 2 * BLOCKS.stride] == before[: 2 * BLOCKS.stride]


async def test_both_ends_need_the_same_mode() -> None:
    async with open_cluster(1, enable_remote_cache_accessible=False) as one, open_cluster(2, device_id=1) as other:
        status, _ = await other.datadist.link_clusters([cluster_info(one)])
        assert status is LLMStatusCode.LLM_PARAM_INVALID


@any_memory
async def test_contiguous_slots_become_blocks() -> None:
    contiguous = CacheDesc(2, [3, 2500], DataType.DT_UINT8)
    blocks = CacheDesc(2, [8, 1024], DataType.DT_UINT8)
    options: dict[str, Any] = {"enable_remote_cache_accessible": False}
    async with open_cluster(1, **options) as prompt, open_cluster(2, device_id=1, **options) as decoder:
        source = await prompt.contiguous(contiguous, [CacheKey(1, i) for i in range(3)])
        target = await decoder.blocks(blocks)
        await decoder.datadist.link_clusters([cluster_info(prompt)])
        await decoder.datadist.cache_manager.pull_blocks(CacheKey(1, 1), target, [], [6, 0, 3])
        slot, after = prompt.memory(source).view(), decoder.memory(target).view()
        for tensor in range(2):
            want = bytes(slot[tensor * 7500 + 2500 : tensor * 7500 + 5000])
            at = tensor * 8192
            got = bytes(after[at + 6144 : at + 7168]) + bytes(after[at : at + 1024])
            assert got + bytes(after[at + 3072 : at + 3072 + 452]) == want
