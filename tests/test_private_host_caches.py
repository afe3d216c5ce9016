"""A HOST cache that was registered without a flag is the destination of this cluster's own pulls, and of nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodatadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheNotFound,
    DataType,
    LLMException,
    LLMStatusCode,
    ParamInvalid,
    Placement,
)
from aiodatadist.testing import Cluster, cluster_info, open_cluster, pattern
from tests.strict.marks import IS_HCCS, any_memory

HOST = CacheDesc(2, [4, 4096], DataType.DT_UINT8, Placement.HOST)
DEVICE = CacheDesc(2, [4, 4096], DataType.DT_UINT8)
modes = pytest.mark.parametrize(
    "one_sided",
    [True, pytest.param(False, marks=pytest.mark.skipif(IS_HCCS, reason="HCCS: no HOST memory of a peer's"))],
    ids=["one_sided", "request"],
)


def host_tensors(cluster: Cluster) -> list[Any]:
    """Memory of numpy's; where links are over HCCS, pinned memory, because other memory is refused there."""
    if not IS_HCCS:
        return [np.zeros(HOST.size, np.uint8) for _ in range(HOST.num_tensors)]
    pinned = [cluster.datadist.device.allocate(HOST.size, Placement.HOST) for _ in range(HOST.num_tensors)]
    return [np.frombuffer(memory.view(), np.uint8) for memory in pinned]


@modes
async def test_it_is_pulled_into_whether_it_was_registered_before_the_link_or_behind_it(one_sided: bool) -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": one_sided}
    async with open_cluster(1, **options) as prompt, open_cluster(2, device_id=1, **options) as decoder:
        manager = decoder.datadist.cache_manager
        await prompt.blocks(DEVICE)
        await prompt.contiguous(DEVICE, [CacheKey(1, i) for i in range(4)])
        first, slots, second = host_tensors(decoder), host_tensors(decoder), host_tensors(decoder)
        blocks = await manager.register_blocks_cache(HOST, first)
        contiguous = await manager.register_cache(HOST, slots)
        await decoder.datadist.link_clusters([cluster_info(prompt)])
        later = await manager.register_blocks_cache(HOST, second)
        pulls = [
            manager.pull_blocks(BlocksCacheKey(1), cache, [number], [number + 2])
            for cache in (blocks, later)
            for number in range(2)  # both at once: the memory becomes known once
        ]
        for pull in [*pulls, manager.pull_cache(CacheKey(1, 3), contiguous, 1)]:
            await pull
        for tensor in range(2):
            for arrays in (first, second):
                for number in range(2):
                    at = (number + 2) * HOST.stride
                    assert bytes(arrays[tensor][at : at + HOST.stride]) == pattern(1, tensor, number, HOST.stride)
            assert bytes(slots[tensor][4096:8192]) == pattern(1, tensor, 3, 4096)
        with pytest.raises(LLMException) as caught:
            await manager.unregister_cache(later.cache_id)
        assert caught.value.status_code is LLMStatusCode.LLM_EXIST_LINK
        await decoder.datadist.unlink_clusters([cluster_info(prompt)])
        for cache in (blocks, later, contiguous):
            await manager.unregister_cache(cache.cache_id)


async def test_peers_do_not_see_it_and_it_is_pushed_to_no_peer() -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        await prompt.blocks(DEVICE)
        theirs = await prompt.blocks(DEVICE, 1)
        manager = decoder.datadist.cache_manager
        cache = await manager.register_blocks_cache(HOST, host_tensors(decoder), BlocksCacheKey(2))
        refused = await manager.register_blocks_cache(HOST, host_tensors(decoder), remote_accessible=False)
        await decoder.datadist.link_clusters([cluster_info(prompt)])
        await manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        with pytest.raises(ParamInvalid, match="not remote accessible"):
            await manager.push_blocks(BlocksCacheKey(1), cache, [0], [0])
        with pytest.raises(ParamInvalid, match="not remote accessible"):
            await manager.pull_blocks(BlocksCacheKey(1), refused, [0], [0])
        with pytest.raises(CacheNotFound, match="offers no cache"):
            await prompt.datadist.cache_manager.pull_blocks(BlocksCacheKey(2), theirs, [0], [0])


@any_memory
async def test_one_that_cannot_be_made_known_says_why_and_stays_as_it_was() -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        await prompt.blocks(DEVICE)
        manager = decoder.datadist.cache_manager
        whole = np.zeros(3 * HOST.size, np.uint8)
        await manager.register_blocks_cache(HOST, [whole[: HOST.size], whole[HOST.size : 2 * HOST.size]], None, True)
        half = HOST.size // 2
        cache = await manager.register_blocks_cache(HOST, [whole[half : half + HOST.size], whole[2 * HOST.size :]])
        await decoder.datadist.link_clusters([cluster_info(prompt)])
        for _ in range(2):
            with pytest.raises(ParamInvalid, match="overlaps the registered"):
                await manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        await manager.unregister_cache(cache.cache_id)
        assert not whole.any()


@pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "request"])
async def test_element_types_that_differ_are_said_once(one_sided: bool, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": one_sided}
    halves = CacheDesc(2, [4, 2048], DataType.DT_FLOAT16)
    floats = CacheDesc(2, [4, 1024], DataType.DT_FLOAT)
    async with open_cluster(1, **options) as prompt, open_cluster(2, device_id=1, **options) as decoder:
        await prompt.blocks(halves)
        mine = await decoder.blocks(floats)
        await decoder.datadist.link_clusters([cluster_info(prompt)])
        for number in range(3):
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), mine, [number], [number])
        said = [record.getMessage() for record in caplog.records if "converted" in record.getMessage()]
        assert len(said) == 1
        assert "DT_FLOAT16" in said[0]
        assert "is DT_FLOAT," in said[0] or "is DT_FLOAT:" in said[0]
