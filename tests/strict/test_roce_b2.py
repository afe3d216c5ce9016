"""B2: an abort takes back what a stream has, not what was posted.

[src transport_roce_mem.cc:398-399, 702].
"""

from __future__ import annotations

import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, LLMStatusCode, TransferTimeout
from aiodatadist.testing import pattern, soft_hold, verify
from tests.strict import runner

DESC = CacheDesc(4, [16, 1024], DataType.DT_UINT8)
TENSORS = range(4)
OTHER_USE = 77
"""Owner of the pattern that the caller puts where a cancelled transfer was."""


def use_otherwise(memory: memoryview, block: int) -> None:
    for tensor in TENSORS:
        at = tensor * DESC.size + block * DESC.stride
        memory[at : at + DESC.stride] = pattern(OTHER_USE, tensor, block, DESC.stride)


async def cancelled_is_over() -> None:
    async with runner.pair(DESC) as (one, _, mine, _theirs):
        pull = one.datadist.cache_manager.pull_blocks
        await pull(BlocksCacheKey(2), mine, [0], [0])
        with soft_hold("HcclBatchGet", at="half") as copy, soft_hold("HcclCommDestroy") as close:
            task = pull(BlocksCacheKey(2), mine, [5], [5])
            await copy.arrived()
            task.cancel()
            await close.arrived()
            assert not task.done(), "what was posted can still land"
            copy.release()
            close.release()
            assert await task.synchronize() is not LLMStatusCode.LLM_SUCCESS
            assert task.cancelled()
        use_otherwise(one.memory(mine).view(), 5)
        for block in range(6, 12):
            await pull(BlocksCacheKey(2), mine, [block], [block])
            verify(one.memory(mine), mine, [(t, block, 2, block) for t in TENSORS])
            verify(one.memory(mine), mine, [(t, 5, OTHER_USE, 5) for t in TENSORS])


def test_a_cancelled_pull_writes_nothing_and_the_next_one_ends_when_it_has_landed() -> None:
    runner.run("roce", cancelled_is_over)


async def timed_out_is_over() -> None:
    async with runner.pair(DESC, sync_kv_timeout=1000) as (one, two, mine, theirs):
        push = one.datadist.cache_manager.push_blocks
        await push(BlocksCacheKey(2), mine, [0], [0])
        with soft_hold("HcclBatchPut", at="half") as copy, soft_hold("HcclCommDestroy") as close:
            task = push(BlocksCacheKey(2), mine, [5], [5])
            await copy.arrived()
            await close.arrived()
            assert not task.done(), "what was posted can still be read"
            copy.release()
            close.release()
            with pytest.raises(TransferTimeout):
                await task
        use_otherwise(one.memory(mine).view(), 5)
        held = bytes(two.memory(theirs).view())
        await push(BlocksCacheKey(2), mine, [6], [6])
        verify(two.memory(theirs), theirs, [(t, 6, 1, 6) for t in TENSORS])
        at = 5 * DESC.stride
        assert bytes(two.memory(theirs).view()[at : at + DESC.stride]) == held[at : at + DESC.stride]


def test_a_push_whose_time_is_over_sends_nothing_of_what_its_memory_is_used_for_next() -> None:
    runner.run("roce", timed_out_is_over)
