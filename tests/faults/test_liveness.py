"""Peers that stop are noticed in time, and peers that are busy are not lost.

Run as a program this is a peer: a cluster in a process of its own that does what it is told through its standard input.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMException,
    LLMRole,
    LLMStatusCode,
    NotLinked,
    PeerLost,
)
from aiodatadist.testing import Cluster, SoftHold, inside, open_cluster, soft_fault, soft_faults_cleared, stamp, verify
from tests import children
from tests.stopwatch import lasting

DESC = CacheDesc(2, [16, 1 << 20], DataType.DT_UINT8)  # 32 MiB: several windows
BLOCKS = list(range(16))
POOL = '{"memory_size": 67108864}'
BRISK: dict[str, Any] = {"heartbeat_interval": 0.1, "heartbeat_misses": 3}
PATIENT: dict[str, Any] = {"heartbeat_interval": 0.1, "heartbeat_misses": 9}
"""Of tests in which a process that gets no core for half a second must not look dead."""
DETECTED = 0.5 + 0.3
"""Seconds after which a stopped peer is lost: interval x (misses + 1), and slack for a busy machine."""


class Puppet:
    """A peer in a process of its own, from the test's end."""

    def __init__(self, process: children.Process, info: LLMClusterInfo) -> None:
        self._process = process
        self.info = info
        self.pid = process.pid

    async def ask(self, verb: str, *args: Any) -> Any:
        """Have the puppet do something, and return the result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([verb, *args]).encode() + b"\n")
        with anyio.fail_after(20):
            return json.loads(await self._process.stdout.readline())

    async def release(self) -> Any:
        """End the call that holds its interpreter, and hear of that."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        with anyio.fail_after(20):
            return json.loads(await self._process.stdout.readline())

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


@asynccontextmanager
async def puppet(cluster_id: int = 1, **options: Any) -> AsyncIterator[Puppet]:
    """Start a puppet, which is alive until the end unless the test says otherwise."""
    process = await children.create_subprocess_exec(
        sys.executable, "-m", "tests.faults.test_liveness", str(cluster_id), json.dumps(options),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        info = LLMClusterInfo(cluster_id)
        info.append_remote_ip_info("127.0.0.1", int(await process.stdout.readline()))
        yield Puppet(process, info)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def linked_to(*peers: Puppet, **options: Any) -> AsyncIterator[tuple[Cluster, Cache]]:
    """Open a cluster of this process, linked to all the peers."""
    async with open_cluster(2, device_id=7, **{"sync_kv_timeout": 30_000, **options}) as cluster:
        cache = await cluster.blocks(DESC)
        status, each = await cluster.datadist.link_clusters([peer.info for peer in peers], 10_000)
        assert status is LLMStatusCode.LLM_SUCCESS, each
        yield cluster, cache


async def gone(cluster: Cluster, cluster_id: int = 1) -> str:
    """Wait until there is no link to the cluster, and return the reason."""
    try:
        return await cluster.datadist.wait_link_closed(cluster_id)
    except NotLinked:
        return "gone already"


# ---- stopped ----


async def test_a_stopped_peer_is_noticed_on_an_idle_link() -> None:
    async with puppet(**BRISK) as peer, linked_to(peer, **BRISK) as (cluster, cache):
        peer.send(signal.SIGSTOP)
        with lasting(DETECTED):
            assert "no heartbeat" in await gone(cluster)
        assert cluster.datadist.figures().links_ended == {"heartbeats_missed": 1}
        with pytest.raises((PeerLost, NotLinked)):
            await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])


async def test_a_client_that_stops_as_soon_as_it_is_linked_is_noticed() -> None:
    async with puppet(**BRISK) as peer, open_cluster(2, LLMRole.MIX, device_id=7, **BRISK) as cluster:
        linking = asyncio.create_task(peer.ask("link", 2, cluster.datadist.listen_address))
        await cluster.datadist.wait_linked(1)
        peer.send(signal.SIGSTOP)
        with lasting(DETECTED):
            assert "no heartbeat" in await gone(cluster)
        peer.send(signal.SIGCONT)
        await linking


@pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "request"])
async def test_a_stopped_peer_is_noticed_while_blocks_move(one_sided: bool) -> None:
    options = {**BRISK, "enable_remote_cache_accessible": one_sided}
    async with puppet(**options) as peer, linked_to(peer, **options) as (cluster, cache):
        pull = cluster.datadist.cache_manager.pull_blocks
        with soft_faults_cleared():
            if one_sided:
                await pull(BlocksCacheKey(1), cache, [0], [0])  # knows the way: the next one starts at once
                soft_fault("HcclBatchGet:hang")
            else:
                await peer.ask("fault", "HcclBatchPut:hang")
            task = pull(BlocksCacheKey(1), cache, BLOCKS, BLOCKS)
            peer.send(signal.SIGSTOP)
            with lasting(DETECTED), pytest.raises(PeerLost) as caught:
                await task
        assert caught.value.peer == 1
        await gone(cluster)
        entry = inside(cluster.datadist).registry.table.find(cache.cache_id)
        assert entry is not None
        assert (entry.leases, entry.holders) == (0, set())


