"""Two clusters that link to each other at the same moment: who is told of a link has one."""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMStatusCode
from aiodatadist._cluster.initiator import LinkInitiator
from aiodatadist._wire.messages import Hello
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster, verify
from tests.held import turns
from tests.profiles import at_night

DESC = CacheDesc(2, [4, 4096], DataType.DT_UINT8)
LINKED = {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK}


async def link_and_pull(one: Cluster, cache: Cache, other: Cluster, pause: int, found: list[LLMStatusCode]) -> None:
    """Link as a serving engine does: if any answer reports a link, pull blocks at once."""
    await turns(pause)
    status, _ = await one.datadist.link_clusters([cluster_info(other)], 20_000)
    found.append(status)
    if status in LINKED:
        await one.datadist.cache_manager.pull_blocks(BlocksCacheKey(other.datadist.cluster_id), cache, [1], [2])
        verify(one.memory(cache), cache, [(0, 2, other.datadist.cluster_id, 1)])


@pytest.mark.parametrize("seed", [0, at_night(1), at_night(2)])
async def test_both_ends_may_link_at_the_same_moment(seed: int) -> None:
    choose = random.Random(seed)
    async with open_cluster(1) as one, open_cluster(2, device_id=1) as two:
        mine, theirs = await one.blocks(DESC), await two.blocks(DESC)
        for _ in range(20):
            found: list[LLMStatusCode] = []
            async with anyio.create_task_group() as tasks:
                for a, cache, b in ((one, mine, two), (two, theirs, one)):
                    tasks.start_soon(link_and_pull, a, cache, b, choose.choice([1, 1, choose.randrange(200)]), found)
            assert set(found) <= LINKED, found
            assert LLMStatusCode.LLM_SUCCESS in found
            assert (await one.datadist.unlink_clusters([cluster_info(two)], 20_000))[0] is LLMStatusCode.LLM_SUCCESS
            await inside(two.datadist).links.wait_parted()


async def test_if_nothing_comes_of_the_first_the_other_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cluster 1's attempt has met cluster 2, and goes first; then its way to cluster 2 is cut."""
    async with open_cluster(1) as one, open_cluster(2, device_id=1) as two:
        ask, wait_settled = LinkInitiator._ask, LinkInitiator.wait_settled
        asks, waits = anyio.Event(), anyio.Event()

        async def lost_on_the_way(self: LinkInitiator, address: tuple[str, int], *args: Any) -> Any:
            if self._engine.cluster_id == 2:
                await asks.wait()
                return await ask(self, address, *args)
            (attempt,) = self._attempts.values()
            attempt.asks = two.datadist.instance
            asks.set()
            await waits.wait()
            return await ask(self, ("127.0.0.1", 1), *args)

        async def wait(self: LinkInitiator, peer: Hello) -> bool:
            waits.set()
            return await wait_settled(self, peer)

        monkeypatch.setattr(LinkInitiator, "_ask", lost_on_the_way)
        monkeypatch.setattr(LinkInitiator, "wait_settled", wait)
        found: dict[int, LLMStatusCode] = {}

        async def link(a: Cluster, b: Cluster) -> None:
            found[a.datadist.cluster_id] = (await a.datadist.link_clusters([cluster_info(b)], 10_000))[0]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link, one, two)
            tasks.start_soon(link, two, one)
        assert found == {1: LLMStatusCode.LLM_LINK_FAILED, 2: LLMStatusCode.LLM_SUCCESS}
