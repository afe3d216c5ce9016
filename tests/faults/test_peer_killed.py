"""A peer that dies costs its own link, at once, and nothing else."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from aiodatadist import BlocksCacheKey, Cache, LLMClusterInfo, LLMRole, LLMStatusCode, NotLinked, PeerLost
from aiodatadist.testing import Cluster, open_cluster, soft_counters, soft_fault, soft_faults_cleared, verify
from tests import children
from tests.faults.peer import DESC
from tests.stopwatch import lasting


@asynccontextmanager
async def peer_process(cluster_id: int = 1, which: int = 0) -> AsyncIterator[tuple[children.Process, LLMClusterInfo]]:
    process = await children.create_subprocess_exec(
        sys.executable, "-m", "tests.faults.peer", str(cluster_id), str(which),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        info = LLMClusterInfo(cluster_id)
        info.append_remote_ip_info("127.0.0.1", int(await process.stdout.readline()))
        yield process, info
    finally:
        process.stdin.close()
        if process.returncode is None:
            await process.wait()


@asynccontextmanager
async def linked_to(info: LLMClusterInfo) -> AsyncIterator[tuple[Cluster, Cache]]:
    async with open_cluster(2, LLMRole.DECODER, device_id=1, sync_kv_timeout=30_000) as cluster:
        cache = await cluster.blocks(DESC)
        status, _ = await cluster.datadist.link_clusters([info], 10_000)
        assert status is LLMStatusCode.LLM_SUCCESS
        yield cluster, cache


async def test_a_peer_killed_while_blocks_move_is_told_at_once_and_a_new_one_can_be_linked() -> None:
    async with peer_process() as (process, info), linked_to(info) as (cluster, cache):
        manager = cluster.datadist.cache_manager
        blocks = list(range(64))

        with ExitStack() as until_told:

            async def kill_soon() -> None:
                await manager.pull_blocks(BlocksCacheKey(1), cache, blocks, blocks)  # certainly under way now
                until_told.enter_context(lasting(1))
                process.send_signal(signal.SIGKILL)

            async with asyncio.TaskGroup() as group:
                group.create_task(kill_soon())
                with pytest.raises((PeerLost, NotLinked)):
                    await pull_for_ever(cluster, cache)
        assert await closed(cluster)
        (cause,) = cluster.datadist.figures().links_ended
        assert cause in {"connection_lost", "data_connection_lost", "device_error"}  # what notices it first
        async with peer_process() as (_, again):
            assert (await cluster.datadist.link_clusters([again], 10_000))[0] is LLMStatusCode.LLM_SUCCESS
            await manager.pull_blocks(BlocksCacheKey(1), cache, [5], [6])
            verify(cluster.memory(cache), cache, [(t, 6, 1, 5) for t in range(4)])
            await cluster.datadist.unlink_clusters([again])


async def pull_for_ever(cluster: Cluster, cache: Cache) -> None:
    blocks = list(range(64))
    while True:
        await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, blocks, blocks)


async def closed(cluster: Cluster) -> str:
    try:
        return await cluster.datadist.wait_link_closed(1)
    except NotLinked:
        return "gone"


async def test_a_transfer_that_hangs_ends_with_its_peer() -> None:
    async with peer_process() as (process, info), linked_to(info) as (cluster, cache):
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            task = cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
            process.kill()
            with pytest.raises(PeerLost) as caught:
                await task
        assert caught.value.peer == 1


async def test_a_peer_that_says_good_bye_is_not_lost() -> None:
    async with peer_process() as (process, info), linked_to(info) as (cluster, _):
        assert process.stdin is not None
        process.stdin.close()
        # The first where the peer had heard by then that the link is made.
        why = await cluster.datadist.wait_link_closed(1)
        assert re.fullmatch(r"cluster 1 unlinked: (finalize|cluster 1 is being finalized)", why), why


async def test_nothing_is_left_of_a_dead_peer(no_leaks: None) -> None:
    before = soft_counters()
    async with peer_process() as (process, info), linked_to(info) as (cluster, cache):
        await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        process.kill()
        assert await closed(cluster)
    after = soft_counters()
    for name in ("device_bytes", "adopted", "imported", "streams", "events", "comms", "threads"):
        assert after[name] == before[name], name
