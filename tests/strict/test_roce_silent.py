"""A failed request wakes no stream over RoCE: only HCCL's heartbeat thread reads error completions.

[src transport_roce_mem.cc:606-620, heartbeat.cc:1636].
"""

from __future__ import annotations

import anyio
import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, LinkError, TransferTimeout
from aiodatadist._link import Cause
from aiodatadist.testing import inside, soft_fault, soft_faults_cleared, verify
from tests.strict import runner

DESC = CacheDesc(4, [16, 1024], DataType.DT_UINT8)
TENSORS = range(4)
FAILS = "HcclBatchGet:exec=507057"
MINUTES = 100_000
"""Milliseconds that no test here may wait for."""


async def the_time_limit_ends_it() -> None:
    async with runner.pair(DESC, sync_kv_timeout=200) as (one, _, mine, _theirs):
        pull = one.datadist.cache_manager.pull_blocks
        await pull(BlocksCacheKey(2), mine, [0], [0])
        with soft_faults_cleared():
            soft_fault(FAILS)
            with pytest.raises(TransferTimeout):
                await pull(BlocksCacheKey(2), mine, [5], [5])
        await pull(BlocksCacheKey(2), mine, [6], [6])
        verify(one.memory(mine), mine, [(t, 6, 2, 6) for t in TENSORS])


def test_a_failed_request_ends_with_the_time_limit_and_the_link_goes_on() -> None:
    runner.run("roce", the_time_limit_ends_it)


async def a_lost_peer_ends_it() -> None:
    async with runner.pair(DESC, sync_kv_timeout=MINUTES) as (one, two, mine, _theirs):
        pull = one.datadist.cache_manager.pull_blocks
        await pull(BlocksCacheKey(2), mine, [0], [0])
        link = inside(one.datadist).links.find(2)
        with soft_faults_cleared():
            soft_fault(FAILS)
            task = pull(BlocksCacheKey(2), mine, [5], [5])
            await anyio.lowlevel.checkpoint()
            assert not task.done()
            link.session.lost("no heartbeat came", Cause.HEARTBEATS_MISSED)
            with pytest.raises(LinkError, match="no heartbeat came"):
                await task
        del two


def test_a_peer_whose_heartbeats_stop_ends_its_transfers_without_the_device() -> None:
    """The device would say nothing for as long as ``sync_kv_timeout``, which is longer than this test may take."""
    runner.run("roce", a_lost_peer_ends_it)
