"""Two clusters that link to each other at the same moment: who is told of a link has one."""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMStatusCode
from aiodatadist.cluster.initiator import LinkInitiator
from aiodatadist.testing import Cluster, cluster_info, open_cluster, verify

DESC = CacheDesc(2, [4, 4096], DataType.DT_UINT8)
LINKED = {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK}


async def link_and_pull(one: Cluster, cache: Cache, other: Cluster, delay: float, found: list[LLMStatusCode]) -> None:
    """As a serving engine does: whatever the answer is, if it says that there is a link blocks are pulled at once."""
    await anyio.sleep(delay)
    status, _ = await one.datadist.link_clusters([cluster_info(other)], 20_000)
    found.append(status)
    if status in LINKED:
        await one.datadist.cache_manager.pull_blocks(BlocksCacheKey(other.datadist.cluster_id), cache, [1], [2])
        verify(one.memory(cache), cache, [(0, 2, other.datadist.cluster_id, 1)])


@pytest.mark.parametrize("seed", range(3))
async def test_both_ends_may_link_at_the_same_moment(seed: int) -> None:
    choose = random.Random(seed)
    async with open_cluster(1) as one, open_cluster(2, device_id=1) as two:
        mine, theirs = await one.blocks(DESC), await two.blocks(DESC)
        for _ in range(20):
            found: list[LLMStatusCode] = []
            async with anyio.create_task_group() as tasks:
                for a, cache, b in ((one, mine, two), (two, theirs, one)):
                    tasks.start_soon(link_and_pull, a, cache, b, choose.choice([0, 0, choose.random() / 100]), found)
            assert set(found) <= LINKED, found
            assert LLMStatusCode.LLM_SUCCESS in found
            assert (await one.datadist.unlink_clusters([cluster_info(two)], 20_000))[0] is LLMStatusCode.LLM_SUCCESS
            await two.datadist.cache_manager._engine.links.wait_parted()


async def test_if_nothing_comes_of_the_first_the_other_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cluster 1's attempt goes first, and fails before it reached cluster 2."""
    async with open_cluster(1) as one, open_cluster(2, device_id=1) as two:
        ask, asked = LinkInitiator._ask, anyio.Event()

        async def lost_on_the_way(self: LinkInitiator, address: tuple[str, int], *args: Any) -> Any:
            if self._engine.cluster_id == 2:
                asked.set()
                return await ask(self, address, *args)
            await asked.wait()
            with anyio.CancelScope() as scope:
                scope.deadline = anyio.current_time() + 0.2  # until cluster 2's attempt waits for it
                await anyio.sleep_forever()
            return await ask(self, ("127.0.0.1", 1), *args)

        monkeypatch.setattr(LinkInitiator, "_ask", lost_on_the_way)
        found: dict[int, LLMStatusCode] = {}

        async def link(a: Cluster, b: Cluster) -> None:
            found[a.datadist.cluster_id] = (await a.datadist.link_clusters([cluster_info(b)], 10_000))[0]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link, one, two)
            tasks.start_soon(link, two, one)
        assert found == {1: LLMStatusCode.LLM_LINK_FAILED, 2: LLMStatusCode.LLM_SUCCESS}
