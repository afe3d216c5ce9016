"""Rows of peers and links."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.to_thread

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheNotFound,
    DataType,
    LeaseTicket,
    LinkChanges,
    LinkPhase,
    LLMClusterInfo,
    LLMException,
    LLMStatusCode,
)
from aiodatadist._cli.chaos.faults import Hog, spin
from aiodatadist._testing.ports import free_port
from aiodatadist._wire.frames import HEAD, MAGIC, VERSION
from aiodatadist.testing import (
    Bandwidth,
    ChaosProxy,
    Cluster,
    Latency,
    Slicer,
    cluster_info,
    linked_pair,
    open_cluster,
    soft_fault,
    soft_faults_cleared,
    verify,
)
from benchmarks.common import now
from benchmarks.peers import clusters, info_of, process_of
from benchmarks.reliability_rows import KIB, Figure, Seconds, descriptors, figure, resident, threads, usual, worst

DESC = CacheDesc(4, [64, 16 << 10], DataType.DT_UINT8)
BLOCKS = list(range(64))
ONE, EVERY, DELAY = [3], 0.1, 0.5
HEARTBEAT, MISSES = 0.1, 3
LOST = (MISSES + 1) * HEARTBEAT
BEATS: dict[str, Any] = {"heartbeat_interval": HEARTBEAT, "heartbeat_misses": MISSES}


@asynccontextmanager
async def peer_process() -> AsyncIterator[tuple[int, LLMClusterInfo]]:
    """Start a peer, cluster 1, in its own process. Yield its pid and its address."""
    async with process_of(clusters, [1], DESC, BEATS) as (pid, (address,)):
        yield pid, info_of(1, address)


async def link(cluster: Cluster, info: LLMClusterInfo) -> LLMStatusCode:
    linked = await cluster.datadist.link_clusters([info], 10_000)
    return linked[1][0]


async def stopped(short: bool) -> Figure:
    """Measure row R2."""
    seconds: list[float] = []
    for _ in range(2 if short else 10):
        async with peer_process() as (pid, info), open_cluster(2, device_id=1, **BEATS) as cluster:
            await link(cluster, info)
            await anyio.sleep(EVERY)
            began = now()
            os.kill(pid, signal.SIGSTOP)
            await cluster.datadist.wait_link_closed(1)
            seconds.append(now() - began)
    return figure(
        "R2",
        f"{LOST * 1e3 + 100:.0f} ms",
        max(seconds) <= LOST + 0.1,
        f"{1e3 * HEARTBEAT:.0f}",
        MISSES,
        usual(seconds),
        worst(seconds),
    )


async def slow(short: bool) -> Figure:
    """Measure row R3."""
    rounds, calls = (2, 20) if short else (8, 200)
    shares: list[float] = []
    async with AsyncExitStack() as stack:
        proxy, puller = await _between(stack, one_sided=False)
        near = await stack.enter_async_context(open_cluster(1, device_id=2, **_options(False)))
        await near.blocks(DESC)
        cache, other = await puller.blocks(DESC), await puller.blocks(DESC, 1)
        await link(puller, cluster_info(near))

        async def rate() -> float:
            began = now()
            for _ in range(calls):
                await puller.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, BLOCKS, BLOCKS)
            return calls / (now() - began)

        async def drip() -> None:
            while True:
                await puller.datadist.cache_manager.pull_blocks(BlocksCacheKey(3), other, BLOCKS, BLOCKS)

        await rate()
        for _ in range(rounds):
            alone = await rate()
            with proxy.under(Slicer(4, 3), Latency(0.02, 0.02), Bandwidth(64_000)):
                async with anyio.create_task_group() as group:
                    group.start_soon(drip)
                    shares.append(await rate() / alone)
                    group.cancel_scope.cancel()
    share = sorted(shares)[len(shares) // 2]
    one_sided, asked = await late_deadlines(True, rounds), await late_deadlines(False, rounds)
    return figure(
        "R3",
        "50 ms, a round trip, 90 %",
        max(one_sided) <= 0.05 and max(asked) <= 2 * DELAY + 0.05 and share >= 0.9,
        200,
        f"{DELAY * 1e3:.0f}",
        usual(one_sided),
        worst(one_sided),
        usual(asked),
        f"{100 * share:.0f}",
    )


def _options(one_sided: bool) -> dict[str, Any]:
    return {"enable_remote_cache_accessible": one_sided, "sync_kv_timeout": 60_000}


async def _between(stack: AsyncExitStack, one_sided: bool) -> tuple[ChaosProxy, Cluster]:
    """Link cluster 2 to cluster 3 through a proxy. Return the proxy and cluster 2."""
    enter = stack.enter_async_context
    far = await enter(open_cluster(3, **_options(one_sided)))
    puller = await enter(open_cluster(2, device_id=1, **_options(one_sided)))
    assert far.datadist.listen_address is not None
    proxy = await enter(ChaosProxy(far.datadist.listen_address))
    await far.blocks(DESC)
    info = LLMClusterInfo(3)
    info.append_remote_ip_info(*proxy.address)
    await link(puller, info)
    return proxy, puller


async def late_deadlines(one_sided: bool, rounds: int) -> list[float]:
    """Return the seconds from the deadline of pulls to their end, if each message takes a while."""
    seconds: list[float] = []
    async with AsyncExitStack() as stack:
        proxy, puller = await _between(stack, one_sided)
        cache = await puller.blocks(DESC)
        with proxy.under(Latency(DELAY)):
            for number in range(rounds):  # of a key that this end has not heard of, which it asks for
                key, began = BlocksCacheKey(3, 1 + number if one_sided else 0), now()
                with suppress(LLMException):
                    await puller.datadist.cache_manager.pull_blocks(key, cache, ONE, ONE, deadline=0.2)
                seconds.append(now() - began - 0.2)
    return seconds


async def answered(address: tuple[str, int], data: bytes) -> float:
    """Send this as a client and return the seconds until it is disconnected."""
    async with await anyio.connect_tcp(*address) as stream:
        began = now()
        await stream.send(data)
        try:
            async for _ in stream:
                pass
        except anyio.BrokenResourceError:
            return now() - began
        return now() - began


async def broken(short: bool) -> Figure:
    """Measure row R4."""
    rounds, hosts, each = (2, 1, 4) if short else (20, 4, 5)
    count, half, whole = hosts * each, list[float](), list[float]()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        proxies: list[ChaosProxy] = []
        cluster = await enter(open_cluster(99, device_id=1, relink="{}"))
        cache, changes = await cluster.blocks(DESC), cluster.datadist.link_changes()
        for first in range(1, count, each):
            ids = range(first, first + each)
            _, addresses = await enter(process_of(clusters, ids, DESC, {}))
            for cluster_id, address in zip(ids, addresses, strict=True):
                proxies.append(await enter(ChaosProxy(address)))
                assert await link(cluster, info_of(cluster_id, proxies[-1].address)) is LLMStatusCode.LLM_SUCCESS
        await linked_at(changes, count)
        for _ in range(rounds):
            await _pull_of_each(cluster, cache, count)
            began = now()
            for proxy in proxies:
                proxy.reset()
            times = await linked_at(changes, count)
            half.append(times[(count - 1) // 2] - began)
            whole.append(times[-1] - began)
        await _pull_of_each(cluster, cache, count)
        generations = {each.generation for each in cluster.datadist.statistics().links}
        figures = cluster.datadist.figures()
    return figure(
        "R4",
        "1 s, each once",
        max(whole) <= 1
        and generations == {rounds + 1}
        and sum(figures.links_ended.values()) == count * rounds == figures.relinking.succeeded,
        count,
        rounds,
        usual(half),
        usual(whole),
        worst(whole),
    )


async def _pull_of_each(cluster: Cluster, cache: Cache, count: int) -> None:
    for cluster_id in range(1, count + 1):
        await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(cluster_id), cache, ONE, ONE)
        verify(cluster.memory(cache), cache, [(t, ONE[0], cluster_id, ONE[0]) for t in range(DESC.num_tensors)])


async def linked_at(changes: LinkChanges, count: int) -> list[float]:
    """Return the times at which ``count`` links became ready, in that order."""
    times: list[float] = []
    async for change in changes:
        if change.state is LinkPhase.LINKED:
            times.append(now())
            if len(times) == count:
                break
    return times


@asynccontextmanager
async def again(number: int, listen: int, one_sided: bool) -> AsyncIterator[object]:
    """Serve cluster 1 at this port: a cache under this number, one under the key of all of them, and a lease of blocks."""
    async with open_cluster(1, **_options(one_sided), listen_ip_info=f"127.0.0.1:{listen}") as peer:
        listens = now()  # which other processes read from the same clock
        caches = [await peer.blocks(DESC, model_id) for model_id in (number, 0)]
        view = peer.memory(caches[1]).view()
        view[:] = bytes([number]) * len(view)
        lease = peer.datadist.cache_manager.lease_blocks(caches[1], ONE, 600)
        yield listens, lease.ticket()


async def started_again(short: bool) -> Figure:
    """Measure row R16."""
    rounds = 1 if short else 10
    seconds: list[float] = []
    right = refused = 0
    for one_sided in (True, False):
        async with open_cluster(2, device_id=1, relink="{}", **_options(one_sided)) as cluster:
            found = await _restarts(cluster, one_sided, rounds)
        seconds += found[0]
        right, refused = right + found[1], refused + found[2]
    return figure(
        "R16",
        "1 s, all pulls, all refused",
        max(seconds) <= 1 and right == 2 * rounds and refused == 4 * rounds,
        rounds,
        usual(seconds),
        worst(seconds),
        right,
        2 * rounds,
        refused,
        4 * rounds,
    )


async def _restarts(cluster: Cluster, one_sided: bool, rounds: int) -> tuple[list[float], int, int]:
    """Restart peers. Return the seconds from listening to the link, the good pulls, and the refused uses of old names."""
    seconds: list[float] = []
    right = refused = 0
    datadist, cache, port = cluster.datadist, await cluster.blocks(DESC), free_port()
    changes, ticket = datadist.link_changes(), None
    for number in range(1, rounds + 2):
        linked = asyncio.ensure_future(linked_at(changes, 1))
        async with process_of(again, number, port, one_sided) as (pid, (listens, fresh)):
            if ticket is None:
                assert await link(cluster, info_of(1, ("127.0.0.1", port))) is LLMStatusCode.LLM_SUCCESS
            (at,) = await linked
            assert [each.generation for each in datadist.statistics().links] == [number], "it was linked more than once"
            if ticket is not None:
                seconds.append(max(at - listens, 0.0))
                right += await _holds(cluster, cache, number)
                refused += await _refuses(cluster, cache, number - 1, ticket)
            await datadist.cache_manager.pull_blocks(BlocksCacheKey(1, number), cache, ONE, ONE)
            ticket = fresh
            os.kill(pid, signal.SIGKILL)
            await datadist.wait_link_closed(1)
    return seconds, right, refused


async def _holds(cluster: Cluster, cache: Cache, number: int) -> bool:
    """Return True if a pull brings what the peer holds now."""
    await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, ONE, ONE)
    memory, stride = cluster.memory(cache), DESC.stride
    view = memory.view()
    starts = [address - memory.address + ONE[0] * stride for address in cache.tensor_addrs]
    return all(bytes(view[at : at + stride]) == bytes([number]) * stride for at in starts)


async def _refuses(cluster: Cluster, cache: Cache, number: int, ticket: LeaseTicket) -> int:
    """Count the pulls that fail because the peer's predecessor is gone: one by its key, one by its lease."""
    manager, count = cluster.datadist.cache_manager, 0
    calls: tuple[Callable[[], Awaitable[object]], ...] = (
        lambda: manager.pull_blocks(BlocksCacheKey(1, number), cache, ONE, ONE),
        lambda: manager.pull_leased(ticket, cache, ONE),
    )
    for call in calls:
        try:
            await call()
        except CacheNotFound:
            count += 1
    return count


