"""A process that may start no more threads: calls that need one say so, and what is given back is given back without."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from aiodatadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from aiodatadist.testing import cluster_info, open_cluster
from tests.strict.marks import any_memory

DESC = CacheDesc(2, [4, 4096], DataType.DT_UINT8)
POOL = '{"memory_size": 1048576}'


@contextmanager
def no_threads() -> Iterator[None]:
    """Ask for a stack larger than the address space: none of Python's threads can be started."""
    before = threading.stack_size(1 << 47)
    try:
        with pytest.raises(RuntimeError):
            threading.Thread(target=int).start()
        yield
    finally:
        threading.stack_size(before)


@any_memory
async def test_a_cluster_outlives_links_and_memory_that_end_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        open_cluster(1, mem_pool_cfg=POOL) as owner,
        open_cluster(2, device_id=1, mem_pool_cfg=POOL) as cluster,
    ):
        manager, peers = cluster.datadist.cache_manager, [cluster_info(owner)]
        await owner.datadist.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))
        assert (await cluster.datadist.link_clusters(peers))[0] is LLMStatusCode.LLM_SUCCESS
        tensors, more = ([np.zeros((4, 4096), np.uint8) for _ in range(2)] for _ in range(2))
        mine = await manager.register_blocks_cache(DESC, tensors, remote_accessible=True)
        await manager.pull_blocks(BlocksCacheKey(1), mine, [1], [2])
        with no_threads():
            with pytest.raises(LLMException, match="no thread can be started"):
                await manager.register_blocks_cache(DESC, more, remote_accessible=True)
            assert (await cluster.datadist.unlink_clusters(peers))[0] is LLMStatusCode.LLM_SUCCESS
            await manager.unregister_cache(mine.cache_id)
            assert (await cluster.datadist.link_clusters(peers))[0] is LLMStatusCode.LLM_LINK_FAILED
        assert (await cluster.datadist.link_clusters(peers))[0] is LLMStatusCode.LLM_SUCCESS
        target = await manager.allocate_blocks_cache(DESC)
        report = await manager.pull_blocks(BlocksCacheKey(1), target, [1], [2])
        assert report.bytes == 2 * 4096
    assert not [record for record in caplog.records if record.exc_info], "no failure here is unexpected"


async def test_init_says_so_and_finalize_needs_none() -> None:
    cluster = LLMDataDist(LLMRole.MIX, 1, LLMConfig(listen="127.0.0.1:0"))
    with no_threads(), pytest.raises(LLMException, match="no thread can be started"):
        await cluster.init()
    await cluster.init()
    with no_threads():
        await cluster.finalize()
