"""Offers that name a true cluster's id at other places: silent ones, many of them, and others that lead to the same engine.

A client's offer costs the worker dials. It must not cost another client's offer its link.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio import wait_all_tasks_blocked

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMStatusCode
from aiodatadist.testing import ChaosProxy, Cluster, cluster_info, open_cluster, verify

DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
KEY = "k" * 40
LINKED = {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK}
SILENT = "127.0.0.7"


@asynccontextmanager
async def silent_listener() -> AsyncIterator[tuple[tuple[str, int], anyio.Event]]:
    """A place that takes connections and says nothing, and what tells of the first one."""
    came = anyio.Event()

    async def serve(client: anyio.abc.SocketStream) -> None:
        async with client:
            came.set()
            await anyio.sleep_forever()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield ("127.0.0.1", listener.extra(anyio.abc.SocketAttribute.local_port)), came
        group.cancel_scope.cancel()


def at(cluster_id: int, place: tuple[str, int]) -> LLMClusterInfo:
    info = LLMClusterInfo(cluster_id)
    info.append_remote_ip_info(*place)
    return info


async def check_linked(decoder: Cluster, cache: Any, source: int) -> None:
    await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(source), cache, [1], [2])
    verify(decoder.memory(cache), cache, [(0, 2, source, 1)])


# ---- attempts at one cluster ----


@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
@pytest.mark.parametrize("ids", [(1, 2), (2, 1)], ids=["to the smaller id", "to the larger id"])
async def test_an_attempt_at_a_silent_place_holds_up_no_attempt_at_the_true_one(
    ids: tuple[int, int], key: str | None, no_leaks: None
) -> None:
    async with (
        open_cluster(ids[0], auth_key=key) as prompt,
        open_cluster(ids[1], device_id=1, auth_key=key) as decoder,
        silent_listener() as (place, came),
        anyio.create_task_group() as tasks,
    ):
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        found: list[LLMStatusCode] = []

        async def lie() -> None:
            found.append((await decoder.datadist.link_clusters([at(ids[0], place)], 60_000)).status)

        tasks.start_soon(lie)
        await came.wait()
        linked = await decoder.datadist.link_clusters([cluster_info(prompt)], 20_000)
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        await check_linked(decoder, cache, ids[0])
        await wait_all_tasks_blocked()
        assert found == [LLMStatusCode.LLM_ALREADY_LINK], "what names no true place ends with the link"
        engine = decoder.datadist._running()
        assert (engine.links.count, engine.links.opening) == (1, set())


@pytest.mark.parametrize("ids", [(1, 2), (2, 1)], ids=["from the larger id", "from the smaller id"])
async def test_an_attempt_at_a_silent_place_does_not_keep_the_true_cluster_waiting(ids: tuple[int, int]) -> None:
    """The cluster itself asks for a link, while this end dials a place that does not answer under its id."""
    async with (
        open_cluster(ids[0]) as prompt,
        open_cluster(ids[1], device_id=1) as decoder,
        silent_listener() as (place, came),
        anyio.create_task_group() as tasks,
    ):
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        found: list[LLMStatusCode] = []

        async def lie() -> None:
            found.append((await decoder.datadist.link_clusters([at(ids[0], place)], 60_000)).status)

        tasks.start_soon(lie)
        await came.wait()
        linked = await prompt.datadist.link_clusters([cluster_info(decoder)], 20_000)
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        await check_linked(decoder, cache, ids[0])
        await wait_all_tasks_blocked()
        assert found == [LLMStatusCode.LLM_ALREADY_LINK]


@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
async def test_attempts_that_reach_one_cluster_by_several_ways_are_one_link(key: str | None, no_leaks: None) -> None:
    async with open_cluster(1, auth_key=key) as prompt, open_cluster(2, device_id=1, auth_key=key) as decoder:
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        address = prompt.datadist.listen_address
        assert address is not None
        async with ChaosProxy(address) as one, ChaosProxy(address) as two:
            for number in range(1, 6):
                found: list[LLMStatusCode] = []

                async def link(place: tuple[str, int], found: list[LLMStatusCode]) -> None:
                    found.append((await decoder.datadist.link_clusters([at(1, place)], 20_000)).status)

                async with anyio.create_task_group() as tasks:
                    for place in (one.address, two.address, address):
                        tasks.start_soon(link, place, found)
                assert set(found) <= LINKED, found
                assert found.count(LLMStatusCode.LLM_SUCCESS) == 1
                await check_linked(decoder, cache, 1)
                assert decoder.datadist.statistics().links[0].generation == number, "none was made and replaced"
                assert prompt.datadist.statistics().links[0].generation == number
                assert [cluster.datadist._running().links.count for cluster in (prompt, decoder)] == [1, 1]
                await decoder.datadist.unlink_clusters([cluster_info(prompt)], 20_000)
                await prompt.datadist._running().links.wait_parted()


async def test_a_call_that_is_cancelled_leaves_the_others_alone() -> None:
    async with (
        open_cluster(1) as prompt,
        open_cluster(2, device_id=1) as decoder,
        silent_listener() as (place, came),
        silent_listener() as (another, came_too),
        anyio.create_task_group() as tasks,
    ):
        calls = [
            asyncio.ensure_future(decoder.datadist.link_clusters([at(1, each)], 60_000)) for each in (place, another)
        ]
        await came.wait()
        await came_too.wait()
        calls[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[1]
        assert decoder.datadist._running().links.count == 1, "nothing is left of it"
        again = await decoder.datadist.link_clusters([at(1, place)], 60_000)
        assert again.status is LLMStatusCode.LLM_PROCESSING_LINK, "the other attempt continues"
        tasks.start_soon(decoder.datadist.link_clusters, [cluster_info(prompt)], 20_000)
        assert (await calls[0]).status is LLMStatusCode.LLM_ALREADY_LINK
