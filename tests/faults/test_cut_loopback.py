"""A link within a process that is cut while the other end moves bytes: memory is given on when that end has let go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMException, LLMStatusCode, PeerLost, Placement
from aiodatadist.testing import Cluster, SoftHold, cluster_info, inside, open_cluster, soft_faults_cleared, soft_hold
from tests.held import turns

DESC = CacheDesc(2, [16, 1 << 20], DataType.DT_UINT8)
BLOCKS = list(range(16))
OPTIONS: dict[str, Any] = {"transport": "loopback", "mem_pool_cfg": '{"memory_size": 67108864}'}
LENT, AGAIN, OTHER = 0, 1, 2
MINE, HERS, LATER = 0x11, 0x22, 0x77


class Scene:
    """Cluster 1 moves blocks between its cache and that of cluster 2, which cuts the link."""

    def __init__(self, mover: Cluster, owner: Cluster) -> None:
        self.mover = mover
        self.owner = owner
        self.manager = owner.datadist.cache_manager

    async def caches(self) -> tuple[Cache, Cache]:
        mine = await self.mover.datadist.cache_manager.allocate_blocks_cache(DESC)
        hers = await self.manager.allocate_blocks_cache(DESC, BlocksCacheKey(2, LENT))
        for cluster, cache, value in ((self.mover, mine, MINE), (self.owner, hers, HERS)):
            for array in cluster.datadist.cache_manager.arrays(cache):
                array[:] = value
        return mine, hers

    async def cut(self, by_force: bool) -> None:
        if by_force:
            status, _ = await self.owner.datadist.unlink_clusters([cluster_info(self.mover)], 100, True)
            assert status is LLMStatusCode.LLM_SUCCESS
        else:
            inside(self.owner.datadist).links.any(1).session.break_off(PeerLost("its connection was cut"))

    @property
    def withheld(self) -> int:
        return self.manager.pool_usage()[Placement.DEVICE].withheld

    async def take_the_rest(self) -> None:
        """Wait until there is room for another cache: the pool holds two of them."""
        await self.manager.allocate_blocks_cache(DESC, BlocksCacheKey(2, OTHER), timeout=20)


@asynccontextmanager
async def scene(**options: Any) -> AsyncIterator[tuple[Scene, SoftHold]]:
    """Open a scene in which the next copy stands half-way until it is released."""
    both = OPTIONS | options
    async with open_cluster(1, device_id=0, **both) as mover, open_cluster(2, device_id=1, **both) as owner:
        status, each = await mover.datadist.link_clusters([cluster_info(owner)], 5000)
        assert status is LLMStatusCode.LLM_SUCCESS, each
        with soft_faults_cleared(), soft_hold("aclrtMemcpyAsync", at="half") as copy:
            yield Scene(mover, owner), copy


cuts = pytest.mark.parametrize("by_force", [False, True], ids=["lost", "unlinked"])


@cuts
async def test_no_byte_is_pushed_into_memory_that_was_given_on(by_force: bool) -> None:
    async with scene() as (s, copy):
        mine, hers = await s.caches()
        push = s.mover.datadist.cache_manager.push_blocks(BlocksCacheKey(2, LENT), mine, BLOCKS, BLOCKS)
        await copy.arrived()
        await s.cut(by_force)
        await s.manager.deallocate_blocks_cache(hers)
        assert s.withheld == DESC.size * DESC.num_tensors
        again = await s.manager.allocate_blocks_cache(DESC, BlocksCacheKey(2, AGAIN))
        arrays = s.manager.arrays(again)
        for array in arrays:
            array[:] = LATER
        copy.release()
        await push.get_results()
        await s.take_the_rest()
        assert all((array == LATER).all() for array in arrays)


@cuts
async def test_no_pull_succeeds_with_memory_that_was_given_on(by_force: bool) -> None:
    async with scene() as (s, copy):
        mine, hers = await s.caches()
        pull = s.mover.datadist.cache_manager.pull_blocks(BlocksCacheKey(2, LENT), mine, BLOCKS, BLOCKS)
        await copy.arrived()
        await s.cut(by_force)
        await s.manager.deallocate_blocks_cache(hers)
        assert s.withheld == DESC.size * DESC.num_tensors
        await s.manager.allocate_blocks_cache(DESC, BlocksCacheKey(2, AGAIN))
        copy.release()
        await pull.get_results()
        await s.take_the_rest()
        for array in s.mover.datadist.cache_manager.arrays(mine):
            assert ((array == MINE) | (array == HERS)).all()


async def test_a_link_that_was_cut_is_closed_although_the_other_end_is_busy() -> None:
    async with scene() as (s, copy):
        mine, hers = await s.caches()
        push = s.mover.datadist.cache_manager.push_blocks(BlocksCacheKey(2, LENT), mine, BLOCKS, BLOCKS)
        await copy.arrived()
        link = inside(s.owner.datadist).links.any(1)
        await s.cut(by_force=False)
        await link.wait_closed()
        await turns()
        assert not push.done()
        with pytest.raises(LLMException, match="withheld"):
            await s.manager.copy_blocks(hers, {0: [1]})
        copy.release()
        await push.get_results()
        await s.manager.wait_usable(hers)
        await s.manager.copy_blocks(hers, {0: [1]})


@pytest.mark.parametrize(
    ("call", "is_one_sided"),
    [("push_blocks", True), ("pull_blocks", True), ("pull_blocks", False)],
    ids=["push", "pull", "request"],
)
async def test_memory_of_a_stuck_transfer_is_given_back_once_the_device_has_let_go(
    call: str, is_one_sided: bool
) -> None:
    """The device of the end that moves the bytes does not let go, not even after an abort: the other end waits for it."""
    async with scene(enable_remote_cache_accessible=is_one_sided) as (s, copy):
        mine, hers = await s.caches()
        move = getattr(s.mover.datadist.cache_manager, call)
        task = move(BlocksCacheKey(2, LENT), mine, BLOCKS, BLOCKS)
        await copy.arrived()
        task.cancel()
        other, cache, peer = (s.owner, hers, 1) if is_one_sided else (s.mover, mine, 2)
        link = inside(other.datadist).links.any(peer)
        with contextlib.suppress(LLMException, asyncio.CancelledError):
            await task
        await link.wait_closed()
        manager = other.datadist.cache_manager
        with pytest.raises(LLMException, match="withheld"):
            await manager.copy_blocks(cache, {0: [1]})
        usable = asyncio.ensure_future(manager.wait_usable(cache))
        await turns()
        assert not usable.done(), "the device has not let go"
        copy.release()
        await usable
        await manager.copy_blocks(cache, {0: [1]})
        await manager.deallocate_blocks_cache(cache)
        assert manager.pool_usage()[Placement.DEVICE].withheld == 0
