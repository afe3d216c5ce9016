"""B9: 510 unanswered requests make the next call block, for HCCL_CONNECT_TIMEOUT at most: 120 s, and then it fails.

[src adapter_hccp.cc:771-820, 2474; adapter_hccp.h:46, 49].
"""

from __future__ import annotations

import asyncio

import anyio
import pytest

from aiodatadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    EventLayerSynchronizer,
    LLMStatusCode,
    TransferTimeout,
    TransferWithCacheKeyConfig,
)
from aiodatadist.testing import soft_fault, soft_faults_cleared, soft_hold, verify
from tests.held import turns
from tests.strict import runner

LAYERS = 4
BLOCKS = 600
DESC = CacheDesc(2 * LAYERS, [BLOCKS, 512], DataType.DT_UINT8)
ALL = range(LAYERS)
SCATTERED = list(range(0, BLOCKS, 2))
"""No two of them touch: a request for each, in each of 8 tensors."""
SOON = 10.0
"""Seconds that a slow machine may take for what is over in tens of milliseconds, or else after 120 s."""


async def gated_layers_can_be_cancelled() -> None:
    async with runner.pair(DESC) as (one, two, mine, theirs):
        manager = one.datadist.cache_manager
        gates = EventLayerSynchronizer(one.datadist.device, LAYERS)
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2), ALL, ALL)
        layered = manager.transfer_cache_async(mine, gates, [config], SCATTERED, SCATTERED)
        with anyio.fail_after(SOON):
            await manager.push_blocks(BlocksCacheKey(2), mine, [1], [1])
            layered.cancel()
            assert await layered.synchronize() is not LLMStatusCode.LLM_SUCCESS
            await manager.push_blocks(BlocksCacheKey(2), mine, [3], [3])
        verify(two.memory(theirs), theirs, [(0, 1, 1, 1), (0, 3, 1, 3), (0, 0, 2, 0)])


def test_layers_behind_shut_gates_block_nothing() -> None:
    runner.run("roce", gated_layers_can_be_cancelled)


async def time_limits_are_kept() -> None:
    async with runner.pair(DESC, sync_kv_timeout=300) as (one, _, mine, _theirs):
        pull = one.datadist.cache_manager.pull_blocks
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            with anyio.fail_after(SOON), pytest.raises(TransferTimeout):
                await pull(BlocksCacheKey(2), mine, SCATTERED, SCATTERED)
        with anyio.fail_after(SOON):
            await pull(BlocksCacheKey(2), mine, [1], [1])
        verify(one.memory(mine), mine, [(t, 1, 2, 1) for t in range(8)])


async def cancelling_is_seen() -> None:
    async with runner.pair(DESC) as (one, _, mine, _theirs):
        pull = one.datadist.cache_manager.pull_blocks
        with soft_faults_cleared():
            with soft_hold("HcclBatchGet") as hold:
                soft_fault("HcclBatchGet:hang")
                task = asyncio.ensure_future(pull(BlocksCacheKey(2), mine, SCATTERED, SCATTERED))
                await hold.arrived()
            await turns()
            task.cancel()
            with anyio.fail_after(SOON), pytest.raises(asyncio.CancelledError):
                await task
        with anyio.fail_after(SOON):
            await pull(BlocksCacheKey(2), mine, SCATTERED, SCATTERED)
        verify(one.memory(mine), mine, [(t, b, 2, b) for t in range(8) for b in SCATTERED])


async def the_queue_does_not_move() -> None:
    await time_limits_are_kept()
    await cancelling_is_seen()


def test_a_queue_that_does_not_move_costs_a_transfer_its_time_and_no_more_and_a_pull_can_be_cancelled() -> None:
    runner.run("roce", the_queue_does_not_move)
