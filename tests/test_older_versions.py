"""Links with version 4.0, which knows neither checksums nor priorities, and refuses whatever is newer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheNotFound,
    FeatureNotEnabled,
    LLMClusterInfo,
    LLMStatusCode,
    NotLinked,
    TransferPriority,
)
from aiodatadist.testing import Cluster, open_cluster, verify
from tests import children
from tests.test_versions import DESC

PEER = [sys.executable, "-m", "tests.older_peer"]
MODES = pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "request/response"])


def mode(one_sided: bool) -> dict[str, Any]:
    return {"enable_remote_cache_accessible": one_sided, "trust": "none", "sync_kv_timeout": 20_000}


async def link(cluster: Cluster, peer: LLMClusterInfo) -> None:
    linked = await cluster.datadist.link_clusters([peer], 10_000)
    assert linked[0] is LLMStatusCode.LLM_SUCCESS, linked.errors


async def part(cluster: Cluster, peer: LLMClusterInfo) -> None:
    assert (await cluster.datadist.unlink_clusters([peer], 10_000))[0] is LLMStatusCode.LLM_SUCCESS


async def use(cluster: Cluster, peer: int, cache: Cache, one_sided: bool, **options: Any) -> None:
    """Pull from a peer, and push to it, with these options."""
    manager, key = cluster.datadist.cache_manager, BlocksCacheKey(peer)
    await cluster.datadist.check_link_status(peer)
    for _ in range(3):
        await manager.pull_blocks(key, cache, [3, 4], [0, 1], **options)
    for task in [manager.pull_blocks(key, cache, [block + 3], [block], **options) for block in range(2)]:
        await task
    if one_sided:
        await manager.push_blocks(key, cache, [7], [9], **options)
    with pytest.raises(CacheNotFound):
        await manager.pull_blocks(BlocksCacheKey(peer, 5), cache, [3], [0], **options)
    verify(cluster.memory(cache), cache, [(t, b, peer, b + 3) for t in range(4) for b in range(2)])


async def use_what_is_newer(cluster: Cluster, peer: int, cache: Cache, one_sided: bool) -> None:
    """Use what an older peer does not know: it ignores priorities, checksums are refused here, the link continues."""
    manager, key = cluster.datadist.cache_manager, BlocksCacheKey(peer)
    words = r"cluster 1 knows no checksums: its protocol has version 4\.0, and they came with 4\.1"
    for priority in TransferPriority:
        await use(cluster, peer, cache, one_sided, priority=priority)
        with pytest.raises(FeatureNotEnabled, match=words):
            await manager.pull_blocks(key, cache, [5], [0], checksum=True)
    if one_sided:
        with pytest.raises(FeatureNotEnabled, match=words):
            await manager.push_blocks(key, cache, [5], [0], checksum=True)
    await use(cluster, peer, cache, one_sided)


@asynccontextmanager
async def older_peer(one_sided: bool, port: int | None = None) -> AsyncIterator[str]:
    """Start the older peer. Yield its first line. The process must end well."""
    arguments = [str(int(one_sided))] + ([] if port is None else [str(port)])
    peer = await children.create_subprocess_exec(*PEER, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert peer.stdin is not None
        assert peer.stdout is not None
        yield (await peer.stdout.readline()).decode().strip()
        peer.stdin.close()
        assert await peer.wait() == 0
    finally:
        if peer.returncode is None:
            peer.kill()
            await peer.wait()


def at(port: str) -> LLMClusterInfo:
    info = LLMClusterInfo(1)
    info.append_remote_ip_info("127.0.0.1", int(port))
    return info


@MODES
async def test_this_version_links_to_the_first(one_sided: bool) -> None:
    async with (
        older_peer(one_sided) as port,
        open_cluster(2, device_id=1, **mode(one_sided)) as cluster,
    ):
        cache = await cluster.blocks(DESC)
        await link(cluster, at(port))
        await use_what_is_newer(cluster, 1, cache, one_sided)
        await part(cluster, at(port))
        assert cluster.datadist.figures().links_ended == {"unlinked": 1}


@MODES
async def test_the_first_version_links_to_this_one(one_sided: bool) -> None:
    async with open_cluster(2, device_id=1, **mode(one_sided)) as cluster:
        cache = await cluster.blocks(DESC)
        address = cluster.datadist.listen_address
        assert address is not None
        async with older_peer(one_sided, address[1]) as said:
            assert said == "linked"
            await use_what_is_newer(cluster, 1, cache, one_sided)
        with suppress(NotLinked):  # it has ended already
            await cluster.datadist.wait_link_closed(1)
        assert cluster.datadist.figures().links_ended == {"unlinked": 1}


async def test_it_is_not_linked_where_all_is_to_be_checked() -> None:
    async with (
        older_peer(True) as port,
        open_cluster(2, device_id=1, **mode(True), transfer_checksum=True) as cluster,
    ):
        linked = await cluster.datadist.link_clusters([at(port)], 10_000)
        assert linked[0] is LLMStatusCode.LLM_PARAM_INVALID
        words = "transfer_checksum is on at cluster 2, and cluster 1 knows no checksums: its protocol has version 4.0"
        assert words in str(linked.errors)


async def test_nor_may_it_link() -> None:
    async with open_cluster(2, device_id=1, **mode(True), transfer_checksum=True) as cluster:
        address = cluster.datadist.listen_address
        assert address is not None
        peer = await children.create_subprocess_exec(*PEER, "1", str(address[1]), stderr=subprocess.PIPE)
        _, errors = await peer.communicate()
        assert peer.returncode != 0
        words = b"an unproved peer refused: transfer_checksum is on at cluster 2, and cluster 1 knows no checksums"
        assert words in errors
