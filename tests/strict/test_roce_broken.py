"""A channel on which a transfer was stopped half-way, while more happens to it. [src transport_roce_mem.cc:398-399, 702]"""

from __future__ import annotations

from aiodatadist import BlocksCacheKey, CacheDesc, DataType
from aiodatadist.testing import soft_fault, soft_faults_cleared, verify
from tests.strict import runner

DESC = CacheDesc(4, [16, 1024], DataType.DT_UINT8)
TENSORS = range(4)


async def what_waits_moves_on() -> None:
    async with runner.pair(DESC) as (one, _, mine, _theirs):
        manager = one.datadist.cache_manager
        pull, engine = manager.pull_blocks, manager._engine
        await pull(BlocksCacheKey(2), mine, [0], [0])
        channels = engine.find_link(2).channels
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:delay=600@1;HcclBatchGet:delay=600@2")
            stopped = pull(BlocksCacheKey(2), mine, [5], [5])
            waiting = pull(BlocksCacheKey(2), mine, [6], [6])
            outdated = channels.current
            await one.blocks(DESC, 1)  # out of the channel's reach
            await channels.reach(engine.transport.epoch, outdated.theirs)
            assert channels.current is not outdated
            stopped.cancel()
            await waiting
        verify(one.memory(mine), mine, [(t, 6, 2, 6) for t in TENSORS])


def test_what_waits_for_a_channel_that_is_outdated_and_then_broken_takes_the_next_one() -> None:
    """The broken one's flag, which is still to be set, would tell of its end before its bytes have landed."""
    runner.run("roce", what_waits_moves_on)
