"""While checksums are compared: a device that hangs, a caller that cancels, a peer that leaves or wants its cache."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from aiodatadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheNotFound,
    DataType,
    LinkError,
    LLMStatusCode,
    TransferTimeout,
)
from aiodatadist._cache import digester
from aiodatadist._cache.digester import Digester
from aiodatadist.testing import cluster_info, inside, linked_pair, open_cluster, soft_fault, soft_faults_cleared, verify

DESC = CacheDesc(4, [16, 8192], DataType.DT_UINT8)
POOL = '{"memory_size": 4194304}'
KEY = BlocksCacheKey(1)
modes = pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "requests"])


class Summing:
    """When clusters begin to sum up. Only digests copy to the host here, so a fault of that call strikes nothing else."""

    def __init__(self) -> None:
        self._count = 0
        self._events: dict[int, anyio.Event] = {}

    def begun(self) -> None:
        self._count += 1
        if self._count in self._events:
            self._events[self._count].set()

    async def wait(self, nth: int) -> None:
        event = self._events.setdefault(nth, anyio.Event())
        if self._count < nth:
            with anyio.fail_after(20):
                await event.wait()


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the device copy all bytes that are summed. ``tests/test_compared_at_once.py`` has what is summed in place."""
    monkeypatch.setattr(digester, "SMALL_BYTES", 0)


@pytest.fixture
def summing(monkeypatch: pytest.MonkeyPatch) -> Summing:
    made, digests = Summing(), Digester.digests

    async def told(self: Digester, *args: Any) -> Any:
        made.begun()
        return await digests(self, *args)

    monkeypatch.setattr(Digester, "digests", told)
    return made


@modes
@pytest.mark.parametrize("nth", [1, 2])
async def test_a_device_that_does_not_copy_costs_the_transfer_its_time_and_nothing_else(
    one_sided: bool, nth: int
) -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": one_sided, "sync_kv_timeout": 300}
    async with linked_pair(DESC, **options) as (_, decoder, _, target):
        pull = decoder.datadist.cache_manager.pull_blocks
        await pull(KEY, target, [1], [1], checksum=True, deadline=20)
        with soft_faults_cleared():
            soft_fault(f"aclrtMemcpyAsync:hang@{nth}")
            with pytest.raises(TransferTimeout):
                await pull(KEY, target, [3], [5], checksum=True)
        await pull(KEY, target, [4], [6], checksum=True, deadline=20)
        verify(decoder.memory(target), target, [(t, 6, 1, 4) for t in range(4)])
        assert decoder.datadist.statistics().links[0].running == 0


@modes
async def test_a_deadline_is_one_for_moving_and_comparing(one_sided: bool) -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": one_sided, "sync_kv_timeout": 60_000}
    async with linked_pair(DESC, **options) as (_, decoder, _, target):
        pull = decoder.datadist.cache_manager.pull_blocks
        await pull(KEY, target, [1], [1], checksum=True)
        with soft_faults_cleared():
            soft_fault("aclrtMemcpyAsync:hang")
            with anyio.fail_after(20), pytest.raises(TransferTimeout):
                await pull(KEY, target, [3], [5], checksum=True, deadline=0.3)
        await pull(KEY, target, [4], [6], checksum=True)
        verify(decoder.memory(target), target, [(t, 6, 1, 4) for t in range(4)])


@modes
async def test_a_caller_that_cancels_does_not_wait_for_a_device_that_hangs(one_sided: bool, summing: Summing) -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": one_sided, "sync_kv_timeout": 60_000}
    async with linked_pair(DESC, **options) as (prompt, decoder, source, target):
        pull = decoder.datadist.cache_manager.pull_blocks
        with soft_faults_cleared():
            soft_fault("aclrtMemcpyAsync:hang")
            waiting = asyncio.ensure_future(joined(pull(KEY, target, [3], [5], checksum=True)))
            await summing.wait(1)
            waiting.cancel()
            with anyio.fail_after(20), pytest.raises(asyncio.CancelledError):
                await waiting
        await pull(KEY, target, [4], [6], checksum=True)
        entries = [(prompt, source), (decoder, target)]
        assert [inside(c.datadist).registry.local(cache, "cache").leases for c, cache in entries] == [0, 0]


async def joined(task: Any) -> None:
    await task


@modes
async def test_a_peer_that_leaves_meanwhile_ends_it(one_sided: bool, summing: Summing) -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": one_sided, "sync_kv_timeout": 60_000}
    async with linked_pair(DESC, **options) as (prompt, decoder, _, target):
        with soft_faults_cleared():
            soft_fault("aclrtMemcpyAsync:hang@*")
            task = decoder.datadist.cache_manager.pull_blocks(KEY, target, [3], [5], checksum=True)
            await summing.wait(1)
            await prompt.datadist.unlink_clusters([cluster_info(decoder)], 5000, force=True)
            with anyio.fail_after(20), pytest.raises(LinkError):
                await task


async def test_an_owner_gets_its_cache_back_from_a_pull_that_is_compared_for_too_long(summing: Summing) -> None:
    async with (
        open_cluster(1, mem_pool_cfg=POOL, sync_kv_timeout=200) as owner,
        open_cluster(2, device_id=1, sync_kv_timeout=60_000) as puller,
    ):
        source = await owner.datadist.cache_manager.allocate_blocks_cache(DESC, KEY)
        target = await puller.blocks(DESC)
        assert (await puller.datadist.link_clusters([cluster_info(owner)], 5000))[0] is LLMStatusCode.LLM_SUCCESS
        with soft_faults_cleared():
            soft_fault("aclrtMemcpyAsync:hang@*")
            task = puller.datadist.cache_manager.pull_blocks(KEY, target, [3], [5], checksum=True)
            await summing.wait(2)
            with anyio.fail_after(20):
                given_up = asyncio.ensure_future(owner.datadist.cache_manager.deallocate_blocks_cache(source))
                with pytest.raises(CacheNotFound, match="took its cache back"):
                    await task
                await given_up
        assert owner.datadist.statistics().links[0].state == "ready"


@modes
async def test_finalizing_meanwhile_ends_all(one_sided: bool, summing: Summing) -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": one_sided, "sync_kv_timeout": 60_000}
    async with linked_pair(DESC, **options) as (_, decoder, _, target):
        with soft_faults_cleared():
            soft_fault("aclrtMemcpyAsync:hang@*")
            task = decoder.datadist.cache_manager.pull_blocks(KEY, target, [3], [5], checksum=True)
            await summing.wait(1)
            with anyio.fail_after(20):
                await decoder.datadist.finalize()
                with pytest.raises(LinkError):
                    await task
