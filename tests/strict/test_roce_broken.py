"""A channel on which a transfer was stopped half-way, while more happens to it.

[src transport_roce_mem.cc:398-399, 702].
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LinkError,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from aiodatadist._link.transfers import pull_requests
from aiodatadist.errors import LinkClosed, StuckError
from aiodatadist.testing import inside, soft_fault, soft_faults_cleared, soft_hold, verify
from tests.held import PUSH, held_transfer, there_and_back
from tests.strict import runner

DESC = CacheDesc(4, [16, 1024], DataType.DT_UINT8)
TENSORS = range(4)


async def what_waits_moves_on() -> None:
    async with runner.pair(DESC) as (one, two, mine, _theirs):
        manager = one.datadist.cache_manager
        pull, engine = manager.pull_blocks, inside(manager)
        await pull(BlocksCacheKey(2), mine, [0], [0])
        channels = engine.links.find(2).session.channels
        with held_transfer() as first, soft_hold("HcclBatchGet", at="half", nth=2) as second:
            stopped = pull(BlocksCacheKey(2), mine, [5], [5])
            waiting = pull(BlocksCacheKey(2), mine, [6], [6])
            await first.arrived()
            outdated = channels.current
            await one.blocks(DESC, 1)  # out of the channel's reach
            await channels.reach(engine.transport.epoch, outdated.theirs)
            assert channels.current is not outdated
            await first.stopped(stopped.cancel)
            await second.arrived()
            await stopped.synchronize()
            assert stopped.cancelled()
            await there_and_back(one, two)
            assert not waiting.done()
            second.release()
            await waiting
        verify(one.memory(mine), mine, [(t, 6, 2, 6) for t in TENSORS])


def test_what_waits_for_a_channel_that_is_outdated_and_then_broken_takes_the_next_one() -> None:
    """The broken one's flag, which is still to be set, would tell of its end before its bytes have landed."""
    runner.run("roce", what_waits_moves_on)


async def refused_is_lost() -> None:
    async with runner.pair(DESC) as (one, _, mine, _theirs):
        manager = one.datadist.cache_manager
        await manager.pull_blocks(BlocksCacheKey(2), mine, [0], [0])
        link = inside(manager).links.find(2)
        with held_transfer() as copy:
            soft_fault("HcclCommDestroy:fail=4@*")
            stopped = manager.pull_blocks(BlocksCacheKey(2), mine, [5], [5])
            await copy.arrived()
            await copy.stopped(stopped.cancel)
            with anyio.fail_after(10), pytest.raises(StuckError, match="could not be closed"):
                await stopped
        with anyio.fail_after(10):
            assert isinstance(await link.wait_closed(), LinkError)
        assert not link.life.is_shut


def test_a_channel_that_is_not_destroyed_keeps_the_memory_of_what_was_stopped_on_it() -> None:
    """Asked a second time, a channel has nothing to close and refuses nothing: that does not mean that it is gone."""
    runner.run("roce", refused_is_lost)


async def unlinked_in_good_order(leaver: int) -> None:
    async with runner.pair(DESC) as (one, two, mine, _theirs):
        manager = one.datadist.cache_manager
        await manager.pull_blocks(BlocksCacheKey(2), mine, [0], [0])
        clusters = {1: one, 2: two}
        engines = {n: inside(cluster.datadist) for n, cluster in clusters.items()}
        links = [engines[1].links.find(2), engines[2].links.find(1)]
        with held_transfer() as copy, soft_hold("HcclCommInitClusterInfoMemConfig", nth=None) as opening:
            stopped = manager.pull_blocks(BlocksCacheKey(2), mine, [5], [5])
            await copy.arrived()
            await copy.stopped(stopped.cancel)
            with anyio.fail_after(10):
                await opening.arrived()
                async with anyio.create_task_group() as group:
                    group.start_soon(partial(engines[leaver].unlink, 3 - leaver, 5, force=False))
                    while links[leaver - 1].session.is_ready:
                        await anyio.lowlevel.checkpoint()
                    opening.release()
                    for link in links:
                        await link.wait_closed()


async def client_leaves() -> None:
    await unlinked_in_good_order(1)


async def server_leaves() -> None:
    await unlinked_in_good_order(2)


