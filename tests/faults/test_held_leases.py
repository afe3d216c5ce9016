"""Memory and leases while a transfer stands in the middle of a copy: neither is given on before the transfer has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aiodatadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheNotFound,
    DataType,
    LeaseEnd,
    LeaseTicket,
    LLMStatusCode,
    Placement,
)
from aiodatadist.testing import Cluster, cluster_info, linked_pair, open_cluster, soft_faults_cleared, soft_hold
from tests.held import there_and_back

DESC = CacheDesc(2, [16, 1 << 16], DataType.DT_UINT8)
BLOCKS = list(range(16))
POOL = '{"memory_size": 16777216, "page_shift": 12}'
ONE_SIDED = pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "requests"])


async def is_pending(call: Callable[[], Awaitable[object]], one: Cluster, other: Cluster) -> asyncio.Future[object]:
    """Start a call and check that it does not end by itself."""
    task = asyncio.ensure_future(call())
    await there_and_back(one, other)
    assert not task.done()
    return task


@ONE_SIDED
async def test_cache_that_bytes_land_in_is_given_back_when_they_have_landed(one_sided: bool) -> None:
    options: dict[str, Any] = {
        "enable_remote_cache_accessible": one_sided,
        "mem_pool_cfg": POOL,
        "sync_kv_timeout": 30_000,
    }
    async with open_cluster(1, **options) as owner, open_cluster(2, device_id=1, **options) as puller:
        await owner.blocks(DESC)
        manager = puller.datadist.cache_manager
        into = await manager.allocate_blocks_cache(DESC)
        status, _ = await puller.datadist.link_clusters([cluster_info(owner)], 5000)
        assert status is LLMStatusCode.LLM_SUCCESS
        with soft_faults_cleared(), soft_hold("HcclBatchGet" if one_sided else "HcclBatchPut", at="half") as copy:
            pull = manager.pull_blocks(BlocksCacheKey(1), into, BLOCKS, BLOCKS)
            await copy.arrived()
            before = manager.pool_usage()[Placement.DEVICE].free
            deallocation = await is_pending(lambda: manager.deallocate_blocks_cache(into), owner, puller)
            assert manager.pool_usage()[Placement.DEVICE].free == before
            copy.release()
            await pull.get_results()
        await deallocation
        assert manager.pool_usage()[Placement.DEVICE].free > before


@ONE_SIDED
async def test_cache_that_a_peer_reads_is_given_back_when_it_has_been_read(one_sided: bool) -> None:
    options: dict[str, Any] = {
        "enable_remote_cache_accessible": one_sided,
        "mem_pool_cfg": POOL,
        "sync_kv_timeout": 30_000,
    }
    async with open_cluster(1, **options) as owner, open_cluster(2, device_id=1, **options) as puller:
        manager = owner.datadist.cache_manager
        lent = await manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))
        into = await puller.blocks(DESC)
        status, _ = await puller.datadist.link_clusters([cluster_info(owner)], 5000)
        assert status is LLMStatusCode.LLM_SUCCESS
        with soft_faults_cleared(), soft_hold("HcclBatchGet" if one_sided else "HcclBatchPut", at="half") as copy:
            pull = puller.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), into, BLOCKS, BLOCKS)
            await copy.arrived()
            before = manager.pool_usage()[Placement.DEVICE].free
            deallocation = await is_pending(lambda: manager.deallocate_blocks_cache(lent), owner, puller)
            assert manager.pool_usage()[Placement.DEVICE].free == before
            copy.release()
            await pull.get_results()
        await deallocation
        assert manager.pool_usage()[Placement.DEVICE].free > before


@ONE_SIDED
async def test_lease_that_was_withdrawn_is_claimed_by_no_further_taker(one_sided: bool) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=one_sided, sync_kv_timeout=30_000) as (
        owner,
        puller,
        theirs,
        mine,
    ):
        manager = puller.datadist.cache_manager
        lease = owner.datadist.cache_manager.lease_blocks(theirs, [3, 9], 60)
        ticket: LeaseTicket = lease.ticket()
        with soft_faults_cleared(), soft_hold("HcclBatchGet" if one_sided else "HcclBatchPut", at="half") as copy:
            first = manager.pull_leased(ticket, mine, [0, 1], takers=2)
            await copy.arrived()
            withdrawal = await is_pending(lease.withdraw, owner, puller)
            with pytest.raises(CacheNotFound):
                await manager.pull_leased(ticket, mine, [2, 4], takers=2)
            copy.release()
            await first
        assert await withdrawal is LeaseEnd.WITHDRAWN
