"""A transfer that is printed says what it is about."""

from __future__ import annotations

import re

import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    TransferWithCacheKeyConfig,
)
from aiodatadist.testing import linked_pair

DESC = CacheDesc(4, [8, 4096], DataType.DT_UINT8)
KEY = r"BlocksCacheKey\(.*cluster_id=1.*\)"


@pytest.mark.parametrize("one_sided", [True, False])
async def test_pull_of_blocks(one_sided: bool) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=one_sided) as (_, decoder, _, cache):
        task = decoder.datadist.cache_manager.pull_blocks(
            BlocksCacheKey(1), cache, [1, 2, 3], [4, 5, 6], src_layer_range=range(1), dst_layer_range=range(1)
        )
        shown = repr(task)
        assert re.fullmatch(rf"<CacheTask pull_blocks peer 1: {KEY}, 3 blocks, layers 0 to 0, \d+ bytes, \w+>", shown)
        report = await task
        assert report.bytes == 2 * 3 * 4096
        assert repr(task).endswith(", 24576 bytes, done>")


async def test_a_slot_a_layered_transfer_and_a_copy() -> None:
    async with linked_pair(DESC, slots=True) as (_, decoder, source, cache):
        manager = decoder.datadist.cache_manager
        task = manager.pull_cache(CacheKeyByIdAndIndex(1, source.cache_id, 2), cache, 3)
        assert ", 4096 bytes of a slot, all layers, " in repr(task)
        await task
        task = manager.copy_cache(cache, cache, 1, 0)
        assert repr(task).startswith("<CacheTask copy_cache peer 2: 1 blocks of 4 tensors, ")
        await task
    async with linked_pair(DESC) as (_, decoder, _, cache):
        synchronizer = AwaitableLayerSynchronizer(2)
        config = TransferWithCacheKeyConfig(BlocksCacheKey(1), range(2), range(2))
        task = decoder.datadist.cache_manager.transfer_cache_async(cache, synchronizer, [config], [1, 2], [1, 2])
        assert re.search(rf"{KEY}, 2 blocks, layers 0 to 1, 0 bytes", repr(task))
        synchronizer.ready(0)
        synchronizer.ready(1)
        await task
