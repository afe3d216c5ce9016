"""Clusters on loops of several threads, and on one whose tasks begin at once."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheNotFound,
    DataType,
    LLMClusterInfo,
    LLMStatusCode,
    TransferError,
    TransferWithCacheKeyConfig,
)
from aiodatadist.testing import Cluster, cluster_info, linked_pair, open_cluster, verify
from tests.loops import LOOPS

DESC = CacheDesc(2, [16, 4096], DataType.DT_UINT8)
PULLS = 200


class Meeting:
    """Two threads, each with a loop and a cluster of its own, that link to each other."""

    def __init__(self, factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self._factory = factory
        self.there: dict[int, Future[Cluster]] = {1: Future(), 2: Future()}
        self.both_are_done = threading.Barrier(2, timeout=50)

    def run(self, me: int) -> None:
        with asyncio.Runner(loop_factory=self._factory) as runner:
            runner.run(self.take_part(me, 3 - me))

    async def take_part(self, me: int, peer: int) -> None:
        async with open_cluster(me, device_id=me) as cluster:
            cache = await cluster.blocks(DESC)
            self.there[me].set_result(cluster)
            other = await asyncio.wrap_future(self.there[peer])
            if me == 2:
                linked = await cluster.datadist.link_clusters([cluster_info_of(other)], 10_000)
                assert linked[0] is LLMStatusCode.LLM_SUCCESS, linked.errors
            await cluster.datadist.wait_linked(peer)
            await self.pull(cluster, peer, cache)
            await asyncio.to_thread(self.both_are_done.wait)

    async def pull(self, cluster: Cluster, peer: int, cache: Cache) -> None:
        """Pull blocks 8 to 15 from the peer's 0 to 7, which do not change."""
        manager = cluster.datadist.cache_manager
        for _ in range(PULLS):
            await manager.pull_blocks(BlocksCacheKey(peer), cache, range(8), range(8, 16))
        with pytest.raises(CacheNotFound):
            await manager.pull_blocks(BlocksCacheKey(peer, 5), cache, [0], [8])
        moved = [(tensor, block + 8, peer, block) for tensor in range(2) for block in range(8)]
        verify(cluster.memory(cache), cache, moved, owner=cluster.datadist.cluster_id)


def cluster_info_of(cluster: Cluster) -> LLMClusterInfo:
    """Ask a cluster where it listens, in a thread without its loop. No other loop may run there."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(cluster_info, cluster).result()


@pytest.mark.parametrize("factory", LOOPS.values(), ids=LOOPS)
def test_clusters_on_the_loops_of_two_threads_pull_from_each_other(
    factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    meeting = Meeting(factory)
    with ThreadPoolExecutor(2) as threads:
        for end in [threads.submit(meeting.run, number) for number in (1, 2)]:
            end.result(55)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks need Python 3.12")
@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "request/response"])
async def test_tasks_that_begin_at_once_change_nothing(one_sided: bool) -> None:
    asyncio.get_running_loop().set_task_factory(getattr(asyncio, "eager_task_factory"))  # noqa: B009 - mypy sees 3.11
    async with linked_pair(DESC, enable_remote_cache_accessible=one_sided) as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager
        tasks = [
            asyncio.create_task(pulled(manager.pull_blocks(BlocksCacheKey(1), cache, [block], [15 - block])))
            for block in range(8)
        ]
        assert await asyncio.gather(*tasks) == [2 * 4096] * 8
        moved = [(tensor, 15 - block, 1, block) for tensor in range(2) for block in range(8)]
        verify(decoder.memory(cache), cache, moved, owner=2)


class Raising:
    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        raise ZeroDivisionError("mine")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks need Python 3.12")
async def test_what_the_callers_code_raises_in_a_task_that_begins_at_once_fails_its_transfer() -> None:
    asyncio.get_running_loop().set_task_factory(getattr(asyncio, "eager_task_factory"))  # noqa: B009 - mypy sees 3.11
    async with linked_pair(DESC) as (prompt, _, cache, _):
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(1), range(1))
        with pytest.raises(TransferError, match=r"synchronize_layer\(0\) raised ZeroDivisionError\('mine'\)"):
            await prompt.datadist.cache_manager.transfer_cache_async(cache, Raising(), [config], [0], [1])


async def pulled(task: object) -> int:
    report = await task  # type: ignore[misc]
    return int(report.bytes)
