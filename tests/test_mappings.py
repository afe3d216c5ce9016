"""Mappings of a process, of which it has vm.max_map_count (65 530): links that ended and memory that was freed leave none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from aiodatadist import LLMClusterInfo, LLMStatusCode, Placement
from aiodatadist.testing import open_cluster
from tests import children

ROUNDS = 20
FEW = 8
"""What allocators and threads may add meanwhile. A mapping left behind in each round would be 20 of them."""
POOL = '{"memory_size": 4194304}'


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines())


async def test_links_leave_no_mapping_behind() -> None:
    """The peer is another process: memory of one's own process is mapped already."""
    peer = await children.create_subprocess_exec(
        sys.executable, "-m", "tests.faults.peer", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert peer.stdin is not None
    assert peer.stdout is not None
    info = LLMClusterInfo(1)
    info.append_remote_ip_info("127.0.0.1", int(await peer.stdout.readline()))
    async with open_cluster(2, device_id=1, mem_pool_cfg=POOL) as cluster:
        before = 0
        for number in range(ROUNDS + 2):
            if number == 2:
                before = mappings()
            assert (await cluster.datadist.link_clusters([info]))[0] is LLMStatusCode.LLM_SUCCESS
            assert (await cluster.datadist.unlink_clusters([info]))[0] is LLMStatusCode.LLM_SUCCESS
        after = mappings()
    peer.stdin.close()
    await peer.wait()
    assert after - before <= FEW


async def test_freed_device_memory_leaves_no_mapping_behind() -> None:
    async with open_cluster(1) as cluster:
        before = 0
        for number in range(ROUNDS + 2):
            if number == 2:
                before = mappings()
            cluster.datadist.device.allocate(3 << 20, Placement.DEVICE).free()
        assert mappings() - before <= FEW
