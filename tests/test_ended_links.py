"""Memory that a cluster keeps of ended links: it does not grow with their number."""

from __future__ import annotations

import gc
import itertools
import logging
import tracemalloc
from collections import Counter
from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMClusterInfo, LLMStatusCode, NotLinked
from aiodatadist._link.control import peer_share
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster

DESC = CacheDesc(2, [8, 64], DataType.DT_UINT8)
REMEMBERED = 6
"""Peers, here; in earnest it is thousands."""
FEW = 8
ROOM = 12
"""Pieces of memory by which counters may differ; a peer that was remembered would have two or more, and there are 24 more."""
ABSENT = 1_000_000
OURS = tracemalloc.Filter(True, "*/aiodatadist/*")


async def come_and_go(hub: Cluster, cache: Cache, peer_id: int) -> None:
    """Link a peer, pull in both directions and let it leave; then dial a peer that is not there."""
    async with open_cluster(peer_id, device_id=1) as peer:
        theirs = await peer.blocks(DESC)
        await hub.datadist.link_clusters([cluster_info(peer)], 10_000)
        await hub.datadist.cache_manager.pull_blocks(BlocksCacheKey(peer_id), cache, [1], [2])
        await peer.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), theirs, [1], [2])
    with suppress(NotLinked):  # it has ended, and is no longer remembered
        await hub.datadist.wait_link_closed(peer_id)
    absent = LLMClusterInfo(ABSENT + peer_id)
    absent.append_remote_ip_info("127.0.0.1", 1)
    assert (await hub.datadist.link_clusters([absent], 10_000))[0] is LLMStatusCode.LLM_LINK_FAILED


async def why_not_linked(hub: Cluster, peer_id: int) -> str:
    with pytest.raises(NotLinked) as caught:
        await hub.datadist.check_link_status(peer_id)
    return str(caught.value)


async def census() -> tuple[Counter[str], int]:
    """Count objects by type, and pieces of memory that code of the package has allocated.

    Bytes are not counted: a table of all links, the package's or asyncio's, keeps the room that the most links at a time had.
    """
    for _ in range(3):  # what waits for the loop to go round
        await anyio.lowlevel.checkpoint()
    gc.collect()
    kinds = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    ours = tracemalloc.take_snapshot().filter_traces([OURS]).statistics("filename")
    return kinds, sum(each.count for each in ours)


async def test_after_four_times_the_links_no_more_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "aiodatadist")  # else pytest keeps the records, and what they speak of
    monkeypatch.setattr("aiodatadist._counting.totals.MAX_PEERS", REMEMBERED)
    monkeypatch.setattr(peer_share, "MAX_SHARES", REMEMBERED)
    ids = itertools.count(100)
    async with open_cluster(1) as hub:
        cache = await hub.blocks(DESC)
        tracemalloc.start()
        try:
            seen = []
            for batches in (1, 1, 3):
                for _ in range(batches):
                    async with anyio.create_task_group() as group:
                        for _ in range(FEW):
                            group.start_soon(come_and_go, hub, cache, next(ids))
                seen.append(await census())
        finally:
            tracemalloc.stop()
        _, (kinds, pieces), (later_kinds, later_pieces) = seen  # the first ones fill caches of the interpreter
        grown = {
            kind: number for kind, number in (later_kinds - kinds).items() if "aiodatadist" in kind or number > 2 * FEW
        }
        assert grown == {}
        assert later_pieces - pieces < ROOM
        whys = [await why_not_linked(hub, each + base) for each in range(100, next(ids)) for base in (0, ABSENT)]
        assert sum("the last" in why for why in whys) == REMEMBERED


async def test_a_link_that_has_ended_is_closed_for_those_who_wait_for_that() -> None:
    async with open_cluster(1) as hub:
        with pytest.raises(NotLinked, match="not linked"):
            await hub.datadist.wait_link_closed(2)
        async with open_cluster(2, device_id=1) as peer:
            await hub.datadist.link_clusters([cluster_info(peer)], 10_000)
        why = await hub.datadist.wait_link_closed(2)
        with pytest.raises(NotLinked):  # it has gone
            await hub.datadist.check_link_status(2)
        assert await hub.datadist.wait_link_closed(2) == why


async def test_a_lost_link_is_logged_in_a_line_that_names_its_cluster_once(caplog: pytest.LogCaptureFixture) -> None:
    async with open_cluster(1) as hub, open_cluster(2, device_id=1) as peer:
        await hub.datadist.link_clusters([cluster_info(peer)], 10_000)
        inside(hub.datadist).links.any(2).session.lost("it was silent")
        await hub.datadist.wait_link_closed(2)
    (line,) = [each for each in caplog.messages if "it was silent" in each and "link to" in each]
    assert line == "link to cluster 2: it was silent [LLM_NOT_YET_LINK]"
