"""With ``relink``: peers that were killed and started again, stopped, or cut off, are linked again by themselves."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheNotFound,
    LinkChanges,
    LinkError,
    LinkPhase,
    LLMClusterInfo,
    LLMStatusCode,
    NotLinked,
)
from aiodatadist._testing.ports import free_port
from aiodatadist._testing.views import cut_link
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster, verify
from tests.faults.proxy import Proxy, proxy
from tests.faults.test_liveness import BLOCKS, BRISK, DESC, linked_to, puppet
from tests.profiles import at_night
from tests.stopwatch import lasting
from tests.test_relink import until

KEY = BlocksCacheKey(1)
QUICK: dict[str, Any] = {"relink": {"max_delay": 0.2}}
SUCCESS = LLMStatusCode.LLM_SUCCESS
AGAIN = 1.0
"""Seconds from when a peer listens again, or the network works again, to the link."""


class Puller:
    """Pulls for ever: each pull has the peer's bytes, or fails with the link's error, or for a cache that is not there yet.

    Attributes:
        successes, failures: so many did.
    """

    def __init__(self, cluster: Cluster, cache: Cache) -> None:
        self._cluster = cluster
        self._cache = cache
        self._tensors = np.frombuffer(cluster.memory(cache).view(), np.uint8).reshape(DESC.num_tensors, *DESC.shape)
        self.successes = self.failures = 0
        self._changed = anyio.Event()

    async def run(self) -> None:
        manager = self._cluster.datadist.cache_manager
        while True:
            block = (self.successes + self.failures) % 4
            self._tensors[:, 4] = 0
            try:
                await manager.pull_blocks(KEY, self._cache, [block, *BLOCKS[12:]], [4, *BLOCKS[12:]])
            except (LinkError, NotLinked, CacheNotFound):
                self.failures += 1
            else:
                verify(self._cluster.memory(self._cache), self._cache, [(t, 4, 1, block) for t in range(2)])
                self.successes += 1
                self._changed.set()
                self._changed = anyio.Event()
            await anyio.lowlevel.checkpoint()

    async def until_more(self) -> None:
        """Wait until a pull has succeeded that began later than now."""
        for _ in range(2):
            await self._changed.wait()


async def linked_at(changes: LinkChanges, generation: int) -> None:
    while (await until(changes, LinkPhase.LINKED))[-1].generation < generation:
        pass


@pytest.mark.timeout(600)
@pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "request"])
@pytest.mark.parametrize("times", [4, at_night(100)])
async def test_a_peer_that_is_killed_and_started_again_is_linked_by_itself(times: int, one_sided: bool) -> None:
    mode: dict[str, Any] = {"enable_remote_cache_accessible": one_sided, "sync_kv_timeout": 30_000}
    theirs: dict[str, Any] = {**mode, "listen_ip_info": f"127.0.0.1:{free_port()}"}
    times = times if one_sided else times // 2
    async with open_cluster(2, device_id=7, relink={"max_delay": 0.2, "wait": 20}, **mode) as cluster:
        datadist = cluster.datadist
        cache = await cluster.blocks(DESC)
        puller, changes = Puller(cluster, cache), datadist.link_changes()
        async with anyio.create_task_group() as group:
            for generation in range(1, times + 1):
                async with puppet(**theirs) as peer:
                    if generation == 1:
                        assert await datadist.link_clusters([peer.info], 10_000) == (SUCCESS, [SUCCESS])
                        group.start_soon(puller.run)
                    with lasting(AGAIN):
                        await linked_at(changes, generation)
                    with anyio.fail_after(30):
                        await puller.until_more()
                    peer.send(signal.SIGKILL)
                    await until(changes, LinkPhase.LOST)
            group.cancel_scope.cancel()
        figures = datadist.figures()
        assert figures.links_made == times
        assert figures.relinking.succeeded == times - 1
        assert puller.successes >= 2 * times
        entry = inside(datadist).registry.table.find(cache.cache_id)
        assert entry is not None
        assert (entry.leases, entry.is_poisoned) == (0, False)


@pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "request"])
async def test_a_peer_that_was_stopped_is_linked_again_when_it_goes_on(one_sided: bool) -> None:
    options: dict[str, Any] = {**BRISK, "enable_remote_cache_accessible": one_sided}
    async with puppet(**options) as peer, linked_to(peer, **options, **QUICK) as (cluster, cache):
        changes, puller = cluster.datadist.link_changes(), Puller(cluster, cache)
        async with anyio.create_task_group() as group:
            group.start_soon(puller.run)
            for generation in range(2, 4):
                await puller.until_more()
                peer.send(signal.SIGSTOP)
                lost = (await until(changes, LinkPhase.LOST))[-1]
                assert "no heartbeat" in str(lost.reason) or "writing" in str(lost.reason)
                peer.send(signal.SIGCONT)
                with lasting(5):  # an attempt that was under way has to be answered, or to be over, first
                    await linked_at(changes, generation)
                with anyio.fail_after(30):
                    await puller.until_more()
            group.cancel_scope.cancel()


# ---- the network ----


async def through(between: Proxy, cluster: Cluster) -> LinkChanges:
    changes = cluster.datadist.link_changes()
    assert await cluster.datadist.link_clusters([between.info(1)], 5000) == (SUCCESS, [SUCCESS])
    await until(changes, LinkPhase.LINKED)
    return changes


@pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "request"])
async def test_connections_that_are_reset(one_sided: bool) -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": one_sided}
    async with (
        open_cluster(1, **options) as prompt,
        open_cluster(2, device_id=7, **QUICK, **options) as cluster,
        proxy(prompt.datadist.listen_address) as between,
    ):
        await prompt.blocks(DESC)
        cache = await cluster.blocks(DESC)
        changes, puller = await through(between, cluster), Puller(cluster, cache)
        async with anyio.create_task_group() as group:
            group.start_soon(puller.run)
            for generation in range(2, 7):
                await puller.until_more()
                between.reset()
                with lasting(AGAIN):
                    await linked_at(changes, generation)
            await puller.until_more()
            group.cancel_scope.cancel()
        ended = cluster.datadist.figures().links_ended
        assert sum(ended.values()) == 5
        # which of its connections was heard of first
        assert ended.keys() <= {"connection_lost", "heartbeats_missed", "data_connection_lost"}


async def is_linked(cluster: Cluster) -> bool:
    """Return True if the peer answers. A link that was just reset is none."""
    try:
        await cluster.datadist.check_link_status(1)
    except (NotLinked, LinkError):
        return False
    return True


async def test_connections_that_are_reset_while_the_link_is_made_again() -> None:
    """After no byte of the client's, 50, 100 ..., also when that is enough for a handshake."""
    async with (
        open_cluster(1) as prompt,
        open_cluster(2, device_id=7, **QUICK) as cluster,
        proxy(prompt.datadist.listen_address) as between,
    ):
        changes = await through(between, cluster)
        between.limits.extend(range(0, 1500, 50))
        between.reset()
        while between.limits:
            if (await until(changes, LinkPhase.LINKED, LinkPhase.RELINKING))[-1].state is LinkPhase.LINKED:
                between.reset()
        with lasting(AGAIN):
            while not await is_linked(cluster):
                await until(changes, LinkPhase.LINKED)
        assert cluster.datadist.figures().relinking.ended >= 10


