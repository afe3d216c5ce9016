"""Pools of production size: linking maps them, and touches no page that no transfer needs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import pytest

from aiodatadist import BlocksCacheKey, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, LLMStatusCode
from tests import children
from tests.large_pool import BLOCKS, allocate, pool, resident_kib

GIB = 1 << 30
TOUCHED_KIB = 256 << 10
"""All that these tests transfer is a few blocks of 80 layers: 12 MiB each at 16 GiB."""
LIMIT = 15_000
"""Milliseconds to link; it takes some ten. Populating 16 GiB takes longer on a machine that has nothing else to do."""


class Peer:
    """A process of tests.large_pool."""

    def __init__(self, process: children.Process, cluster_id: int) -> None:
        self._process = process
        self.cluster_id = cluster_id
        self.info = LLMClusterInfo(cluster_id)

    async def read(self) -> int:
        assert self._process.stdout is not None
        return int(await self._process.stdout.readline())

    async def resident_kib(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return await self.read()


@asynccontextmanager
async def peer_process(cluster_id: int, nbytes: int) -> AsyncIterator[Peer]:
    process = await children.create_subprocess_exec(
        sys.executable, "-m", "tests.large_pool", str(cluster_id), str(nbytes),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    peer = Peer(process, cluster_id)
    try:
        peer.info.append_remote_ip_info("127.0.0.1", await peer.read())
        yield peer
    finally:
        process.stdin.close()
        await process.wait()


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run processes that want a whole core each."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


async def move_at_the_far_end(datadist: LLMDataDist, nbytes: int, peer: Peer) -> None:
    """Pull the last block of the peer's cache, and push it back beside itself, and pull it again."""
    manager, last, key = datadist.cache_manager, BLOCKS - 1, BlocksCacheKey(peer.cluster_id)
    cache = await allocate(datadist, nbytes)
    await manager.pull_blocks(key, cache, [last], [last])
    assert (manager.arrays(cache)[-1][last] == peer.cluster_id).all()
    await manager.push_blocks(key, cache, [last], [last - 1])
    await manager.pull_blocks(key, cache, [last - 1], [0])
    assert (manager.arrays(cache)[-1][0] == peer.cluster_id).all()
    await manager.deallocate_blocks_cache(cache)


async def link_move_and_unlink(datadist: LLMDataDist, nbytes: int, peers: list[Peer]) -> None:
    infos = [peer.info for peer in peers]
    status, each = await datadist.link_clusters(infos, LIMIT)
    assert status is LLMStatusCode.LLM_SUCCESS, each
    for peer in peers:
        await move_at_the_far_end(datadist, nbytes, peer)
    status, each = await datadist.unlink_clusters(infos, LIMIT)
    assert status is LLMStatusCode.LLM_SUCCESS, each


@pytest.mark.parametrize(
    ("nbytes", "count", "busy"),
    [(16 * GIB, 1, 0), (16 * GIB, 1, 2), (2 * GIB, 4, 0)],
    ids=["16 GiB", "16 GiB on a busy machine", "2 GiB and 4 peers"],
)
async def test_large_pools_are_linked_and_linked_again_and_only_what_travels_is_touched(
    nbytes: int, count: int, busy: int
) -> None:
    before = resident_kib()
    async with AsyncExitStack() as stack:
        stack.enter_context(busy_processes(busy))
        config = LLMConfig(sync_kv_timeout=30_000, mem_pool_cfg=pool(nbytes))
        datadist = await stack.enter_async_context(LLMDataDist(LLMRole.DECODER, 100, config))
        peers = [await stack.enter_async_context(peer_process(1 + number, nbytes)) for number in range(count)]
        for _ in range(2):
            await link_move_and_unlink(datadist, nbytes, peers)
        assert resident_kib() - before < TOUCHED_KIB
        for peer in peers:
            assert await peer.resident_kib() < TOUCHED_KIB
