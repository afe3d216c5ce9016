"""Does anything that is done per transfer grow with the number of links, or of caches and keys?

Links: three clusters of this process have 1, 64 and 512 links, to clusters in other processes. Keys: three peers hold 10,
10 000 and 100 000 keys, in caches of ten slots. The operations below are done on each of the three in turn, so that all
of them see the same machine, and the medians are compared with those of the first. Bar: within 10 %.

Time is that of one operation, awaited, with two tensors of 64 bytes. `pull` names a cache that is known already; `pull, new
key` one that the peer has to be asked for; `push` writes; `allocate` takes a cache with one key from the pool and gives it
back.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, cast

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMClusterInfo
from aiodatadist.testing import Cluster, cluster_info, open_cluster
from benchmarks.common import Spread, arguments, in_turns, now, report_all, seconds_of
from benchmarks.peers import Peer, clusters, info_of, link_to

SMALL = CacheDesc(2, [10, 64], DataType.DT_UINT8)
POOL = '{"memory_size": 268435456, "page_shift": 10}'
LINKS = (1, 64, 512)
KEYS = (10, 10_000, 100_000)
PROCESSES = 8
BEATS: dict[str, Any] = {"heartbeat_interval": 5.0}

Operation = Callable[[], Awaitable[object]]


async def compare(operations: list[Operation], rounds: int, batch: int) -> list[Spread]:
    """Return the seconds of one operation of each kind, taken in turns: the spread of the rounds' medians."""

    async def median(operation: Operation) -> float:
        return statistics.median((await seconds_of(operation, batch))[batch // 5 :])

    gc.collect()
    gc.disable()
    try:
        found = await in_turns({str(i): partial(median, each) for i, each in enumerate(operations)}, rounds)
    finally:
        gc.enable()
    return [Spread.of(values) for values in found.values()]


def row(what: str, labels: tuple[int, ...], seconds: list[Spread]) -> dict[str, Any]:
    line: dict[str, Any] = {"operation": what}
    for label, each in zip(labels, seconds, strict=True):
        line[f"{label}: us"] = each.times(1e6)
    for label, each in zip(labels[1:], seconds[1:], strict=True):
        line[f"{label} of {labels[0]}"] = each.median / seconds[0].median
    return line


# ---- links ----


def pull_of(hub: Cluster, cache: Cache, peers: list[int]) -> Operation:
    """Pull one block from peer after peer."""
    pull, turn = hub.datadist.cache_manager.pull_blocks, itertools.cycle([BlocksCacheKey(peer) for peer in peers])

    async def operation() -> None:
        await pull(next(turn), cache, [3], [5])

    return operation


def push_of(hub: Cluster, cache: Cache, peers: list[int]) -> Operation:
    push, turn = hub.datadist.cache_manager.push_blocks, itertools.cycle([BlocksCacheKey(peer) for peer in peers])

    async def operation() -> None:
        await push(next(turn), cache, [3], [5])

    return operation


def allocate_of(cluster: Cluster) -> Operation:
    manager, number = cluster.datadist.cache_manager, itertools.count(1 << 40)

    async def operation() -> None:
        cache = await manager.allocate_cache(SMALL, [key := CacheKey(0, next(number))])
        await manager.deallocate_cache(cache)
        await manager.remove_cache_key(key)

    return operation


@asynccontextmanager
async def hosted(count: int) -> AsyncIterator[list[LLMClusterInfo]]:
    """Start ``count`` peers in other processes, and yield where they are."""
    share = count // PROCESSES
    ids = [range(first, first + share) for first in range(1000, 1000 + PROCESSES * share, share)]
    peers = [Peer(clusters, each, SMALL, BEATS) for each in ids]
    try:
        yield [
            info_of(cluster_id, address)
            for peer, each in zip(peers, ids, strict=True)
            for cluster_id, address in zip(each, await peer.message(), strict=True)
        ]
    finally:
        for peer in peers:
            await peer.kill()


async def measure_links(rounds: int, batch: int) -> list[dict[str, Any]]:
    rows = []
    async with AsyncExitStack() as stack:
        infos = await stack.enter_async_context(hosted(max(LINKS)))
        hubs = []
        for device, count in enumerate(LINKS):
            options: dict[str, Any] = {"device_id": device, "mem_pool_cfg": POOL, **BEATS}
            hub = await stack.enter_async_context(open_cluster(1 + device, **options))
            cache = await hub.blocks(SMALL)
            started = time.perf_counter()
            await link_to(hub.datadist, *infos[:count])
            print(f"{count} links made in {time.perf_counter() - started:.2f} s", flush=True)
            hubs.append((hub, cache, [info.remote_cluster_id or 0 for info in infos[:count]]))
        one = [(hub, cache, peers[:1]) for hub, cache, peers in hubs]
        for what, operations in (
            ("pull, one peer", [pull_of(*hub) for hub in one]),
            ("push, one peer", [push_of(*hub) for hub in one]),
            ("allocate and back", [allocate_of(hub) for hub, _, _ in hubs]),
        ):
            rows.append(row(what, LINKS, await compare(operations, rounds, batch)))
    return rows


async def seconds_to_link(count: int) -> float:
    """Return the seconds in which ``count`` links are made at once."""
    async with hosted(count) as infos, open_cluster(1, **BEATS) as hub:
        await hub.blocks(SMALL)
        started = now()
        await link_to(hub.datadist, *infos)
        return now() - started


@asynccontextmanager
async def echo() -> AsyncIterator[Operation]:
    """Yield an operation that sends a question's bytes over TCP to a server in this event loop and back."""
    loop, words = asyncio.get_running_loop(), b"x" * 300
    server = await loop.create_server(_Echo, "127.0.0.1", 0)
    transport, client = await loop.create_connection(_Client, *server.sockets[0].getsockname()[:2])

    async def operation() -> None:
        client.answered = loop.create_future()
        transport.write(words)
        await client.answered

    async with server:
        try:
            yield operation
        finally:
            transport.close()  # whose end the server waits for


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class _Client(asyncio.Protocol):
    answered: asyncio.Future[bytes]

    def data_received(self, data: bytes) -> None:
        self.answered.set_result(data)


async def seconds_of_first_pull(rounds: int, batch: int) -> list[Spread]:
    """Measure a pull whose key the peer must be asked for, one whose answer is known, and an echo over TCP.

    Both clusters are in this process.
    """
    async with open_cluster(1, mem_pool_cfg=POOL) as hub, open_cluster(2, device_id=1, mem_pool_cfg=POOL) as peer:
        cache = await hub.contiguous(SMALL)
        await hub.datadist.link_clusters([cluster_info(peer)])
        known = CacheKey(peer.datadist.cluster_id, 1)
        await peer.datadist.cache_manager.allocate_cache(CacheDesc(2, [1, 64], DataType.DT_UINT8), [known])
        first, again = forget_and_pull_of(hub, peer, cache), pull_key_of(hub, cache, [known])
        await first()
        async with echo() as words:
            return await compare([first, again, words], rounds, batch)


# ---- keys ----


def pull_key_of(hub: Cluster, cache: Cache, keys: list[CacheKey | CacheKeyByIdAndIndex]) -> Operation:
    pull, turn = hub.datadist.cache_manager.pull_cache, itertools.cycle(keys)

    async def operation() -> None:
        await pull(next(turn), cache, 3)

    return operation


def forget_and_pull_of(hub: Cluster, peer: Cluster, cache: Cache) -> Operation:
    """Pull by a key that was never asked for; make it first, which is not what is measured: see ``allocate``."""
    pull, turn = hub.datadist.cache_manager.pull_cache, itertools.count()
    keys = [CacheKey(peer.datadist.cluster_id, 1 << 41 | i) for i in range(20_000)]
    made = False

    async def operation() -> None:
        nonlocal made
        if not made:
            made = True
            for key in keys:
                await peer.datadist.cache_manager.allocate_cache(CacheDesc(2, [1, 64], DataType.DT_UINT8), [key])
        await pull(keys[next(turn)], cache, 3)

    return operation


async def measure_keys(rounds: int, batch: int) -> list[dict[str, Any]]:
    rows = []
    async with AsyncExitStack() as stack:
        options: dict[str, Any] = {"mem_pool_cfg": POOL}
        hub = await stack.enter_async_context(open_cluster(1, **options))
        cache = await hub.contiguous(SMALL)
        peers = []
        for device, count in enumerate(KEYS, 1):
            peer = await stack.enter_async_context(open_cluster(1 + device, device_id=device, **options))
            manager = peer.datadist.cache_manager
            for first in range(0, count, 10):
                await manager.allocate_cache(SMALL, [CacheKey(0, i) for i in range(first, first + 10)])
            peers.append(peer)
        await hub.datadist.link_clusters([cluster_info(peer) for peer in peers])
        ids = [peer.datadist.cluster_id for peer in peers]
        samples = [random.Random(0).sample(range(count), 10) for count in KEYS]
        known = [[CacheKey(i, n) for n in numbers] for i, numbers in zip(ids, samples, strict=True)]
        for what, operations in (
            ("pull, known key", [pull_key_of(hub, cache, list(keys)) for keys in known]),
            ("pull, new key", [forget_and_pull_of(hub, peer, cache) for peer in peers]),
            ("allocate and back", [allocate_of(peer) for peer in peers]),
        ):
            for operation in operations:
                await operation()
            rows.append(row(what, KEYS, await compare(operations, rounds, batch)))
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("what", choices=["links", "keys"], nargs="?", help="both, if omitted")
    args = parser.parse_args()
    os.environ.setdefault("AIODATADIST_RUNTIME", "soft")
    tables = {
        f"scale: one operation by the number of {what}": asyncio.run(measure(args.rounds, args.batch))
        for what, measure in (("links", measure_links), ("keys", measure_keys))
        if args.what in {None, what}
    }
    report_all(tables, args.json)


if __name__ == "__main__":
    main()
