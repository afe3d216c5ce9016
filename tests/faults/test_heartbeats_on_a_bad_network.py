"""A network that holds back the heartbeats of a link and carries its messages: a peer that talks is alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.abc
import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMRole, LLMStatusCode
from aiodatadist.testing import Cluster, open_cluster
from tests.faults.test_liveness import PATIENT, gone

DESC = CacheDesc(1, [4, 4096], DataType.DT_UINT8)


class Forwarder:
    """Passes connections on to an address; the second of each link carries its heartbeats, and may be held back.

    Attributes:
        passes: set while heartbeats pass.
    """

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.passes = anyio.Event()
        self.passes.set()
        self._upstream = upstream
        self._number = 0

    def hold_heartbeats(self) -> None:
        self.passes = anyio.Event()

    @asynccontextmanager
    async def info(self, cluster_id: int) -> AsyncIterator[LLMClusterInfo]:
        """Yield the address of the cluster behind the forwarder."""
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as group,
        ):
            group.start_soon(listener.serve, self._pass)
            info = LLMClusterInfo(cluster_id)
            info.append_remote_ip_info("127.0.0.1", listener.extra(anyio.abc.SocketAttribute.local_port))
            yield info
            group.cancel_scope.cancel()

    async def _pass(self, client: anyio.abc.SocketStream) -> None:
        self._number += 1
        is_heartbeats = self._number == 2
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with client, await anyio.connect_tcp(*self._upstream) as server, anyio.create_task_group() as group:
                group.start_soon(self._flow, client, server, is_heartbeats)
                await self._flow(server, client, is_heartbeats)
                group.cancel_scope.cancel()

    async def _flow(self, source: anyio.abc.SocketStream, sink: anyio.abc.SocketStream, is_heartbeats: bool) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for data in source:
                if is_heartbeats:
                    await self.passes.wait()
                await sink.send(data)


@asynccontextmanager
async def linked(number: int, **options: Any) -> AsyncIterator[tuple[Cluster, Cluster, Forwarder]]:
    """Link an owner and a puller through a forwarder."""
    async with (
        open_cluster(number, device_id=1, **options) as owner,
        open_cluster(number + 1, LLMRole.MIX, device_id=2, **options) as puller,
    ):
        address = owner.datadist.listen_address
        assert address is not None
        forwarder = Forwarder(address)
        async with forwarder.info(number) as info:
            status, each = await puller.datadist.link_clusters([info], 10_000)
            assert status is LLMStatusCode.LLM_SUCCESS, each
            yield owner, puller, forwarder
            await puller.datadist.unlink_clusters([info])


async def silence_ends(owner: Cluster, puller: Cluster) -> None:
    """Wait until both ends have lost the link. The end that notices first closes the other one's connection."""
    ends = ((puller, owner.datadist.cluster_id), (owner, puller.datadist.cluster_id))
    reasons = await asyncio.gather(*(gone(cluster, peer) for cluster, peer in ends))
    assert any("no heartbeat" in reason for reason in reasons), reasons


async def test_a_peer_whose_messages_come_is_alive_although_its_heartbeats_do_not() -> None:
    async with (
        linked(1, **PATIENT, enable_remote_cache_accessible=False) as (owner, puller, forwarder),
        linked(3, **PATIENT) as (idle_owner, idle, canary),
        linked(5, **PATIENT) as (later_owner, idle_later, canary_later),
    ):
        await owner.blocks(DESC)
        cache = await puller.blocks(DESC)

        async def talk() -> None:
            while True:
                await puller.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])
                await asyncio.sleep(0.01)

        async with anyio.create_task_group() as group:
            group.start_soon(talk)
            forwarder.hold_heartbeats()
            for other, its_owner, held in ((idle, idle_owner, canary), (idle_later, later_owner, canary_later)):
                held.hold_heartbeats()
                await silence_ends(its_owner, other)
            assert [link.cluster_id for link in owner.datadist.statistics().links] == [2]
            group.cancel_scope.cancel()
        await silence_ends(owner, puller)


@pytest.mark.parametrize(("interval", "is_told"), [(0.499, True), (0.5, False)])
async def test_an_interval_that_does_not_survive_lost_packets_is_told_at_init(
    interval: float, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_cluster(1, heartbeat_interval=interval):
        pass
    told = [text for text in caplog.messages if "heartbeat_interval is 0.499 s: below 0.5 s" in text]
    assert len(told) == is_told
