"""Many transfers that expire together all say so in time, and leave a link that works."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, CacheTask, DataType, LinkTimeout, LLMStatusCode, TransferTimeout
from aiodatadist.testing import inside, linked_pair, soft_fault, soft_faults_cleared, verify
from tests.faults.test_liveness import linked_to, puppet
from tests.held import held_transfer
from tests.stopwatch import lasting

DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
MANY = 200
LIMIT = 0.5
LATE = 1.0
"""Seconds that a slow machine may take for 200 of them; if each waited for the one before, it would be minutes."""


async def expire(make: Callable[[], Iterable[CacheTask]], limit: float = LIMIT) -> None:
    """Check that each task raises soon after its time is over. A loop in debug mode is several times slower."""
    asyncio.get_running_loop().set_debug(False)
    started = time.monotonic()
    tasks = make()

    async def one(task: CacheTask) -> float:
        with pytest.raises(TransferTimeout) as caught:
            await task
        assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.peer == 1
        return time.monotonic() - started

    with lasting(limit + LATE):
        took = await asyncio.gather(*[one(task) for task in tasks])
    assert len(took) == MANY
    assert limit - 0.05 < min(took)


async def test_requests_that_expire_together() -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": False, "sync_kv_timeout": round(LIMIT * 1000)}
    async with linked_pair(DESC, **options) as (prompt, decoder, source, cache):
        pull = decoder.datadist.cache_manager.pull_blocks
        await pull(BlocksCacheKey(1), cache, [0], [0])
        with soft_faults_cleared():
            soft_fault("HcclBatchPut:hang@*")
            await expire(lambda: [pull(BlocksCacheKey(1), cache, [1], [2]) for _ in range(MANY)])
        memory = decoder.memory(cache)
        memory.view()[:] = bytes(memory.nbytes)
        await pull(BlocksCacheKey(1), cache, [3], [4])
        verify(memory, cache, [(t, 4, 1, 3) for t in range(2)])
        view = memory.view()
        assert not any(view[at] for at in range(0, memory.nbytes, 4096) if at // 4096 % 8 != 4)
        for cluster, own in ((prompt, source), (decoder, cache)):
            entry = inside(cluster.datadist).registry.table.find(own.cache_id)
            assert entry is not None
            assert entry.leases == 0
            assert all(link.running == 0 for link in cluster.datadist.statistics().links)
        assert decoder.datadist.statistics().links[0].failures == {"LLM_TIMEOUT": MANY}


async def test_first_pulls_of_a_peer_that_does_not_answer() -> None:
    """Its process is stopped, for less than its patience: it is not lost, and goes on as if nothing had been."""
    async with puppet() as peer, linked_to(peer, sync_kv_timeout=round(LIMIT * 1000)) as (cluster, cache):
        peer.send(signal.SIGSTOP)
        pull = cluster.datadist.cache_manager.pull_blocks
        await expire(lambda: [pull(BlocksCacheKey(1), cache, [1], [2]) for _ in range(MANY)])
        with lasting(LIMIT + LATE), pytest.raises(LinkTimeout):
            await cluster.datadist.check_link_status(1)
        peer.send(signal.SIGCONT)
        await cluster.datadist.check_link_status(1)
        await pull(BlocksCacheKey(1), cache, [3], [4])
        verify(cluster.memory(cache), cache, [(t, 4, 1, 3) for t in range(2)])


async def test_patience_that_ends_together_stops_nothing() -> None:
    async with linked_pair(DESC, sync_kv_timeout=10_000) as (_, decoder, _, cache):
        pull = decoder.datadist.cache_manager.pull_blocks
        await pull(BlocksCacheKey(1), cache, [0], [0])
        with held_transfer() as held:
            asyncio.get_running_loop().set_debug(False)
            tasks = [pull(BlocksCacheKey(1), cache, [1], [2]) for _ in range(MANY)]
            await held.arrived()
            results = await asyncio.gather(*[task.get_results(100) for task in tasks])
            assert results == [[LLMStatusCode.LLM_TIMEOUT]] * MANY
            held.release()
            await asyncio.gather(*[_done(task) for task in tasks])
        verify(decoder.memory(cache), cache, [(t, 2, 1, 1) for t in range(2)])


async def _done(task: CacheTask) -> None:
    await task
