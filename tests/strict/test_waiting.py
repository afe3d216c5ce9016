"""B10: a query tells no failure [src stream_stars.cc; acl runtime]; B11: each timed-out synchronize is an error record."""

from __future__ import annotations

import anyio
import pytest

from aiodatadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    EventLayerSynchronizer,
    LLMException,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from aiodatadist.testing import soft_counters, soft_fault, soft_faults_cleared, verify
from tests.held import let_pass
from tests.strict import runner

LAYERS = 4
BLOCK = 64 << 10
DESC = CacheDesc(2 * LAYERS, [64, BLOCK], DataType.DT_UINT8)
ALL = range(LAYERS)
BLOCKS = list(range(0, 64, 2))
COPY_DATA = 507052
"""A code with which the device fails a copy that HcclBatch* has taken with 0."""
WAIT = 1.0
"""Seconds at a shut gate: with 20 ms for each synchronize there would be some 50 records."""


async def failed_copies_are_told() -> None:
    async with runner.pair(DESC) as (one, _two, mine, _theirs):
        manager = one.datadist.cache_manager
        for _ in range(3):
            with soft_faults_cleared():
                soft_fault(f"HcclBatchGet:exec={COPY_DATA}")
                with pytest.raises(LLMException):
                    await manager.pull_blocks(BlocksCacheKey(2), mine, BLOCKS, BLOCKS)
        await manager.pull_blocks(BlocksCacheKey(2), mine, [1], [1])
        verify(one.memory(mine), mine, [(t, 1, 2, 1) for t in range(2 * LAYERS)])


async def layers_that_failed_are_not_announced() -> None:
    async with runner.pair(DESC) as (one, two, mine, theirs):
        gates = EventLayerSynchronizer(one.datadist.device, LAYERS)
        compute = one.datadist.device.open_stream("compute")
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2), ALL, ALL)
        with soft_faults_cleared():
            soft_fault(f"HcclBatchPut:exec={COPY_DATA}@2")
            task = one.datadist.cache_manager.transfer_cache_async(mine, gates, [config], BLOCKS, BLOCKS)
            seen: list[int] = []
            async with anyio.create_task_group() as tasks:

                async def watch() -> None:
                    seen.extend([done.layer_index async for done in task.progress()])

                tasks.start_soon(watch)
                for layer in ALL:
                    gates.record(layer, compute)
                assert await task.synchronize() is not LLMStatusCode.LLM_SUCCESS
        view, size = two.memory(theirs).view(), BLOCK
        for layer in seen:
            start = theirs.tensor_addrs[2 * layer] - two.memory(theirs).address + BLOCKS[0] * size
            assert bytes(view[start : start + 4]) == (1).to_bytes(4, "little"), (
                f"layer {layer} is told, and is not there"
            )
        del view
        await compute.aclose()


async def waiting_costs_few_error_records() -> None:
    async with runner.pair(DESC) as (one, two, mine, theirs):
        gates = EventLayerSynchronizer(one.datadist.device, LAYERS)
        compute = one.datadist.device.open_stream("compute")
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2), ALL, ALL)
        task = one.datadist.cache_manager.transfer_cache_async(mine, gates, [config], BLOCKS, BLOCKS)
        before = soft_counters()["sync_timeouts"]
        await let_pass(WAIT)  # what the user's model takes
        for layer in ALL:
            gates.record(layer, compute)
        await task
        assert soft_counters()["sync_timeouts"] - before <= LAYERS
        verify(two.memory(theirs), theirs, [(t, block, 1, block) for t in range(2 * LAYERS) for block in BLOCKS])
        await compute.aclose()


@pytest.mark.parametrize("kind", ["hccs", "roce"])
def test_b10_a_copy_that_failed_is_never_a_success(kind: str) -> None:
    runner.run(kind, failed_copies_are_told)


@pytest.mark.parametrize("kind", ["hccs", "roce"])
def test_b10_a_layer_that_failed_is_not_announced(kind: str) -> None:
    runner.run(kind, layers_that_failed_are_not_announced)


@pytest.mark.parametrize("kind", ["hccs", "roce"])
def test_b11_a_transfer_that_waits_does_not_flood_the_log(kind: str) -> None:
    runner.run(kind, waiting_costs_few_error_records)
