"""Ends of links at awkward moments: a peer that has said that it leaves did not go away without a word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiodatadist import LinkClosed, LLMClusterInfo, LLMStatusCode
from aiodatadist.testing import Cluster, cluster_info, open_cluster

SUCCESS = (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])
WINDOW = 64


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


async def test_heartbeats_may_end_before_the_peers_last_word_has_had_its_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked() as (_, decoder):
        link = decoder.datadist._running().find_link(1)
        end = link.calls.end

        def end_and_hear_of_the_heartbeats() -> None:
            end()
            link.lost("its heartbeat connection was closed")

        monkeypatch.setattr(link.calls, "end", end_and_hear_of_the_heartbeats)
        assert await decoder.datadist.unlink_clusters(known_as(1)) == SUCCESS


async def test_a_peer_that_closes_without_a_word_is_told_of() -> None:
    async with linked() as (prompt, decoder):
        for _ in range(WINDOW):
            await decoder.datadist.notify(1, b"x")
        untaken = asyncio.create_task(decoder.datadist.notify(1, b"x"))
        await asyncio.sleep(0)
        leaving = asyncio.create_task(decoder.datadist.unlink_clusters(known_as(1), 30_000))
        await asyncio.sleep(0)
        await prompt.datadist.unlink_clusters(known_as(2), force=True)
        assert await leaving == (LLMStatusCode.LLM_UNLINK_FAILED, [LLMStatusCode.LLM_UNLINK_FAILED])
        with pytest.raises(LinkClosed):
            await untaken
