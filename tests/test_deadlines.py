"""A deadline counts from the call, whatever the transfer waits for, and any number of them are told in time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    CacheDesc,
    CacheManager,
    CacheTask,
    DataType,
    LLMStatusCode,
    ParamInvalid,
    TransferTimeout,
    TransferWithCacheKeyConfig,
)
from aiodatadist.testing import inside, linked_pair, soft_fault, soft_faults_cleared, verify
from tests.stopwatch import lasting

BLOCKS = 16
DESC = CacheDesc(4, [BLOCKS, 64 << 10], DataType.DT_UINT8)
SCATTERED = [1, 3, 5, 7]
MANY = 1000
HANG = "HcclBatchGet:hang@*;HcclBatchPut:hang@*"


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    with soft_faults_cleared():
        yield


def pull(manager: CacheManager, target: Any, **options: Any) -> CacheTask:
    return manager.pull_blocks(BlocksCacheKey(1), target, SCATTERED, SCATTERED, **options)


async def test_a_thousand_pulls_from_a_hung_device_are_told_in_time() -> None:
    async with linked_pair(DESC, sync_kv_timeout=600_000) as (_, decoder, _, target):
        manager = decoder.datadist.cache_manager
        await pull(manager, target)
        soft_fault(HANG)
        with lasting(5.0, at_least=0.5):
            tasks = [pull(manager, target, deadline=0.5) for _ in range(MANY)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, TransferTimeout) for result in results)
        [link] = decoder.datadist.statistics().links
        assert (link.running, link.failures) == (0, {"LLM_TIMEOUT": MANY})
        assert len(inside(decoder.datadist).deadlines) == 0


async def test_the_link_is_as_good_as_before() -> None:
    async with linked_pair(DESC, sync_kv_timeout=600_000) as (_, decoder, _, target):
        manager = decoder.datadist.cache_manager
        await pull(manager, target)
        with soft_faults_cleared():
            soft_fault(HANG)
            tasks = [pull(manager, target, deadline=0.1) for _ in range(3)]
            await asyncio.gather(*tasks, return_exceptions=True)
        report = await manager.pull_blocks(BlocksCacheKey(1), target, [2, 9], [2, 9], deadline=60)
        assert report.bytes == 2 * 4 * (64 << 10)
        moved = {*SCATTERED, 2, 9}
        verify(
            decoder.memory(target), target, [(t, b, 1 if b in moved else 2, b) for t in range(4) for b in range(BLOCKS)]
        )


async def test_each_has_its_own() -> None:
    async with linked_pair(DESC, sync_kv_timeout=600_000) as (_, decoder, _, target):
        manager = decoder.datadist.cache_manager
        await pull(manager, target)
        soft_fault(HANG)
        ended: list[float] = []
        tasks = [pull(manager, target, deadline=seconds) for seconds in (0.6, 0.2, 0.4)]
        for task, seconds in zip(tasks, (0.6, 0.2, 0.4), strict=True):
            task.add_done_callback(partial(lambda limit, _: ended.append(limit), seconds))
        without = pull(manager, target)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, TransferTimeout) for result in results)
        assert "0.6 s from the call" in str(results[0])
        assert ended == [0.2, 0.4, 0.6]
        assert not without.done()
        without.cancel()
        with pytest.raises(asyncio.CancelledError):
            await without


async def test_a_request_to_the_peer_has_one_too() -> None:
    async with linked_pair(DESC, sync_kv_timeout=600_000, enable_remote_cache_accessible=False) as made:
        _, decoder, _, target = made
        manager = decoder.datadist.cache_manager
        await pull(manager, target)
        with soft_faults_cleared():
            soft_fault(HANG)
            tasks = [pull(manager, target, deadline=0.3) for _ in range(10)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, TransferTimeout) for result in results)
        assert [task.peer for task in tasks] == [1] * 10
        assert (await pull(manager, target, deadline=60)).bytes == 4 * 4 * (64 << 10)


async def test_so_has_a_layered_transfer_whose_layers_do_not_come() -> None:
    async with linked_pair(DESC, sync_kv_timeout=600_000) as (prompt, _, source, _):
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(2), range(2))
        synchronizer = AwaitableLayerSynchronizer(2)
        task = prompt.datadist.cache_manager.transfer_cache_async(
            source, synchronizer, [config], [1], [1], deadline=0.2
        )
        synchronizer.ready(0)
        late = r"0\.2 s from the call: 1 of 2 layers have landed at cluster 2, layer 1 was not ready"
        with pytest.raises(TransferTimeout, match=late):
            await task
        assert await task.get_results() == [LLMStatusCode.LLM_TIMEOUT]


async def test_so_has_a_pull_of_leased_blocks() -> None:
    async with linked_pair(DESC, sync_kv_timeout=600_000) as (prompt, decoder, source, target):
        lease = prompt.datadist.cache_manager.lease_blocks(source, SCATTERED, 600)
        await pull(decoder.datadist.cache_manager, target)
        soft_fault(HANG)
        task = decoder.datadist.cache_manager.pull_leased(lease.ticket(), target, SCATTERED, deadline=0.2)
        with pytest.raises(TransferTimeout, match=r"0\.2 s of the call"):
            await task


async def test_what_ends_in_time_does_not_hear_of_it() -> None:
    async with linked_pair(DESC) as (_, decoder, _, target):
        manager = decoder.datadist.cache_manager
        for _ in range(50):
            assert (await pull(manager, target, deadline=3600)).bytes
        assert len(inside(decoder.datadist).deadlines) == 0


@pytest.mark.parametrize("wrong", [0, -1.0, math.inf, math.nan, 864_001])
async def test_a_duration_that_makes_no_sense_is_refused(wrong: float) -> None:
    async with linked_pair(DESC) as (_, decoder, _, target):
        manager = decoder.datadist.cache_manager
        await pull(manager, target)
        await pull(manager, target)  # from the third on it takes a shortcut
        with pytest.raises(ParamInvalid, match="deadline is"):
            pull(manager, target, deadline=wrong)
        with pytest.raises(ParamInvalid, match="deadline is"):
            manager.push_blocks(BlocksCacheKey(1), target, [1], [1], deadline=wrong, notify=b"never")
        config = TransferWithCacheKeyConfig(BlocksCacheKey(1))
        with pytest.raises(ParamInvalid, match="deadline is"):
            manager.transfer_cache_async(target, AwaitableLayerSynchronizer(2), [config], [1], [1], deadline=wrong)
        assert decoder.datadist.statistics().links[0].running == 0


@pytest.mark.parametrize("wrong", ["1", True, [1]])
async def test_what_is_no_duration_is_refused(wrong: Any) -> None:
    async with linked_pair(DESC) as (_, decoder, _, target):
        with pytest.raises(TypeError, match="deadline is"):
            pull(decoder.datadist.cache_manager, target, deadline=wrong)
