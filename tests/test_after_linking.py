"""Memory that is registered after linking: a further channel takes over, and the old one goes when no transfer uses it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, DataType, LinkError, LLMStatusCode
from aiodatadist.testing import (
    Cluster,
    cluster_info,
    linked_pair,
    open_cluster,
    soft_counters,
    soft_fault,
    soft_faults_cleared,
    soft_hold,
    verify,
)
from tests.strict.marks import IS_HCCS

DESC = CacheDesc(4, [16, 256], DataType.DT_UINT8)
modes = pytest.mark.parametrize("one_sided", [True, False])
sides = pytest.mark.parametrize("side", ["client", "server"])


async def register(cluster: Cluster, fill: int, model_id: int | None = None) -> tuple[Cache, list[Any]]:
    """Register numpy arrays, over HCCS in memory of the device's: tensor ``t`` is full of ``fill + t``."""
    arrays = [np.zeros((16, 256), np.uint8) for _ in range(4)]
    if IS_HCCS:
        view = np.frombuffer(cluster.datadist.device.allocate(4 * DESC.size).view(), np.uint8)
        arrays = [view[t * DESC.size :][: DESC.size].reshape(16, 256) for t in range(4)]
    for tensor, array in enumerate(arrays):
        array[:] = fill + tensor
    key = None if model_id is None else BlocksCacheKey(cluster.datadist.cluster_id, model_id)
    return await cluster.datadist.cache_manager.register_blocks_cache(DESC, arrays, key), arrays


@modes
@pytest.mark.parametrize("transport", ["hccl", "loopback"])
async def test_what_is_registered_later_is_source_and_destination_at_once(one_sided: bool, transport: str) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=one_sided, transport=transport) as (p, d, first, last):
        for mine, theirs, old in ((d, p, first), (p, d, last)):
            late, arrays = await register(mine, 10, 1)
            await mine.datadist.cache_manager.pull_blocks(BlocksCacheKey(theirs.datadist.cluster_id), late, [3], [5])
            view = theirs.memory(old).view()
            at = old.tensor_addrs[2] - theirs.memory(old).address + 3 * 256
            assert bytes(arrays[2][5]) == bytes(view[at : at + 256])
            del view
            back, copies = await register(theirs, 0)
            await theirs.datadist.cache_manager.pull_blocks(BlocksCacheKey(mine.datadist.cluster_id, 1), back, [2], [0])
            assert [int(copy[0][0]) for copy in copies] == [10, 11, 12, 13]


async def test_old_channels_are_closed() -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, _):
        before = soft_counters()["comms"]
        for i in range(5):
            await register(prompt, 20 + i, 10 + i)
            mine, copies = await register(decoder, 0)
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1, 10 + i), mine, [1], [1])
            assert [int(copy[1][0]) for copy in copies] == [20 + i + t for t in range(4)]
        async with asyncio.timeout(20):
            while soft_counters()["comms"] > before:  # noqa: ASYNC110 - softnpu has no event for it
                await asyncio.sleep(0.01)


async def test_many_that_need_a_further_channel_share_one() -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, _):
        caches = [await register(decoder, i) for i in range(10)]
        others = [await register(prompt, i) for i in range(10)]
        pulls = [decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), c, [1], [1]) for c, _ in caches]
        pulls += [prompt.datadist.cache_manager.pull_blocks(BlocksCacheKey(2), c, [1], [1]) for c, _ in others]
        await asyncio.gather(*pulls)
        assert soft_counters()["comms"] <= 2 + 4


async def test_transfers_under_way_end_on_the_old_channel() -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, cache):
        with soft_hold("HcclBatchGet", at="half") as copy:
            slow = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])
            await copy.arrived()
            late, _ = await register(prompt, 40)
            await prompt.datadist.cache_manager.pull_blocks(BlocksCacheKey(2), late, [0], [0])
            assert not slow.done()
            copy.release()
            assert (await slow).bytes == 4 * 256


@sides
@pytest.mark.parametrize("call", ["HcclCommPrepare", "HcclCommInitClusterInfoMemConfig"])
async def test_a_further_channel_that_cannot_be_opened_fails_what_needs_it_and_no_more(side: str, call: str) -> None:
    async with linked_pair(DESC, sync_kv_timeout=30_000) as (prompt, decoder, _, cache):
        who, other = (decoder, 1) if side == "client" else (prompt, 2)
        late, _ = await register(who, 60)
        pull = who.datadist.cache_manager.pull_blocks
        with soft_faults_cleared():
            soft_fault(f"{call}:fail=4")
            with pytest.raises(LinkError, match="no further channel could be opened"):
                await pull(BlocksCacheKey(other), late, [1], [1])
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [1])
        await pull(BlocksCacheKey(other), late, [1], [1])


async def test_memory_that_is_being_given_back_is_no_part_of_a_link_that_is_made_meanwhile() -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        manager = decoder.datadist.cache_manager
        with soft_faults_cleared():
            soft_fault("aclrtMemcpyAsync:hang")
            copy = manager.copy_blocks(cache, {0: [1]})
            given_back = asyncio.create_task(manager.unregister_cache(cache.cache_id))
            await asyncio.sleep(0)
            linked = await decoder.datadist.link_clusters([cluster_info(prompt)], 5000)
            assert linked[0] is LLMStatusCode.LLM_SUCCESS, linked.errors
            assert not given_back.done(), "the copy uses it"
            copy.cancel()
            await given_back
        with pytest.raises(asyncio.CancelledError):
            await copy
        again = await manager.register_blocks_cache(DESC, cache.tensor_addrs)
        await manager.pull_blocks(BlocksCacheKey(1), again, [2], [3])
        verify(decoder.memory(cache), again, [(tensor, 3, 1, 2) for tensor in range(4)])
