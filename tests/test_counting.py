"""Counters by operation and status, over all links, that any thread may read at any time."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from bisect import bisect_left
from collections.abc import Sequence

import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheNotFound,
    DataType,
    LeaseEnd,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    PeerLost,
    TransferWithCacheKeyConfig,
)
from aiodatadist._counting import SECONDS, Call, Flow, FlowFigures, Tell
from aiodatadist._link import Cause
from aiodatadist._testing.views import cut_link
from aiodatadist.testing import Cluster, cluster_info, inside, linked_pair, open_cluster

DESC = CacheDesc(2, [4, 64], DataType.DT_UINT8)
BLOCK = 2 * 64
POOL = '{"memory_size": 1048576, "page_shift": 12}'


async def pulled(decoder: Cluster, cache: Cache, count: int = 1) -> None:
    for _ in range(count):
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])


def consistent(flow: FlowFigures) -> bool:
    return sum(flow.by_seconds) == sum(flow.by_queue_seconds) == sum(flow.by_bytes) == flow.succeeded


async def test_transfers_are_counted_by_operation_and_status() -> None:
    async with linked_pair(DESC) as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager
        await pulled(decoder, cache, 5)
        report = await manager.push_blocks(BlocksCacheKey(1), cache, [0, 1], [2, 3])
        with pytest.raises(CacheNotFound):
            await manager.pull_blocks(BlocksCacheKey(1, 77), cache, [0], [0])
        task = manager.pull_blocks(BlocksCacheKey(1, 78), cache, [0], [0])
        assert decoder.datadist.figures().transfers["pull_blocks"].running == 1
        task.cancel()
        await task.get_results()
        figures = decoder.datadist.figures()
        pull, push = figures.transfers["pull_blocks"], figures.transfers["push_blocks"]
        assert pull.statuses == {"LLM_SUCCESS": 5, "LLM_KV_CACHE_NOT_EXIST": 1, "CANCELLED": 1}
        assert (pull.running, pull.bytes, pull.succeeded, pull.ended) == (0, 5 * BLOCK, 5, 7)
        assert pull.by_bytes[7] == 5  # 2 ** 7 is 128
        assert (push.statuses, push.bytes, push.ranges) == ({"LLM_SUCCESS": 1}, 2 * BLOCK, report.ranges)
        assert push.seconds == pytest.approx(report.transfer_seconds)
        assert push.by_seconds[bisect_left(SECONDS, report.transfer_seconds)] == 1
        assert consistent(pull)
        assert consistent(push)


async def test_copies_are_counted_and_layered_transfers_once() -> None:
    async with linked_pair(DESC) as (_, decoder, _, cache):
        await decoder.datadist.cache_manager.copy_blocks(cache, {0: [1, 2]})
        config = TransferWithCacheKeyConfig(BlocksCacheKey(1), range(1), range(1))
        ready = AwaitableLayerSynchronizer(1)
        layered = decoder.datadist.cache_manager.transfer_cache_async(cache, ready, [config], [0, 1], [0, 1])
        assert decoder.datadist.figures().transfers["transfer_cache_async"].running == 1
        ready.ready(0)
        report = await layered
        layers = decoder.datadist.figures().transfers["transfer_cache_async"]
        assert (layers.running, layers.succeeded, layers.bytes) == (0, 1, report.bytes)
        assert report.bytes == 2 * BLOCK
        copies = decoder.datadist.figures().transfers["copy_blocks"]
        assert (copies.statuses, copies.bytes) == ({"LLM_SUCCESS": 1}, 2 * BLOCK)


async def test_what_peers_ask_for_is_counted_where_it_is_served() -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=False) as (prompt, decoder, _, cache):
        await pulled(decoder, cache, 3)
        served = prompt.datadist.figures().transfers["served"]
        assert (served.statuses, served.bytes, served.running) == ({"LLM_SUCCESS": 3}, 3 * BLOCK, 0)
        assert decoder.datadist.figures().transfers["pull_blocks"].bytes == 3 * BLOCK


async def test_counters_outlive_links_and_the_cluster() -> None:
    async with linked_pair(DESC, mem_pool_cfg=POOL) as (prompt, decoder, _, cache):
        datadist = decoder.datadist
        await pulled(decoder, cache, 2)
        before = datadist.figures()
        assert (before.links, before.links_made, before.links_ended) == ({"ready": 1}, 1, {})
        assert before.pools["device"].total == 1 << 20
        assert before.linking.statuses == {"LLM_SUCCESS": 1}
        assert await datadist.unlink_clusters([cluster_info(prompt)])
        assert datadist.statistics().links == ()
        after = datadist.figures()
        assert (after.links, after.links_ended) == ({}, {"unlinked": 1})
        assert after.transfers["pull_blocks"].bytes == 2 * BLOCK
        await datadist.link_clusters([cluster_info(prompt)], 5000)
        await pulled(decoder, cache)
        assert datadist.figures().transfers["pull_blocks"].bytes == 3 * BLOCK
    last = datadist.figures()
    assert last.transfers["pull_blocks"].bytes == 3 * BLOCK
    assert (last.links, last.links_made, last.links_ended) == ({}, 2, {"unlinked": 2})
    assert (last.caches, last.pools) == (0, {})


def test_one_that_was_never_initialised_has_figures() -> None:
    figures = LLMDataDist(LLMRole.MIX, 5, LLMConfig()).figures()
    assert (figures.cluster_id, figures.transfers, figures.links, figures.pools) == (5, {}, {}, {})


async def test_a_peer_that_vanishes_is_counted_as_lost() -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, cache):
        await cut_link(inside(prompt.datadist).links.find(2))
        await decoder.datadist.wait_link_closed(1)
        with pytest.raises(LLMException):
            await pulled(decoder, cache)
        assert decoder.datadist.figures().links_ended == {"connection_lost": 1}


@pytest.mark.parametrize(
    ("failure", "cause", "counted"),
    [
        (PeerLost("no heartbeats"), Cause.HEARTBEATS_MISSED, "heartbeats_missed"),
        (PeerLost("gone"), None, "connection_lost"),
    ],
)
async def test_a_link_that_is_broken_off_has_its_cause(failure: PeerLost, cause: Cause | None, counted: str) -> None:
    async with linked_pair(DESC) as (_, decoder, _, _):
        link = inside(decoder.datadist).links.find(1)
        link.session.break_off(failure, cause)
        await link.wait_closed()
        assert decoder.datadist.figures().links_ended == {counted: 1}


async def test_leases_are_counted_by_how_they_ended() -> None:
    async with linked_pair(DESC) as (prompt, decoder, source, cache):
        keep = prompt.datadist.cache_manager.lease_blocks
        taken, expired, withdrawn = keep(source, [0], 10_000), keep(source, [1], 1), keep(source, [2], 10_000)
        keep(source, [3], 10_000)
        assert prompt.datadist.figures().leases == 4
        await decoder.datadist.cache_manager.pull_leased(taken.ticket(), cache, [0])
        await withdrawn.withdraw()
        assert {await taken.wait_ended(), await expired.wait_ended()} == {LeaseEnd.TAKEN, LeaseEnd.EXPIRED}
        figures = prompt.datadist.figures()
        assert figures.leases_ended == {"taken": 1, "expired": 1, "withdrawn": 1}
        assert (figures.leases, figures.leases_opened) == (1, 4)


async def test_figures_may_be_read_by_any_thread_while_transfers_and_allocations_go_on() -> None:
    """Numbers only grow, and none is read half-written."""
    over = threading.Event()
    problems: list[BaseException] = []

    def read(datadist: LLMDataDist) -> None:
        last = 0
        try:
            while not over.is_set():
                figures = datadist.figures()
                flow = figures.transfers["pull_blocks"]
                assert flow.succeeded >= last
                assert 0 <= figures.pools["device"].free <= figures.pools["device"].total
                last = flow.succeeded
        except BaseException as error:
            problems.append(error)

    async with linked_pair(DESC, mem_pool_cfg=POOL) as (_, decoder, _, cache):
        await pulled(decoder, cache)
        threads = [threading.Thread(target=read, args=(decoder.datadist,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        manager = decoder.datadist.cache_manager
        for number in range(300):
            made = await manager.allocate_blocks_cache(DESC, BlocksCacheKey(2, 1000 + number))
            await pulled(decoder, cache, 3)
            await manager.deallocate_blocks_cache(made)
        over.set()
        for thread in threads:
            thread.join(10)
        assert not problems, problems[0]
        assert decoder.datadist.figures().transfers["pull_blocks"].succeeded == 901


async def test_figures_may_be_read_while_a_collection_of_garbage_lets_other_threads_count() -> None:
    """In Python 3.11 it begins wherever an object is made, also in the middle of a step that is C's."""
    async with linked_pair(DESC, mem_pool_cfg=POOL) as (_, decoder, _, cache):
        await pulled(decoder, cache)
        engine = inside(decoder.datadist)
        totals = engine.totals
        link, table = engine.links.find(1), engine.links._links
        seen: list[str] = []
        for number in range(50):
            totals.transfers[f"one of many {number}"].running = 0

        def count(phase: str, _: dict[str, int]) -> None:  # as a finalizer lets another thread do it
            seen.append(phase)
            counters = (totals.links_ended, totals.leases_ended, totals.failure_causes, totals.linking._failures)
            if len(seen) % 4 == 1:
                totals.transfers["another"].running = 0
                table[10**6] = link
                for counter in counters:
                    counter["another"] = 0
            elif len(seen) % 4 == 3:
                table.pop(10**6, None)
                for each in (totals.transfers, *counters):
                    each.pop("another", None)

        thresholds, held = gc.get_threshold(), []
        gc.callbacks.append(count)
        try:
            for number in range(20):
                gc.set_threshold(0)
                held += [(number, each) for each in range(3000)]  # the interpreter has none put by: it makes new ones
                gc.set_threshold(1)
                assert decoder.datadist.figures().transfers["pull_blocks"].succeeded == 1
                decoder.datadist.statistics()
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(count)
            table.pop(10**6, None)
        assert len(seen) > 100