async def test_a_cancelled_pull_that_the_peer_did_not_answer_does_not_keep_its_death_from_others() -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": False, "heartbeat_interval": 60.0}
    async with puppet(**options) as peer, linked_to(peer, **options) as (cluster, cache):
        manager = cluster.datadist.cache_manager
        await manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        peer.send(signal.SIGSTOP)
        waiter = asyncio.create_task(gone(cluster))
        others = [manager.pull_blocks(BlocksCacheKey(1), cache, [n], [n]) for n in range(1, 3)]
        await anyio.wait_all_tasks_blocked()
        others[0].cancel()
        await anyio.wait_all_tasks_blocked()
        with lasting(1):  # 5 s are what the peer has for answering that it stopped
            peer.send(signal.SIGKILL)
            await waiter
            with pytest.raises(PeerLost):
                await others[1]
            with pytest.raises(PeerLost):
                await others[0]


async def test_a_cancelled_pull_that_the_peer_did_not_answer_does_not_hold_up_finalize() -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": False, "heartbeat_interval": 60.0}
    async with puppet(**options) as peer, linked_to(peer, **options) as (cluster, cache):
        manager = cluster.datadist.cache_manager
        peer.send(signal.SIGSTOP)
        task = manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        await anyio.wait_all_tasks_blocked()
        task.cancel()
        await anyio.wait_all_tasks_blocked()
        with lasting(3):  # links that are parted from have a second
            await cluster.datadist.finalize()


# ---- busy ----


async def test_a_busy_loop_does_not_look_dead() -> None:
    async with puppet(**PATIENT) as peer, linked_to(peer, **PATIENT) as (cluster, cache):
        hers = asyncio.create_task(peer.ask("keep_loop", 1300))  # longer than silence may be
        await anyio.wait_all_tasks_blocked()  # she was asked
        keep_loop(1300)
        await hers
        await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])
        verify(cluster.memory(cache), cache, [(t, 2, 1, 1) for t in range(2)])
        assert await peer.ask("links") == [2]


async def test_a_loop_that_is_busy_right_after_linking_does_not_look_dead() -> None:
    async with puppet(**PATIENT) as peer, linked_to(peer, **PATIENT) as (cluster, cache):
        await peer.ask("keep_loop", 1300)
        await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])


async def test_a_process_without_its_interpreter_does_not_look_dead() -> None:
    """A call into C keeps the lock for as long as a stopped peer needs to be lost, and then as long again."""
    async with (
        puppet(1, **PATIENT) as held,
        puppet(3, **PATIENT) as stopped,
        puppet(4, **PATIENT) as stopped_later,
        linked_to(held, stopped, stopped_later, **PATIENT) as (cluster, cache),
    ):
        pull = cluster.datadist.cache_manager.pull_blocks
        await pull(BlocksCacheKey(1), cache, [0], [0])  # knows the way: the others need no word of the peer's
        assert await held.ask("hold") == "holding"
        for canary, cluster_id in ((stopped, 3), (stopped_later, 4)):
            canary.send(signal.SIGSTOP)
            assert "no heartbeat" in await gone(cluster, cluster_id)
            await pull(BlocksCacheKey(1), cache, [cluster_id], [1])
            verify(cluster.memory(cache), cache, [(t, 1, 1, cluster_id) for t in range(2)])
        assert await held.release() == "released"
        assert await held.ask("links") == [2]
        await pull(BlocksCacheKey(1), cache, [2], [3])
        assert [link.cluster_id for link in cluster.datadist.statistics().links] == [1]


def keep_loop(milliseconds: int) -> None:
    """Keep the loop, as a long computation does, but not the processor."""
    threading.Event().wait(milliseconds / 1000)


# ---- orderly ----


async def test_who_unlinks_in_good_order_is_never_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aiodatadist")
    async with puppet(**PATIENT) as peer, linked_to(peer, **PATIENT) as (cluster, cache):
        address = cluster.datadist.listen_address
        for round_ in range(6):
            closed = asyncio.create_task(gone(cluster))
            await anyio.wait_all_tasks_blocked()
            if round_ % 2:
                assert await peer.ask("unlink", 2) == "LLM_SUCCESS"
            else:
                status, _ = await cluster.datadist.unlink_clusters([peer.info])
                assert status is LLMStatusCode.LLM_SUCCESS
            assert "unlinked" in await closed
            if round_ % 2:
                assert await peer.ask("link", 2, address) == "LLM_SUCCESS"
            else:
                assert (await cluster.datadist.link_clusters([peer.info]))[0] is LLMStatusCode.LLM_SUCCESS
            await cluster.datadist.wait_linked(1)
        await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])
    said = [record.getMessage() for record in caplog.records]
    assert not [text for text in said if "heartbeat " in text or "gone" in text], said


