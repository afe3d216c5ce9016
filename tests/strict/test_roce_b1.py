"""B1: streams of one communicator share its queue and its fence.

[src transport_roce_mem.cc:398-399, 512-514, 611, 702].
"""

from __future__ import annotations

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, EventLayerSynchronizer, TransferWithCacheKeyConfig
from aiodatadist.testing import soft_hold, verify
from tests.held import there_and_back
from tests.strict import runner

LAYERS = 4
DESC = CacheDesc(2 * LAYERS, [16, 1024], DataType.DT_UINT8)
TENSORS = range(2 * LAYERS)
ALL = range(LAYERS)
ROUNDS = 20
"""Transfers beside a gated one, which is issued some turns of the loop after it was asked for."""


async def gates_hold() -> None:
    async with runner.pair(DESC, sync_kv_timeout=2000) as (one, two, mine, theirs):
        manager = one.datadist.cache_manager
        gates = EventLayerSynchronizer(one.datadist.device, LAYERS)
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2), ALL, ALL)
        layered = manager.transfer_cache_async(mine, gates, [config], [1], [1])
        for _ in range(ROUNDS):
            await manager.push_blocks(BlocksCacheKey(2), mine, [3], [3])
        expected = [(t, 1, 2, 1) for t in TENSORS] + [(t, 3, 1, 3) for t in TENSORS]
        verify(two.memory(theirs), theirs, expected, owner=2)
        layered.cancel()


def test_layers_behind_shut_gates_do_not_travel_with_other_transfers() -> None:
    """A doorbell of any stream starts what was posted before it: they would be sent before they were computed."""
    runner.run("roce", gates_hold)


async def ends_are_true() -> None:
    async with runner.pair(DESC, sync_kv_timeout=2000) as (one, two, mine, _theirs):
        manager = one.datadist.cache_manager
        gates = EventLayerSynchronizer(one.datadist.device, LAYERS)
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2), ALL, ALL)
        layered = manager.transfer_cache_async(mine, gates, [config], [1], [1])
        for block in range(2, 12):
            with soft_hold("HcclBatchGet", at="half") as copy:
                pull = manager.pull_blocks(BlocksCacheKey(2), mine, [block], [block])
                await copy.arrived()
                await there_and_back(one, two)
                assert not pull.done()
                copy.release()
                await pull
            verify(one.memory(mine), mine, [(t, block, 2, block) for t in TENSORS])
        layered.cancel()


def test_a_pull_is_over_when_its_bytes_have_landed() -> None:
    """And not when the fence of another stream's transfer was reached."""
    runner.run("roce", ends_are_true)
