"""A failure is raised, or the log has one line of it: not both, and not twice."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from itertools import count
from typing import Any

import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    CacheDesc,
    DataType,
    InternalError,
    LLMClusterInfo,
    LLMException,
    LLMStatusCode,
    TransferError,
    TransferWithCacheKeyConfig,
)
from aiodatadist._cache_manager import CacheManager
from aiodatadist.testing import Cluster, inside, linked_pair, open_cluster, soft_fault, soft_faults_cleared

DESC = CacheDesc(4, [8, 1 << 12], DataType.DT_UINT8)
KEY = 7
FAULTS = ["HcclCommInitClusterInfoMemConfig:fail=4@*", "HcclCommPrepare:fail=9@*"]

sides = pytest.mark.parametrize("side", ["client", "server"])
faults = pytest.mark.parametrize("fault", FAULTS)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name != "asyncio"
    ]


def ends(pair: tuple[Cluster, Cluster, Any, Any], side: str) -> tuple[Cluster, Cluster]:
    """Return the cluster that asks, and the cluster whose cache it is."""
    prompt, decoder, _, _ = pair
    return (decoder, prompt) if side == "client" else (prompt, decoder)


async def with_new_memory(asks: Cluster, other: Cluster) -> tuple[CacheManager, Any, BlocksCacheKey]:
    """Make caches that the link's channel does not reach: the first transfer between them needs a further one."""
    await other.blocks(DESC, KEY)
    cache = await asks.blocks(DESC, None)
    return asks.datadist.cache_manager, cache, BlocksCacheKey(other.datadist.cluster_id, KEY)


async def raised_only(call: Awaitable[Any], caplog: pytest.LogCaptureFixture) -> LLMException:
    with pytest.raises(LLMException) as caught:
        await call
    assert lines(caplog) == []
    return caught.value


@sides
@faults
@pytest.mark.parametrize("one_sided", [True, False])
async def test_a_first_pull_that_fails_is_raised(
    side: str, fault: str, one_sided: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=one_sided) as pair:
        manager, cache, key = await with_new_memory(*ends(pair, side))
        with soft_faults_cleared():
            soft_fault(fault)
            error = await raised_only(manager.pull_blocks(key, cache, [0], [0]), caplog)
        assert "injected failure" in str(error)
        await manager.pull_blocks(key, cache, [0], [0])  # both ends are through with the channel that failed
        assert lines(caplog) == []


def start_layered(manager: CacheManager, synchronizer: Any, cache: Any, key: BlocksCacheKey) -> Awaitable[Any]:
    config = TransferWithCacheKeyConfig(key, range(2), range(2))
    return manager.transfer_cache_async(cache, synchronizer, [config], [0], [0])


@sides
@faults
async def test_a_first_layered_transfer_that_fails_is_raised(
    side: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked_pair(DESC) as pair:
        manager, cache, key = await with_new_memory(*ends(pair, side))
        synchronizer = AwaitableLayerSynchronizer(2)
        synchronizer.ready(0)
        synchronizer.ready(1)
        with soft_faults_cleared():
            soft_fault(fault)
            error = await raised_only(start_layered(manager, synchronizer, cache, key), caplog)
        assert "injected failure" in str(error)
        await manager.pull_blocks(key, cache, [0], [0])  # the same
        assert lines(caplog) == []


async def test_a_synchronizer_that_fails_is_the_cause_of_what_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            raise KeyError(layer_index)

    async with linked_pair(DESC) as pair:
        manager, cache, key = await with_new_memory(*ends(pair, "client"))
        error = await raised_only(start_layered(manager, Broken(), cache, key), caplog)
        assert isinstance(error, TransferError)
        assert "synchronize_layer(0) raised KeyError(0)" in str(error)
        assert isinstance(error.__cause__, KeyError)


async def test_a_defect_is_the_cause_of_what_is_raised(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with linked_pair(DESC) as pair:
        manager, cache, key = await with_new_memory(*ends(pair, "client"))
        monkeypatch.setattr("aiodatadist._link.transfers.requester.Lookup", lambda **_: 1 / 0)
        error = await raised_only(manager.pull_blocks(key, cache, [0], [0]), caplog)
        assert isinstance(error, InternalError)
        assert "ZeroDivisionError" in str(error)
        assert isinstance(error.__cause__, ZeroDivisionError)


async def test_links_that_fail_have_a_line_each(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log a line for each link that fails: ``link_clusters`` returns statuses only. Each call is in its own second."""
    info = LLMClusterInfo(1)
    info.append_remote_ip_info("127.0.0.1", 1)
    async with open_cluster(2) as cluster:
        inside(cluster.datadist).totals.incidents.clock = count(0.0, 1.0).__next__
        status, _ = await cluster.datadist.link_clusters([info], 5000)
        assert status is LLMStatusCode.LLM_LINK_FAILED
        assert len(lines(caplog)) == 1
        caplog.clear()
        monkeypatch.setattr("aiodatadist._cluster.dial.connected", lambda *_: 1 / 0)
        await cluster.datadist.link_clusters([info], 5000)
        (line,) = lines(caplog)
        assert "ZeroDivisionError" in line
