"""Cancelled at any await, an operation gives back what it held, and what it worked on still works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMDataDist, LLMRole, LLMStatusCode
from aiodatadist._testing.cancelling import CancelAt
from aiodatadist.testing import Cluster, cluster_info, linked_pair, open_cluster, soft_counters, verify

DESC = CacheDesc(4, [32, 1 << 18], DataType.DT_UINT8)  # 32 MiB: several windows
SMALL = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
"""For what is about links."""
BLOCKS = list(range(32))
hows = pytest.mark.parametrize("how", ["task", "scope"])


async def cancelled_at(k: int, operation: Callable[[], Coroutine[Any, Any, Any]], how: str) -> bool:
    """Run it in a task of its own, cancelled at its k-th await; False when it ended before."""
    scope = anyio.CancelScope()
    lens = CancelAt(k, operation(), scope.cancel if how == "scope" else None)

    async def run() -> None:
        with scope:
            await lens

    task = asyncio.create_task(run())
    await asyncio.wait([task])
    if lens.suspensions < k:
        task.result()
        return False
    assert task.cancelled() or task.exception() is None, task.exception()
    assert how == "task" or not task.cancelled(), "a scope's cancellation left its scope"
    return True


@hows
async def test_a_pull_cancelled_at_any_await_lands_no_byte_later_and_the_link_still_works(how: str) -> None:
    async with linked_pair(DESC, sync_kv_timeout=30_000) as (_, decoder, _, cache):
        manager, memory = decoder.datadist.cache_manager, decoder.memory(cache)

        async def pull() -> None:
            await manager.pull_blocks(BlocksCacheKey(1), cache, BLOCKS, BLOCKS)

        k = 1
        while await cancelled_at(k, pull, how):
            memory.view()[:] = bytes(memory.nbytes)
            await manager.pull_blocks(BlocksCacheKey(1), cache, [3], [4])
            view = memory.view()
            untouched = [t * 32 + p for t in range(4) for p in range(32) if p != 4]
            assert not any(view[at << 18] or view[((at + 1) << 18) - 1] for at in untouched)
            k += 1
        assert k > 1
        verify(memory, cache, [(t, p, 1, p) for t in range(4) for p in range(32)])


@asynccontextmanager
async def two_clusters() -> AsyncIterator[tuple[Cluster, Cluster, Cache]]:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        await prompt.blocks(SMALL)
        yield prompt, decoder, await decoder.blocks(SMALL)


@hows
async def test_a_link_cancelled_at_any_await_can_be_made_again(how: str, no_leaks: None) -> None:
    before = soft_counters()
    k, cancelled = 1, True
    while cancelled:
        async with two_clusters() as (prompt, decoder, cache):

            async def link(prompt: Cluster = prompt, decoder: Cluster = decoder) -> None:
                await decoder.datadist.link_clusters([cluster_info(prompt)], 5000)

            cancelled = await cancelled_at(k, link, how)
            status, _ = await decoder.datadist.link_clusters([cluster_info(prompt)], 5000)
            assert status in {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK}
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [4])
        k += 1
    assert k > 2
    after = soft_counters()
    assert {n: after[n] for n in ("device_bytes", "streams", "comms", "imported")} == {
        n: before[n] for n in ("device_bytes", "streams", "comms", "imported")
    }


@hows
async def test_an_unlink_cancelled_at_any_await_can_be_repeated(how: str) -> None:
    k, cancelled = 1, True
    while cancelled:
        async with linked_pair(SMALL) as (prompt, decoder, _, cache):

            async def unlink(prompt: Cluster = prompt, decoder: Cluster = decoder) -> None:
                await decoder.datadist.unlink_clusters([cluster_info(prompt)], 2000)

            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [4])
            cancelled = await cancelled_at(k, unlink, how)
            await decoder.datadist.unlink_clusters([cluster_info(prompt)], 2000)
            assert (await decoder.datadist.link_clusters([cluster_info(prompt)], 5000))[0] is LLMStatusCode.LLM_SUCCESS
        k += 1
    assert k > 2


@hows
async def test_a_start_cancelled_at_any_await_can_be_repeated(how: str, no_leaks: None) -> None:
    k, cancelled = 1, True
    while cancelled:
        datadist = LLMDataDist(LLMRole.MIX, 9)
        cancelled = await cancelled_at(k, datadist.init, how)
        await datadist.init()
        assert datadist.cache_manager is not None
        await datadist.finalize()
        await datadist.finalize()
        k += 1


@hows
async def test_an_end_cancelled_at_any_await_is_an_end(how: str, no_leaks: None) -> None:
    k, cancelled = 1, True
    while cancelled:
        async with linked_pair(SMALL) as (_, decoder, _, cache):
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [4])
            cancelled = await cancelled_at(k, decoder.datadist.finalize, how)
        k += 1
