"""Unusual events that must not end a cluster or a link."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from aiodatadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMException,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from aiodatadist._cluster import initiator, listener, pending_client
from aiodatadist.testing import Cluster, cluster_info, linked_pair, open_cluster, soft_fault, soft_faults_cleared
from tests.held import PUSH, held_transfer, turns

DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)


async def test_a_link_outlives_the_time_that_a_handshake_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (initiator, pending_client):
        monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT", 0.3)
    async with linked_pair(DESC, heartbeat_interval=0.05, heartbeat_misses=100) as (_, decoder, _, cache):
        with anyio.move_on_after(1.0):
            await decoder.datadist.wait_link_closed(1)
            pytest.fail("the link ended")
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])


@contextmanager
def descriptors_exhausted() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_clients_that_come_when_descriptors_have_run_out_wait() -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, cache), open_cluster(3, device_id=2) as other:
        address = prompt.datadist.listen_address
        assert address is not None
        stream = await anyio.connect_tcp(*address)  # made, and not accepted before the descriptors are gone
        with descriptors_exhausted():
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
        await stream.aclose()
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])
        status, _ = await other.datadist.link_clusters([cluster_info(prompt)])
        assert status is LLMStatusCode.LLM_SUCCESS


async def test_accepting_without_descriptors_pauses_and_names_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "ACCEPT_PAUSE", 3600.0)
    async with open_cluster(1) as cluster:
        address = cluster.datadist.listen_address
        assert address is not None
        with socket.socket() as client, descriptors_exhausted():
            client.connect(address)
            await turns(200)
        assert cluster.datadist.figures().incidents == {"accept_failed": 1}
        lines = [record.getMessage() for record in caplog.records if "accepted" in record.getMessage()]
        assert lines == ["a client cannot be accepted: Too many open files: RLIMIT_NOFILE is 3"]


async def test_a_synchronizer_that_is_cancelled_costs_its_transfer_only() -> None:
    class Cancelled:
        async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            raise asyncio.CancelledError

    async with linked_pair(DESC) as (prompt, decoder, source, cache):
        target = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(1), range(1))
        task = prompt.datadist.cache_manager.transfer_cache_async(source, Cancelled(), [target], [0], [1])
        assert await task.get_results() == [LLMStatusCode.LLM_FAILED]
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])


async def serving(cluster: Cluster) -> None:
    """Wait until a transfer that a peer asked for has begun."""
    async with asyncio.timeout(20):
        while not any(link.running for link in cluster.datadist.statistics().links):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("end", ["unlink", "finalize"])
async def test_a_requested_pull_does_not_end_before_its_owner_stopped_writing(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodatadist._link.transfers.pull_requests.STOP_TIMEOUT", 0.3)
    async with linked_pair(DESC, enable_remote_cache_accessible=False) as (prompt, decoder, _, cache):
        with held_transfer(PUSH) as held:
            task = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])
            await held.arrived()
            leaving = asyncio.create_task(
                decoder.datadist.unlink_clusters([cluster_info(prompt)], 200)
                if end == "unlink"
                else prompt.datadist.unlink_clusters([cluster_info(decoder)], 200)
            )
            while next(iter(decoder.datadist.statistics().links)).state == "ready":
                await anyio.lowlevel.checkpoint()
            assert not task.done(), "its owner is writing"
            held.release()
            await task.synchronize()
            before = bytes(decoder.memory(cache).view())
            await leaving
            assert bytes(decoder.memory(cache).view()) == before


async def test_a_destination_that_is_taken_back_while_it_is_filled_costs_that_pull_only() -> None:
    pool = '{"memory_size": 1048576, "page_shift": 12}'
    options = {"enable_remote_cache_accessible": False, "mem_pool_cfg": pool, "sync_kv_timeout": 300}
    async with linked_pair(DESC, **options) as (prompt, decoder, _, cache):  # type: ignore[arg-type]
        manager = decoder.datadist.cache_manager
        lent = await manager.allocate_blocks_cache(DESC)
        with soft_faults_cleared():
            soft_fault("HcclBatchPut:hang")
            task = manager.pull_blocks(BlocksCacheKey(1), lent, [1], [2])
            await serving(prompt)
            await manager.deallocate_blocks_cache(lent)
            with pytest.raises(LLMException):
                await task
        await manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])