async def other_version(short: bool) -> Figure:
    """Measure row R17."""
    body = json.dumps({"type": "hello", "protocol": 10_000, "minor": 3, "cluster_id": 9}).encode()
    hello = HEAD.pack(MAGIC, VERSION, len(body)) + body
    async with open_cluster(1) as cluster:
        address = cluster.datadist.listen_address
        assert address is not None
        seconds = [await answered(address, hello) for _ in range(5 if short else 200)]
    return figure("R17", "100 ms", max(seconds) <= 0.1, usual(seconds), worst(seconds), len(seconds))


async def strangers(short: bool) -> Figure:
    """Measure row R19."""
    count = 20 if short else 200
    async with open_cluster(1, auth_key=b"right") as cluster, open_cluster(2, device_id=1, auth_key=b"wrong") as other:
        info, seconds = cluster_info(cluster), []
        for _ in range(3 if short else 30):
            began = now()
            assert await link(other, info) is not LLMStatusCode.LLM_SUCCESS
            seconds.append(now() - began)
        address = cluster.datadist.listen_address
        assert address is not None
        before, began = resident(), now()
        silent = [await anyio.connect_tcp(*address) for _ in range(count)]
        async with open_cluster(3, device_id=2, auth_key=b"right") as friend:
            asked = now()
            assert await link(friend, info) is LLMStatusCode.LLM_SUCCESS
            linked = now() - asked
        each = max(0, resident() - before) / count / KIB
        for stream in silent:
            async with stream:
                with anyio.move_on_after(10) as limit:
                    async for _ in stream:
                        pass
                assert not limit.cancelled_caught, "a silent client stays"
        gone = now() - began
    return figure(
        "R19",
        "100 ms, 1 s, 64 KiB, 6 s",
        max(seconds) <= 0.1 and linked <= 1 and each <= 64 and gone <= 6,
        usual(seconds),
        worst(seconds),
        count,
        Seconds(linked),
        f"{each:.0f}",
        f"{gone:.1f}",
    )


