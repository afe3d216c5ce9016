"""Links that belong to their initiator, as with HIXL: both ends make theirs, and each ends its own."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.abc
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    FeatureNotEnabled,
    LLMClusterInfo,
    LLMException,
    LLMRole,
    LLMStatusCode,
    NotLinked,
    ParamInvalid,
)
from aiodatadist._link.ownership import Owners
from aiodatadist._testing.views import cut_link
from aiodatadist._wire.messages import Own
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster, verify
from tests.held import turns

DESC = CacheDesc(2, [4, 4096], DataType.DT_UINT8)
HIXL: dict[str, Any] = {"transfer_backend": "hixl"}
SUCCESS, ALREADY = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK


class End:
    """A cluster, its cache, and the only peer that it has."""

    def __init__(self, cluster: Cluster, cache: Cache) -> None:
        self.cluster = cluster
        self.cache = cache
        self.peer: End = self

    async def link(self) -> LLMStatusCode:
        return (await self.cluster.datadist.link_clusters([cluster_info(self.peer.cluster)], 20_000))[0]

    async def unlink(self, force: bool = False) -> LLMStatusCode:
        return (await self.cluster.datadist.unlink_clusters([cluster_info(self.peer.cluster)], 20_000, force))[0]

    async def pull(self) -> None:
        peer = self.peer.cluster.datadist.cluster_id
        await self.cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(peer), self.cache, [1], [2])
        verify(self.cluster.memory(self.cache), self.cache, [(0, 2, peer, 1)])

    @property
    def has_link(self) -> bool:
        return bool(self.cluster.datadist.statistics().links)


@asynccontextmanager
async def ends() -> AsyncIterator[tuple[End, End]]:
    async with open_cluster(1, **HIXL) as one, open_cluster(2, device_id=1, **HIXL) as two:
        a, b = End(one, await one.blocks(DESC)), End(two, await two.blocks(DESC))
        a.peer, b.peer = b, a
        yield a, b


async def test_both_ends_link_and_each_ends_its_own() -> None:
    async with ends() as (a, b):
        assert await a.link() is SUCCESS
        await a.pull()
        with pytest.raises(NotLinked, match="link_clusters"):
            await b.pull()
        assert await b.link() is SUCCESS
        await b.pull()
        assert [await a.link(), await b.link()] == [ALREADY, ALREADY]
        assert await a.unlink() is SUCCESS
        with pytest.raises(NotLinked):
            await a.pull()
        await b.pull()
        assert await a.unlink() is SUCCESS
        assert await a.link() is SUCCESS
        assert await b.unlink() is SUCCESS
        await a.pull()
        assert await a.unlink() is SUCCESS
        assert not a.has_link
        await inside(b.cluster.datadist).links.wait_parted()
        assert not b.has_link


async def test_memory_that_a_peers_link_reaches_stays_registered_at_both_ends() -> None:
    """Also at an end that made no link. HIXL refuses only where the link was made."""
    async with ends() as (a, b):
        await a.link()
        for end in (a, b):
            with pytest.raises(LLMException, match="can be reached through links") as caught:
                await end.cluster.datadist.cache_manager.unregister_cache(end.cache.cache_id)
            assert caught.value.status_code is LLMStatusCode.LLM_EXIST_LINK
            await a.pull()
        await a.unlink()
        for end in (b, a):
            await end.cluster.datadist.cache_manager.unregister_cache(end.cache.cache_id)


@pytest.mark.parametrize("seed", range(3))
async def test_both_ends_link_and_unlink_at_the_same_moment(seed: int) -> None:
    choose = random.Random(seed)

    async def come_and_go(end: End) -> None:
        for _ in range(20):
            await turns(choose.choice([1, choose.randrange(40)]))
            assert await end.link() is SUCCESS
            await end.pull()
            await turns(choose.choice([1, choose.randrange(40)]))
            assert await end.unlink() is SUCCESS

    async with ends() as (a, b):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(come_and_go, a)
            tasks.start_soon(come_and_go, b)
        for end in (a, b):
            await inside(end.cluster.datadist).links.wait_parted()
            assert not end.has_link


async def test_a_cancelled_call_leaves_the_peers_link_to_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ends() as (a, b):
        await a.link()
        own, begun = Owners.own, anyio.Event()

        async def held_up(self: Owners) -> None:
            begun.set()
            await own(self)
            await anyio.sleep_forever()

        monkeypatch.setattr(Owners, "own", held_up)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(b.link)
            await begun.wait()
            tasks.cancel_scope.cancel()
        monkeypatch.undo()
        await a.pull()


@pytest.mark.parametrize("ends_by", ["cut", "unlink"])
async def test_a_link_that_ends_while_a_cancelled_call_is_taken_back_is_no_defect(
    ends_by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer has not answered yet that this end is no owner. The end of the link answers instead."""
    async with ends() as (a, b):
        await a.link()
        answer, calls, came = Owners.on_own, list[bool](), anyio.Event()

        def stay_silent(self: Owners, message: Own) -> None:
            if self.session.cluster_id == 1:
                answer(self, message)
            else:
                calls.append(message.on)
                came.set()

        monkeypatch.setattr(Owners, "on_own", stay_silent)
        link = inside(b.cluster.datadist).links.any(1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(b.link)
            await came.wait()
            came = anyio.Event()
            tasks.cancel_scope.cancel()
        await came.wait()
        assert calls == [True, False]
        if ends_by == "cut":
            await cut_link(link)
        else:
            await a.unlink()
        await link.wait_closed()
        await inside(b.cluster.datadist).links.wait_parted()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_peer_that_ends_the_link_at_the_same_moment_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Owners.on_own

    def answer_or_leave(self: Owners, message: Own) -> None:
        if message.on:
            answer(self, message)
        else:
            self.session.spawn(lambda: self.disconnect("unlink_clusters"))

    monkeypatch.setattr(Owners, "on_own", answer_or_leave)
    async with ends() as (a, b):
        assert [await a.link(), await b.link()] == [SUCCESS, SUCCESS]
        assert await a.unlink() is SUCCESS
        await inside(a.cluster.datadist).links.wait_parted()
        assert not a.has_link


async def test_force_is_ignored_and_leaves_the_peers_link_to_the_peer() -> None:
    async with ends() as (a, b):
        assert [await a.link(), await b.link()] == [SUCCESS, SUCCESS]
        assert await a.unlink(force=True) is SUCCESS
        assert b.has_link
        await b.pull()
        assert await b.unlink(force=True) is SUCCESS
        with suppress(NotLinked):  # it is gone already
            await a.cluster.datadist.wait_link_closed(2)
        assert not a.has_link


async def test_both_ends_have_the_same_backend() -> None:
    async with open_cluster(1, **HIXL) as one, open_cluster(2, device_id=1) as two:
        for a, b in ((one, two), (two, one)):
            status, _ = await a.datadist.link_clusters([cluster_info(b)], 20_000)
            assert status is LLMStatusCode.LLM_PARAM_INVALID


async def test_what_the_backend_has_not_is_refused() -> None:
    async with open_cluster(1, **HIXL) as one:
        with pytest.raises(FeatureNotEnabled, match="rank table"):
            await one.datadist.link("link", {1: 0, 2: 1}, "{}")
        with pytest.raises(FeatureNotEnabled, match="keeps the address"):
            await one.datadist.switch_role(LLMRole.DECODER)


# ---- a cluster and itself ----


@pytest.mark.parametrize(
    "options", [{}, {"enable_remote_cache_accessible": False}, HIXL], ids=["one_sided", "request", "hixl"]
)
async def test_a_cluster_may_link_to_itself_and_not_pull_from_itself(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with open_cluster(1, **options) as one:
        cache, itself = await one.blocks(DESC), cluster_info(one)
        assert await one.datadist.link_clusters([itself]) == (SUCCESS, [SUCCESS])
        assert await one.datadist.link_clusters([itself]) == (ALREADY, [ALREADY])
        with pytest.raises(ParamInvalid, match="itself"):
            await one.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])
        assert await one.datadist.unlink_clusters([itself]) == (SUCCESS, [SUCCESS])
        assert await one.datadist.link_clusters([itself]) == (SUCCESS, [SUCCESS])
    assert not [record for record in caplog.records if "already" not in record.getMessage()]