@pytest.mark.parametrize("program", [client_leaves, server_leaves])
def test_an_end_does_not_leave_the_other_one_waiting_for_a_channel_that_both_were_opening(
    program: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """HcclCommPrepare waits for a peer for 20 s here, and cannot be interrupted."""
    runner.run("roce", program)


async def link_ends_meanwhile() -> None:
    async with runner.pair(DESC) as (one, two, mine, _theirs):
        manager = one.datadist.cache_manager
        await manager.pull_blocks(BlocksCacheKey(2), mine, [0], [0])
        with held_transfer() as copy, soft_hold("HcclCommPrepare", nth=None) as prepare:
            stopped = manager.pull_blocks(BlocksCacheKey(2), mine, [5], [5])
            waiting = manager.pull_blocks(BlocksCacheKey(2), mine, [6], [6])
            await copy.arrived()
            await copy.stopped(stopped.cancel)
            with anyio.fail_after(10):
                await stopped.synchronize()  # its channel is closed,
                await prepare.arrived()  # and the next one is being opened
                await inside(two.datadist).links.find(1).refuse(LinkClosed("it has ended"))
                with pytest.raises(LinkClosed):
                    await waiting


def test_what_waits_for_the_next_channel_ends_with_its_link() -> None:
    """And does not begin on the one that is closed."""
    runner.run("roce", link_ends_meanwhile)


async def peer_ends_first() -> None:
    pull_requests.STOP_TIMEOUT = 1e-6  # a peer that has no channel to close would answer at once
    options = {"enable_remote_cache_accessible": False, "sync_kv_timeout": 10000}
    async with runner.pair(DESC, **options) as (one, two, mine, theirs):
        pull, pull_there = one.datadist.cache_manager.pull_blocks, two.datadist.cache_manager.pull_blocks
        await pull(BlocksCacheKey(2), mine, [0], [0])
        with soft_hold(PUSH, at="half") as ours:
            other = pull_there(BlocksCacheKey(1), theirs, [3], [3])
            await ours.arrived()
            with held_transfer(PUSH) as copy:
                stopped = pull(BlocksCacheKey(2), mine, [5], [5])
                await copy.arrived()
                await copy.stopped(stopped.cancel)
                await there_and_back(one, two)
                assert not stopped.done()
                ours.release()
                with anyio.fail_after(10):
                    await stopped.synchronize()
                    await other
        assert stopped.cancelled()
        await pull(BlocksCacheKey(2), mine, [6], [6])


def test_a_stopped_request_outlasts_what_this_end_has_on_the_channel() -> None:
    """The peer says that it has stopped when the channel is closed, for which this end's own transfers are waited for."""
    runner.run("roce", peer_ends_first)


async def layer_behind_a_failed_one() -> None:
    async with runner.pair(DESC, sync_kv_timeout=10000) as (one, two, mine, theirs):
        manager, manager_there = one.datadist.cache_manager, two.datadist.cache_manager
        await manager.pull_blocks(BlocksCacheKey(2), mine, [0], [0])
        await manager_there.pull_blocks(BlocksCacheKey(1), theirs, [0], [0])
        channels = inside(manager).links.find(2).session.channels
        first = channels.current
        synchronizer = AwaitableLayerSynchronizer(2)
        with soft_faults_cleared(), soft_hold("HcclBatchGet", at="half") as copy:
            soft_fault("HcclBatchPut:fail=4@1")
            other = manager_there.pull_blocks(BlocksCacheKey(1), theirs, [3], [3])  # keeps the channel open
            config = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(2), range(2))
            task = manager.transfer_cache_async(mine, synchronizer, [config], [5], [5])
            synchronizer.ready(0)
            with anyio.fail_after(10):
                while channels._current in {None, first}:  # noqa: ASYNC110 - until the next one is open
                    await anyio.sleep(0.001)
                assert not other.done()
                synchronizer.ready(1)
                copy.release()
                assert await task.get_results() == [LLMStatusCode.LLM_FAILED]
                await other
        assert [done.layer_index async for done in task.progress()] == []


def test_a_layer_that_arrives_on_the_next_channel_does_not_make_good_one_that_failed() -> None:
    """The failed one is told when its channel is closed; meanwhile the next channel would carry those behind it."""
    runner.run("roce", layer_behind_a_failed_one)