async def busy(short: bool) -> Figure:
    """Measure row R22."""
    seconds, hog = (1.0 if short else 6.0), Hog()
    async with peer_process() as (_, info), open_cluster(2, device_id=1, **BEATS) as cluster:
        cache = await cluster.blocks(DESC)
        await link(cluster, info)
        spin(seconds)
        await cluster.datadist.check_link_status(1)
        hog.start()
        end = now() + seconds
        pulls = 0
        while now() < end:
            await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, ONE, ONE)
            pulls += 1
        hog.over.set()
        hog.join()
        await cluster.datadist.check_link_status(1)
        ended = sum(cluster.datadist.figures().links_ended.values())
    return figure("R22", "0 lost", ended == 0 and pulls > 0, f"{seconds:.0f}", f"{1e3 * HEARTBEAT:.0f}", ended, pulls)


async def parting(short: bool) -> Figure:
    """Measure row R26."""
    pulls, notes = (20, 20) if short else (1000, 1000)
    async with linked_pair(DESC, sync_kv_timeout=60_000) as (prompt, decoder, _, cache):
        reading = asyncio.ensure_future(_heard(decoder, notes))
        for number in range(notes):
            await prompt.datadist.notify(2, str(number).encode())
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:delay=50@*")
            manager = decoder.datadist.cache_manager
            tasks = [manager.pull_blocks(BlocksCacheKey(1), cache, BLOCKS, BLOCKS) for _ in range(pulls)]
            closed = asyncio.ensure_future(_closed_at(decoder))
            began = now()
            await prompt.datadist.finalize()
            ended = now() - began
            told = await closed - began
            failed = [
                error for error in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(error, Exception)
            ]
        unknown = [error for error in failed if not isinstance(error, LLMException)]
        heard = await reading
    return figure(
        "R26",
        "5 s, all notifications",
        not unknown and heard == notes and ended <= 5,
        pulls,
        Seconds(ended),
        Seconds(told),
        heard,
        notes,
    )