async def test_a_peer_that_has_not_heard_of_the_end_replaces_its_half() -> None:
    """The server's connection stays open: the peer hears of nothing for as long as its heartbeats are awaited, 8 seconds."""
    async with (
        open_cluster(1) as prompt,
        open_cluster(2, device_id=7, **QUICK) as cluster,
        proxy(prompt.datadist.listen_address) as between,
    ):
        await prompt.blocks(DESC)
        cache = await cluster.blocks(DESC)
        changes = await through(between, cluster)
        await prompt.datadist.wait_linked(2)
        hers = prompt.datadist.link_changes()
        between.keeps_open = True
        await cut_link(inside(cluster.datadist).links.find(1))
        with lasting(AGAIN):
            await linked_at(changes, 2)
            told = [await anext(hers) for _ in range(2)]
        assert [(change.state, change.generation) for change in told] == [(LinkPhase.LOST, 1), (LinkPhase.LINKED, 2)]
        assert "was linked again" in str(told[0].reason)
        await cluster.datadist.cache_manager.pull_blocks(KEY, cache, [1], [2])
        verify(cluster.memory(cache), cache, [(t, 2, 1, 1) for t in range(2)])


async def test_calls_that_are_cancelled_while_a_link_is_made_again() -> None:
    """The relinker goes on, whatever call of a caller's was cancelled meanwhile; after an unlink it does not."""
    async with (
        open_cluster(1) as prompt,
        open_cluster(2, device_id=7, **QUICK) as cluster,
        proxy(prompt.datadist.listen_address) as between,
    ):
        datadist, info = cluster.datadist, [between.info(1)]
        changes = await through(between, cluster)
        for times in range(1, 12):
            between.refuses = True
            between.reset()
            await until(changes, LinkPhase.RELINKING)
            call = asyncio.create_task(_link(cluster, info))
            for _ in range(times):
                await anyio.lowlevel.checkpoint()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            between.refuses = False
            await linked_at(changes, times + 1)
            await datadist.check_link_status(1)
        between.refuses = True
        between.reset()
        await until(changes, LinkPhase.RELINKING)
        call = asyncio.create_task(_unlink(cluster, info))
        await anyio.lowlevel.checkpoint()
        call.cancel()
        await asyncio.wait([call])
        assert (await until(changes, LinkPhase.UNLINKED))[-1].state is LinkPhase.UNLINKED