async def test_another_cluster_with_the_same_id_is_no_link_to_itself() -> None:
    async with open_cluster(1) as one:
        stranger = LLMClusterInfo(1)
        stranger.append_remote_ip_info("127.0.0.1", 1)
        assert await one.datadist.link_clusters([stranger]) == (
            LLMStatusCode.LLM_LINK_FAILED,
            [LLMStatusCode.LLM_LINK_FAILED],
        )
        other = cluster_info(one)
        other.remote_cluster_id = 2
        assert (await one.datadist.link_clusters([other]))[0] is LLMStatusCode.LLM_PARAM_INVALID


async def test_no_other_place_counts_as_linked_because_a_cluster_linked_to_itself() -> None:
    """Make one attempt at a time: the other call fails for its own reason."""
    came, gone = anyio.Event(), anyio.Event()

    async def hold(client: anyio.abc.SocketStream) -> None:
        async with client:
            came.set()
            await gone.wait()

    async def link_elsewhere() -> None:
        results.append((await one.datadist.link_clusters([stranger], 20_000))[0])

    results, stranger = list[LLMStatusCode](), LLMClusterInfo(1)
    async with (
        open_cluster(1) as one,
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
    ):
        stranger.append_remote_ip_info("127.0.0.1", listener.extra(anyio.abc.SocketAttribute.local_port))
        group.start_soon(listener.serve, hold)
        async with anyio.create_task_group() as calls:
            calls.start_soon(link_elsewhere)
            await came.wait()
            results.append((await one.datadist.link_clusters([cluster_info(one)]))[0])
            gone.set()
        assert results == [LLMStatusCode.LLM_PROCESSING_LINK, LLMStatusCode.LLM_NOT_YET_LINK]
        group.cancel_scope.cancel()