async def test_figures_may_be_read_by_any_thread_while_links_are_made_and_lost() -> None:
    over = threading.Event()
    problems: list[BaseException] = []

    def read(datadist: LLMDataDist) -> None:
        try:
            while not over.is_set():
                figures = datadist.figures()
                assert sum(figures.links.values()) in {0, 1, 2}  # an old one, and the next
                datadist.statistics()
        except BaseException as error:
            problems.append(error)

    interval = sys.getswitchinterval()
    async with open_cluster(1) as one, open_cluster(2, device_id=1) as two:
        threads = [threading.Thread(target=read, args=(each.datadist,)) for each in (one, two)]
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for _ in range(10):
                assert (await one.datadist.link_clusters([cluster_info(two)], 20_000))[0] is LLMStatusCode.LLM_SUCCESS
                await two.datadist.wait_linked(1)
                ends = [inside(one.datadist).links.find(2), inside(two.datadist).links.find(1)]
                ends[0].session.lost("its network is gone")
                for end in ends:
                    await end.wait_closed()
        finally:
            sys.setswitchinterval(interval)
            over.set()
            for thread in threads:
                thread.join(10)
        assert not problems, problems[0]
        assert one.datadist.figures().links_made == 10


def test_sizes_are_counted_at_powers_of_two_and_below() -> None:
    class Ran:
        ranges, queue_seconds, transfer_seconds, status = 1, 0.0, 1e-5, "LLM_SUCCESS"

        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes

    def cell(nbytes: int) -> int:
        flow = Flow()
        flow.ran(nbytes, 1, 0.0)
        return flow.figures().by_bytes.index(1)

    sizes: Sequence[int] = [1, 2, 3, 4, 5, 1 << 20, (1 << 20) + 1, 1 << 63]
    assert [cell(nbytes) for nbytes in sizes] == [0, 1, 2, 2, 3, 20, 21, 63]


class Cancelled:
    """An observer that asks what was cancelled for its result."""

    def __init__(self, when: str) -> None:
        self._when = when

    def began(self, call: Call) -> Tell:
        if self._when == "beginning":
            self._ask()
        return lambda _: self._ask()

    @staticmethod
    def _ask() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        future.result()


@pytest.mark.parametrize("when", ["beginning", "end"])
async def test_an_observer_that_raises_a_cancellation_cancels_no_call(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, cache):
        decoder.datadist.observer = Cancelled(when)
        await pulled(decoder, cache)
        status, _ = await decoder.datadist.unlink_clusters([cluster_info(prompt)], 5000)
        assert status is LLMStatusCode.LLM_SUCCESS
    assert f"failed at the {when} of pull_blocks" in caplog.text
    assert f"failed at the {when} of unlink_clusters" in caplog.text