async def _link(cluster: Cluster, info: list[LLMClusterInfo]) -> None:
    await cluster.datadist.link_clusters(info, 5000)
    await asyncio.Event().wait()  # it failed before it could be cancelled


async def _unlink(cluster: Cluster, info: list[LLMClusterInfo]) -> None:
    await cluster.datadist.unlink_clusters(info)


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 5, 8, 13, 21, 34])
async def test_finalize_at_any_moment_of_an_attempt(ticks: int, no_leaks: None) -> None:
    async with (
        open_cluster(1) as prompt,
        open_cluster(2, device_id=7, **QUICK) as cluster,
        proxy(prompt.datadist.listen_address) as between,
    ):
        changes = await through(between, cluster)
        between.reset()
        await until(changes, LinkPhase.RELINKING)
        seen = between.connections
        while between.connections == seen:
            await anyio.lowlevel.checkpoint()
        for _ in range(ticks):
            await anyio.lowlevel.checkpoint()
        with lasting(3):
            await cluster.datadist.finalize()
        await inside(prompt.datadist).links.wait_parted()
        assert prompt.datadist.statistics().links == ()


async def test_a_lease_that_an_older_link_claimed_is_nothing_of_the_new_one() -> None:
    async with (
        open_cluster(1) as prompt,
        open_cluster(2, device_id=7, **QUICK) as cluster,
    ):
        source, cache = await prompt.blocks(DESC), await cluster.blocks(DESC)
        assert await cluster.datadist.link_clusters([cluster_info(prompt)], 5000) == (SUCCESS, [SUCCESS])
        changes = cluster.datadist.link_changes()
        await cluster.datadist.cache_manager.pull_blocks(KEY, cache, [0], [0])
        old = inside(cluster.datadist).links.find(1)
        lease = prompt.datadist.cache_manager.lease_blocks(source, [1], 30)
        await cut_link(old)
        await linked_at(changes, 2)
        new = inside(cluster.datadist).links.find(1)
        assert new is not old
        assert new.session.catalogue.find(KEY) is None
        assert not old.session.catalogue.find(KEY) or not old.session.is_ready
        await cluster.datadist.cache_manager.pull_leased(lease.ticket(), cache, [2])
        old.session.release_lease(lease.name)  # a word that comes late, on a connection that is gone
        await cluster.datadist.cache_manager.pull_blocks(KEY, cache, [3], [4])
        verify(cluster.memory(cache), cache, [(t, 2, 1, 1) for t in range(2)])
