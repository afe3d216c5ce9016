"""Two clusters of one process. One is finalized while a copy of the other's stands still in its memory, and then goes on.

Each case is a process of its own: what goes wrong here ends it with SIGSEGV.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import weakref
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheTask,
    DataType,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from aiodatadist.testing import (
    Cluster,
    cluster_info,
    inside,
    open_cluster,
    soft_counters,
    soft_faults_cleared,
    soft_hold,
)
from tests import children
from tests.profiles import at_night
from tests.strict.marks import any_memory

DESC = CacheDesc(2, [8, 1 << 20], DataType.DT_UINT8)
BLOCKS = list(range(8))
POOL = '{"memory_size": 33554432}'
KEY = BlocksCacheKey(2, 0)
LATER = 0x77
CALLS = {"pull": "HcclBatchGet", "push": "HcclBatchPut", "layered": "HcclBatchPut"}
COUNTED = ("allocations", "device_bytes", "adopted", "imported", "comms")


class Immediate:
    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


async def lend(owner: Cluster, memory: str) -> list[weakref.ref[Any]]:
    """Make a cache of the cluster that is going to be finalized: its pool's, or the caller's, who keeps nothing of it.

    Return references to the caller's arrays.
    """
    manager = owner.datadist.cache_manager
    if memory == "pool":
        await manager.allocate_blocks_cache(DESC, KEY)
        return []
    if memory == "device":
        allocated = owner.datadist.device.allocate(DESC.size * DESC.num_tensors)
        await manager.register_blocks_cache(DESC, [allocated.address, allocated.address + DESC.size], KEY, True)
        return []
    arrays = [np.zeros(DESC.size, np.uint8) for _ in range(DESC.num_tensors)]
    await manager.register_blocks_cache(DESC, arrays, KEY, True)
    return [weakref.ref(array) for array in arrays]


def start(mover: Cluster, kind: str, mine: Cache, blocks: list[int]) -> CacheTask:
    manager = mover.datadist.cache_manager
    if kind == "pull":
        return manager.pull_blocks(KEY, mine, blocks, blocks)
    if kind == "push":
        return manager.push_blocks(KEY, mine, blocks, blocks)
    return manager.transfer_cache_async(mine, Immediate(), [TransferWithCacheKeyConfig(KEY)], blocks, blocks)


def memories() -> int:
    """Return how many pieces of softnpu's memory are mapped here."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:softnpu")


def counted() -> list[int]:
    counters = soft_counters()
    return [memories(), *(counters[name] for name in COUNTED)]


async def check(transport: str, kind: str, memory: str) -> None:
    options: dict[str, Any] = {"transport": transport, "mem_pool_cfg": POOL, "sync_kv_timeout": 600_000}
    async with AsyncExitStack() as stack:
        mover = await stack.enter_async_context(open_cluster(1, device_id=0, **options))
        mine = await mover.datadist.cache_manager.allocate_blocks_cache(DESC)
        before = counted()
        opened = open_cluster(2, device_id=1, **options)
        owner = await opened.__aenter__()
        lent = await lend(owner, memory)
        status, each = await mover.datadist.link_clusters([cluster_info(owner)], 5000)
        assert status is LLMStatusCode.LLM_SUCCESS, each
        await start(mover, kind, mine, BLOCKS[:1])
        link = inside(mover.datadist).links.any(2)
        function = CALLS[kind] if transport == "hccl" else "aclrtMemcpyAsync"
        with soft_faults_cleared(), soft_hold(function, at="half") as hold:
            transfer = start(mover, kind, mine, BLOCKS)
            await hold.arrived()
            await opened.__aexit__(None, None, None)
            assert not transfer.done(), "the copy does not stand still"
            del opened, owner
            gc.collect()
            assert transport == "hccl" or all(array() is not None for array in lent), "the copy is in the midst of it"
            async with open_cluster(2, device_id=1, **options) as again:
                other = await again.datadist.cache_manager.allocate_blocks_cache(DESC)
                arrays = again.datadist.cache_manager.arrays(other)
                for array in arrays:
                    array[:] = LATER
                hold.release()
                statuses = await transfer.get_results()
                await link.wait_closed()
                if transport == "hccl":  # over loopback the copy may end before the device is told to stop it
                    assert LLMStatusCode.LLM_SUCCESS not in statuses, statuses
                assert all(bool((array == LATER).all()) for array in arrays), "bytes in memory that was given on"
                del array, arrays
        gc.collect()
        if transport == "loopback":  # over HCCL nothing here knows when the other end has ended
            assert all(array() is None for array in lent), "the caller's memory is still kept"
        assert counted() == before, f"{COUNTED}: {counted()} instead of {before}"


def run(transport: str, kind: str, memory: str, **environment: str) -> None:
    done = children.run(
        [sys.executable, "-m", __name__, transport, kind, memory],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode != -signal.SIGSEGV, "the copy went on in memory that was not there any more"
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("transport", "kind", "memory"),
    [
        ("hccl", "pull", "pool"),
        ("hccl", "push", "pool"),
        at_night("hccl", "layered", "pool"),
        at_night("hccl", "pull", "device"),
        at_night("hccl", "push", "device"),
        at_night("hccl", "layered", "device"),
        pytest.param("hccl", "pull", "array", marks=any_memory),
        pytest.param("hccl", "push", "array", marks=[any_memory, pytest.mark.nightly]),
        pytest.param("hccl", "layered", "array", marks=[any_memory, pytest.mark.nightly]),
        ("loopback", "pull", "pool"),
        at_night("loopback", "push", "pool"),
        ("loopback", "layered", "pool"),
        at_night("loopback", "pull", "device"),
        at_night("loopback", "push", "device"),
        at_night("loopback", "layered", "device"),
        at_night("loopback", "pull", "array"),
        ("loopback", "push", "array"),
        at_night("loopback", "layered", "array"),
    ],
)
def test_a_copy_goes_on_in_memory_of_a_cluster_that_was_finalized(transport: str, kind: str, memory: str) -> None:
    run(transport, kind, memory)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["pull", "push", "layered"])
@pytest.mark.parametrize("strict", ["hccs", "roce", "aicpu"])
def test_so_it_does_on_a_device_that_is_as_strict_as_the_vendors(strict: str, kind: str) -> None:
    run("hccl", kind, "pool", SOFTNPU_STRICT=strict)


if __name__ == "__main__":
    asyncio.run(check(*sys.argv[1:]))
