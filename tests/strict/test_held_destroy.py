"""Destroys that do not return.

If HCCL unfolds batches, HcclCommDestroy waits for a kernel, up to HCCL_EXEC_TIMEOUT.
[src hccl_one_sided_service.cc:596-606].
"""

from __future__ import annotations

import io
import logging

import anyio
import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, LLMException, LLMStatusCode
from aiodatadist._device.memory import Memory
from aiodatadist._transport import communicator, registrations
from aiodatadist.testing import cluster_info, open_cluster, soft_fault, soft_hold
from tests.strict import runner

DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)


def is_registered(memory: Memory) -> bool:
    return any(region.address == memory.address for known in registrations._known.values() for region in known)


async def finalize_ends() -> None:
    """End this process while HCCL is in the call: the hold is never released."""
    communicator.DESTROY_SECONDS = 0.2
    logging.getLogger("aiodatadist").addHandler(logging.StreamHandler(log := io.StringIO()))
    async with open_cluster(1, device_id=0) as one, open_cluster(2, device_id=1) as two:
        mine, _ = await one.blocks(DESC), await two.blocks(DESC)
        await runner.link(one, two)
        await one.datadist.cache_manager.pull_blocks(BlocksCacheKey(2), mine, [0], [0])
        memory = one.memory(mine)
        soft_fault("HcclCommDestroy:hold=for-ever@*")
        await one.datadist.finalize()
        await two.datadist.finalize()
    assert memory.is_stuck
    assert not memory.is_free
    assert is_registered(memory)
    assert "cache 1: the device never released its memory; do not use it" in log.getvalue()
    assert "HcclCommDestroy has not returned within 0.2 s: until the process ends" in log.getvalue()


def test_finalize_leaves_it_to_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTNPU_FAULTS", "HcclGetCommConfigCapability:fail=4@*")
    runner.run("aicpu", finalize_ends)


async def finalize_without_memory() -> None:
    communicator.DESTROY_SECONDS = 0.2
    logging.getLogger("aiodatadist").addHandler(logging.StreamHandler(log := io.StringIO()))
    async with open_cluster(1, device_id=0) as one, open_cluster(2, device_id=1) as two:
        await runner.link(one, two)
        soft_fault("HcclCommDestroy:hold=for-ever@*")
        await one.datadist.finalize()
    assert "device 0 has a transfer or a call that does not end: it is not released" in log.getvalue()


def test_the_device_is_not_reset_meanwhile_also_if_no_memory_was_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTNPU_FAULTS", "HcclGetCommConfigCapability:fail=4@*")
    runner.run("aicpu", finalize_without_memory)


async def links_are_refused() -> None:
    communicator.DESTROY_SECONDS = 0.2
    async with open_cluster(1, device_id=0) as one, open_cluster(2, device_id=1) as two, open_cluster(3) as three:
        mine = await one.blocks(DESC)
        await runner.link(one, two)
        with soft_hold("HcclCommDestroy", nth=None) as hold:
            await one.datadist.unlink_clusters([cluster_info(two)], 5000, force=True)
            status, _ = await two.datadist.link_clusters([cluster_info(three)], 5000)
            assert status is LLMStatusCode.LLM_LINK_FAILED
            with pytest.raises(LLMException, match="must not be freed, until the process ends"):
                await one.datadist.cache_manager.unregister_cache(mine.cache_id)
            hold.release()
            while communicator._turn.is_taken:  # noqa: ASYNC110 - by threads that the hold has let go
                await anyio.sleep(0.001)
            communicator.DESTROY_SECONDS = 30.0
            status, each = await two.datadist.link_clusters([cluster_info(three)], 5000)
            assert status is LLMStatusCode.LLM_SUCCESS, each


def test_links_are_refused_meanwhile_and_made_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """HCCL's tables have no lock: nothing else makes or destroys a communicator while it is in that call."""
    monkeypatch.setenv("SOFTNPU_FAULTS", "HcclGetCommConfigCapability:fail=4@*")
    runner.run("aicpu", links_are_refused)