async def _heard(cluster: Cluster, notes: int) -> int:
    """Count the notifications that came in the order in which they were sent."""
    heard = 0
    with anyio.move_on_after(30):
        async for note in cluster.datadist.notifications():
            heard += int(note.payload) == heard
            if heard == notes:
                break
    return heard


async def _closed_at(cluster: Cluster) -> float:
    await cluster.datadist.wait_link_closed(1)
    return now()


async def economy(short: bool) -> Figure:
    """Measure row R28."""
    count = 200 if short else 10_000
    async with linked_pair(DESC) as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager
        for _ in range(20):
            await manager.pull_blocks(BlocksCacheKey(1), cache, BLOCKS, BLOCKS)
        before = descriptors(), threads()
        for _ in range(count):
            await manager.pull_blocks(BlocksCacheKey(1), cache, BLOCKS, BLOCKS)
        files, more = (after - first for after, first in zip((descriptors(), threads()), before, strict=True))
    return figure("R28", "0 more", files <= 0 and more <= 0, count, files, more)


async def clock(short: bool) -> Figure:
    """Measure row R24."""
    count, late, real = (10 if short else 100), list[float](), time.time
    async with linked_pair(DESC, heartbeat_interval=HEARTBEAT) as (prompt, decoder, source, cache):
        manager = decoder.datadist.cache_manager
        try:
            for number in range(count):
                jump = 3600.0 if number % 2 else -3600.0
                time.time = lambda jump=jump: real() + jump  # type: ignore[misc]
                await manager.pull_blocks(BlocksCacheKey(1), cache, BLOCKS, BLOCKS)
                began, lease = now(), prompt.datadist.cache_manager.lease_blocks(source, ONE, 0.02)
                await lease.wait_ended()
                late.append(now() - began - 0.02)
        finally:
            time.time = real
        with anyio.move_on_after(0):
            await decoder.datadist.wait_link_closed(1)
        ended = sum(decoder.datadist.figures().links_ended.values())
    return figure("R24", "0 lost, 200 ms", ended == 0 and max(late) <= 0.2, count, ended, worst(late))


Measure = Callable[[bool], Awaitable[Figure]]
MEASURES: dict[str, Measure] = {
    "R2": stopped, "R3": slow, "R4": broken, "R16": started_again, "R17": other_version, "R19": strangers, "R22": busy,
    "R26": parting, "R28": economy, "R24": clock,
}  # fmt: skip