# ---- the peer ----


class Peer:
    """A cluster, and what it can be told to do."""

    def __init__(self, cluster: Cluster, cache: Cache) -> None:
        self._cluster = cluster
        self._cache = cache
        self._pushing: asyncio.Task[None] | None = None

    async def fault(self, spec: str) -> None:
        soft_fault(spec)

    async def halt(self, function: str) -> None:
        """Return when the next call is half-way. It moves on after :meth:`resume`."""
        soft_fault(f"{function}:half=halted")
        await SoftHold("halted").arrived()

    async def resume(self) -> None:
        SoftHold("halted").release()

    async def push_for_ever(self, model_id: int) -> str | None:
        """Push until an error; return None once a push has ended, or what ended them before."""
        begun = anyio.Event()

        async def push() -> None:
            while True:
                await self._cluster.datadist.cache_manager.push_blocks(
                    BlocksCacheKey(2, model_id), self._cache, BLOCKS, BLOCKS
                )
                begun.set()

        return await self._has_begun(push(), begun)

    async def push_failed(self) -> str:
        """Return the name of the error that ended the pushes, and check that no further push can be started."""
        assert self._pushing is not None
        try:
            await self._pushing
        except LLMException as error:
            return type(error).__name__
        return "nothing"

    async def pull_for_ever(self) -> str | None:
        """Pull until an error; return None once a pull has ended, or what ended them before.

        A first pull opens a channel, which HCCL lets no end interrupt.
        """
        begun = anyio.Event()

        async def pull() -> None:
            while True:
                await self._cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(2), self._cache, BLOCKS, BLOCKS)
                begun.set()

        return await self._has_begun(pull(), begun)

    async def pull_checked(self, model_id: int, value: int) -> str | None:
        """Pull for ever; every byte has to have this value each time. Returns when it has begun, or what ended it."""
        begun = anyio.Event()
        memory = np.frombuffer(self._cluster.memory(self._cache).view(), np.uint8)

        async def pull() -> None:
            while True:
                await self._cluster.datadist.cache_manager.pull_blocks(
                    BlocksCacheKey(2, model_id), self._cache, BLOCKS, BLOCKS
                )
                begun.set()
                assert (memory == value).all(), "a pull succeeded with wrong bytes"

        return await self._has_begun(pull(), begun)

    async def _has_begun(self, moving: Coroutine[Any, Any, None], begun: anyio.Event) -> str | None:
        self._pushing = asyncio.create_task(moving)
        self._pushing.add_done_callback(lambda _: begun.set())
        await begun.wait()
        return repr(self._pushing.exception()) if self._pushing.done() else None

    async def unlinked(self, cluster_id: int) -> str:
        """Wait until that link is gone."""
        return await gone(self._cluster, cluster_id)

    async def keep_loop(self, milliseconds: int) -> None:
        keep_loop(milliseconds)

    async def hold(self) -> str:
        """Keep the interpreter's lock inside a call into C until a byte comes through the standard input."""
        print(json.dumps("holding"), flush=True)
        ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
        return "released"

    async def links(self) -> list[int]:
        return [link.cluster_id for link in self._cluster.datadist.statistics().links]

    async def link(self, cluster_id: int, address: tuple[str, int]) -> str:
        info = LLMClusterInfo(cluster_id)
        info.append_remote_ip_info(*address)
        return (await self._cluster.datadist.link_clusters([info], 10_000))[0].name

    async def unlink(self, cluster_id: int) -> str:
        info = LLMClusterInfo(cluster_id)
        return (await self._cluster.datadist.unlink_clusters([info], 10_000))[0].name

    async def meet(self, name: str, ranks: dict[str, int], table: str) -> int:
        return await self._cluster.datadist.link(name, {int(k): v for k, v in ranks.items()}, table)

    async def stamp(self) -> None:
        stamp(self._cluster.memory(self._cache), self._cache, self._cluster.datadist.cluster_id)


async def main(cluster_id: int, options: dict[str, Any]) -> None:
    async with open_cluster(
        cluster_id, **{"device_id": cluster_id % 7, "sync_kv_timeout": 30_000, **options}
    ) as cluster:
        peer = Peer(cluster, await cluster.blocks(DESC))
        address = cluster.datadist.listen_address
        print(address[1] if address else 0, flush=True)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            verb, *args = json.loads(line)
            print(json.dumps(await getattr(peer, verb)(*args)), flush=True)


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]), json.loads(sys.argv[2]))
