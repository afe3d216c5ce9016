"""Transfers where asyncio and anyio want a coroutine: task groups, ``create_task`` and ``start_soon``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, CacheNotFound, CacheTask, DataType
from aiodatadist.testing import Cluster, linked_pair, soft_fault, soft_faults_cleared, verify
from tests.context_caching.kit import Kv, by_slots, opened
from tests.held import held_transfer

DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
KEY = BlocksCacheKey(1)
Pull = Callable[..., CacheTask]


@asynccontextmanager
async def pulling() -> AsyncIterator[tuple[Cluster, Cache, Pull]]:
    """Block 1 into block 2; with other arguments, other ones."""
    async with linked_pair(DESC) as (_, decoder, _, cache):
        yield decoder, cache, partial(decoder.datadist.cache_manager.pull_blocks, KEY, cache)


def landed(decoder: Cluster, cache: Cache) -> None:
    verify(decoder.memory(cache), cache, [(tensor, 2, 1, 1) for tensor in range(2)])


async def test_in_a_task_group() -> None:
    async with pulling() as (decoder, cache, pull):
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(pull([1], [2]))
        assert task.result().bytes == DESC.num_tensors * 4096
        landed(decoder, cache)


async def test_in_a_task_group_of_anyio() -> None:
    async with pulling() as (decoder, cache, pull):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pull, [1], [2])
        landed(decoder, cache)


async def test_a_failure_ends_its_task_group() -> None:
    async with pulling() as (decoder, cache, _):
        with pytest.raises(ExceptionGroup) as failed:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1, 7), cache, [1], [2]))
        assert failed.group_contains(CacheNotFound)


async def test_any_number_of_tasks_may_run_one() -> None:
    async with pulling() as (decoder, cache, pull):
        with held_transfer() as held:
            transfer = pull([1], [2])
            tasks = [asyncio.create_task(transfer) for _ in range(3)]
            await held.arrived()
            held.release()
            reports = [await transfer, *await asyncio.gather(*tasks), await asyncio.shield(transfer), await transfer]
        assert len(set(reports)) == 1
        landed(decoder, cache)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_cancelling_the_task_cancels_the_transfer_whether_it_has_begun(has_begun: bool) -> None:
    async with pulling() as (decoder, cache, pull):
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            transfer = pull([1], [2])
            task = asyncio.create_task(transfer)
            if has_begun:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert transfer.cancelled(), "and no byte lands any more"
        await pull([1], [2])
        landed(decoder, cache)


async def test_a_task_that_is_cancelled_when_the_transfer_is_over_is_cancelled() -> None:
    async with pulling() as (decoder, cache, pull):
        await pull([1], [2])
        transfer = pull([1], [2])
        assert transfer.done()
        task = asyncio.create_task(transfer)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not transfer.cancelled()
        landed(decoder, cache)


async def test_one_task_is_cancelled_and_another_one_runs_it() -> None:
    """Cancelling any task that waits for it cancels the transfer, as everywhere; the other one hears of that."""
    async with pulling() as (_, _, pull):
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            transfer = pull([1], [2])
            one, other = asyncio.create_task(transfer), asyncio.create_task(transfer)
            await asyncio.sleep(0)
            one.cancel()
            await asyncio.wait([one, other])
        assert one.cancelled()
        assert other.cancelled()


async def test_a_time_limit_of_asyncios() -> None:
    async with pulling() as (_, _, pull):
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            transfer = pull([1], [2])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await asyncio.create_task(transfer)
        assert transfer.cancelled()


async def test_what_waits_for_several_wants_tasks() -> None:
    async with pulling() as (_, _, pull):
        with pytest.raises(TypeError, match="use tasks explicitly"):
            await asyncio.wait([pull([1], [2])])  # type: ignore[type-var]


async def test_closing_it_ends_nothing() -> None:
    async with pulling() as (decoder, cache, pull):
        with held_transfer() as held:
            transfer = pull([1], [2])
            await held.arrived()
            transfer.close()
            held.release()
            assert (await transfer).bytes
        landed(decoder, cache)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks need Python 3.12")
async def test_in_eager_tasks() -> None:
    """Made by the factory itself: uvloop's create_task does not fit that of every Python."""
    async with pulling() as (decoder, cache, pull):
        make = asyncio.eager_task_factory  # type: ignore[attr-defined,unused-ignore]  # since 3.12
        await make(asyncio.get_running_loop(), pull([1], [2]))
        landed(decoder, cache)


async def test_a_save_and_a_load() -> None:
    kv = Kv()
    async with opened("memory:", kv) as cache:
        async with asyncio.TaskGroup() as tasks:
            saved = tasks.create_task(cache.save([1, 2], **by_slots([1, 2])))
        async with anyio.create_task_group() as group:
            group.start_soon(partial(cache.load, [1, 2], **by_slots([1, 2])))
        assert saved.result().success == 2
