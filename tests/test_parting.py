"""Ends of links at awkward moments: a peer that has said that it leaves did not go away without a word."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from aiodatadist import LinkClosed, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, LLMStatusCode, PeerLost
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._device import give_way
from aiodatadist._link.link_handshake import LinkHandshake
from aiodatadist._testing.views import cut_link, gather_until, resident_task, wire_of
from aiodatadist._wire.messages import MAX_NOTE, Disconnect, Note, Ready
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster

SUCCESS = (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])
WINDOW = 64
MANY = 100


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Cluster, Cluster]]:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        assert await decoder.datadist.link_clusters([cluster_info(prompt)]) == SUCCESS
        await prompt.datadist.wait_linked(2)
        yield prompt, decoder


def known_as(cluster_id: int) -> list[LLMClusterInfo]:
    return [LLMClusterInfo(cluster_id)]


async def test_a_peer_that_leaves_as_well_may_close_its_half_first() -> None:
    async with linked() as (prompt, decoder):
        for _ in range(WINDOW):
            await decoder.datadist.notify(1, b"x")
        untaken = asyncio.create_task(decoder.datadist.notify(1, b"x"))
        await asyncio.sleep(0)
        leaving = asyncio.create_task(decoder.datadist.unlink_clusters(known_as(1), 30_000))  # when that is taken
        status, _ = await prompt.datadist.unlink_clusters(known_as(2), 200)
        assert status is LLMStatusCode.LLM_TIMEOUT
        assert await prompt.datadist.unlink_clusters(known_as(2), force=True) == SUCCESS
        assert await leaving == SUCCESS
        with pytest.raises(LinkClosed):
            await untaken


async def test_a_peer_that_says_many_times_that_it_leaves_is_told_goodbye_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop may go round between them."""
    said, given = list[object](), list[None]()
    start_soon = Spawner.start_soon

    def noted(self: Spawner, function: Any, *args: Any, **options: Any) -> None:
        said.append(getattr(function, "__name__", ""))
        start_soon(self, function, *args, **options)

    async def counted() -> None:
        given.append(None)
        await give_way()

    async with linked() as (prompt, decoder):
        link, theirs = inside(decoder.datadist).links.find(1), inside(prompt.datadist).links.find(2)
        monkeypatch.setattr(Spawner, "start_soon", noted)
        monkeypatch.setattr("aiodatadist._link.link.give_way", counted)
        with theirs.session.wire.together():
            for _ in range(MANY):
                theirs.session.post(Disconnect(reason="it leaves"))
        await link.wait_closed()
        assert said.count("_say_bye") == 1
        assert given


async def test_heartbeats_may_end_before_the_peers_last_word_has_had_its_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked() as (_, decoder):
        link = inside(decoder.datadist).links.find(1)
        end = link.session.questions.end

        def end_and_hear_of_the_heartbeats() -> None:
            end()
            link.session.lost("its heartbeat connection was closed")

        monkeypatch.setattr(link.session.questions, "end", end_and_hear_of_the_heartbeats)
        assert await decoder.datadist.unlink_clusters(known_as(1)) == SUCCESS


async def test_a_peer_that_closes_without_a_word_is_told_of() -> None:
    async with linked() as (prompt, decoder):
        for _ in range(WINDOW):
            await decoder.datadist.notify(1, b"x")
        untaken = asyncio.create_task(decoder.datadist.notify(1, b"x"))
        await asyncio.sleep(0)
        leaving = asyncio.create_task(decoder.datadist.unlink_clusters(known_as(1), 30_000))
        await asyncio.sleep(0)
        await cut_link(inside(prompt.datadist).links.find(2))
        assert await leaving == (LLMStatusCode.LLM_UNLINK_FAILED, [LLMStatusCode.LLM_UNLINK_FAILED])
        with pytest.raises(LinkClosed):
            await untaken


async def test_a_peer_that_is_left_by_force_hears_it_behind_what_was_said_in_the_same_turn() -> None:
    async with linked() as (prompt, decoder):
        link = inside(decoder.datadist).links.find(1)
        ended = asyncio.create_task(prompt.datadist.wait_link_closed(2))
        await asyncio.sleep(0)
        link.session.release_lease("0" * 32)
        await link.abandon(LinkClosed("it was enough"))
        assert await ended == "cluster 2 unlinked: it was enough"


async def test_a_peer_whose_connection_broke_is_heard_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked() as (prompt, decoder):
        link, pumped = inside(prompt.datadist).links.find(2), asyncio.Event()

        async def pump() -> None:
            pumped.set()
            raise PeerLost("it cannot be written to any more")

        monkeypatch.setattr(wire_of(link), "pump", pump)
        ended = asyncio.create_task(link.wait_closed())
        monkeypatch.setattr("aiodatadist._link.link.LAST_WORD_SECONDS", math.inf)
        gather_until(wire_of(link), math.inf)
        link.session.post(Note(payload="x" * MAX_NOTE, number=0))  # more than is sent without a task
        await pumped.wait()
        assert await decoder.datadist.unlink_clusters(known_as(1), force=True) == SUCCESS
        assert str(await ended).startswith("cluster 2 unlinked: ")
        with anyio.fail_after(20):  # one that begins late waits for nothing more
            await link._pump()


# ---- links that one end has, and the other has not yet ----


def hold_the_last_word(side: str, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Keep this end from hearing that the other one is ready. Return an event that is set once this end has said so."""
    said, hear = asyncio.Event(), LinkHandshake._hear_ready

    async def hear_ready(self: LinkHandshake) -> Ready:
        if self._handshake.side == side:
            said.set()
            await asyncio.Event().wait()
        return await hear(self)

    monkeypatch.setattr(LinkHandshake, "_hear_ready", hear_ready)
    return said


async def test_a_server_that_is_linked_hears_of_a_client_that_gives_up_before_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = hold_the_last_word("client", monkeypatch)
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        linking = asyncio.create_task(decoder.datadist.link_clusters([cluster_info(prompt)]))
        await said.wait()
        await prompt.datadist.wait_linked(2)
        ended = asyncio.create_task(prompt.datadist.wait_link_closed(2))
        await asyncio.sleep(0)
        linking.cancel()
        assert await ended == "cluster 2 ended the link: cluster 2 no longer waits"


async def test_a_cluster_that_its_loop_ends_tells_its_peers() -> None:
    async with open_cluster(2) as decoder:
        prompt = LLMDataDist(LLMRole.PROMPT, 1, LLMConfig(device_id=1, listen="127.0.0.1:0"))
        await prompt.init()
        assert prompt.listen_address is not None
        info = LLMClusterInfo(1)
        info.append_remote_ip_info(*prompt.listen_address)
        assert await decoder.datadist.link_clusters([info]) == SUCCESS
        ended = asyncio.create_task(decoder.datadist.wait_link_closed(1))
        await asyncio.sleep(0)
        task = resident_task(inside(prompt))
        assert task is not None
        task.cancel()
        with pytest.warns(ResourceWarning, match="cluster 1 was never finalized"):
            await asyncio.wait([task])
        assert await ended == "cluster 1 ended the link: its cluster has ended"
