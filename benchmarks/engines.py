"""Measure the cost of ContextCaching's pools on top of their engines.

64 values of 1 MiB are stored in a Redis server, a Redis cluster of three and a Mooncake store of two nodes on this machine,
and read again, 8 at a time: by the pool, and in turns with it by a bare client of the same engine, with the same values,
batches and placement, in the same process. A bare client is redis-py's own client with the same number of callers, or
Mooncake's ``batch_put_from`` and ``batch_get_into`` in a thread, on memory that Mooncake knows. Every value has its own
memory, as in a KV cache: what is stored comes from memory, not from the processor's cache. The pool's time includes what
its contract requires: lending memory, proving lengths, reporting who was first. It does not include filling the memory,
which is the caller's work. `cache` is `ContextCache` over the pool, one call for all values, with everything it does:
values of 64 ranges of 16 KiB gathered from a KV cache and scattered into it, headers and checksums. `by hand` is what one
would write without it: the same ranges copied with numpy to memory of the bare client and back, without checksums. Bar of
the pool: at least 0.9 of the bare client's speed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from aiodatadist._context_caching.pools.arena import Arena
from aiodatadist._context_caching.pools.contract import GetStatus, KVPool, PoolKey, PutStatus
from aiodatadist._context_caching.pools.keys import flat, group, rendezvous
from aiodatadist._context_caching.pools.mooncake import store as mooncake_store
from aiodatadist._context_caching.pools.mooncake.pool import MooncakePool
from aiodatadist._context_caching.pools.redis.pool import RedisPool
from aiodatadist._testing.servers import MooncakeLender, MooncakeMaster, RedisServer, redis_cluster, running
from aiodatadist.context_caching import CcConfig_v1, ContextCache
from benchmarks.common import Spread, arguments, now, report

MIB = 1 << 20
VALUES = 64
BATCH = 8
TENSORS, ROWS = 64, 16
"""The tensors of a KV cache, and the tokens in a block."""
PATIENCE = 60.0
"""Seconds for a call."""


@dataclass
class Case:
    """A pool, and how to do the same without it.

    Attributes:
        memory: that the bare client stores from, for each value; what it reads is there, or in memory that it made.
        bare_put, bare_get: a batch, whose first value is so far behind the first one.
    """

    name: str
    pool: KVPool
    memory: list[memoryview]
    bare_put: Callable[[int, list[PoolKey]], Awaitable[object]]
    bare_get: Callable[[int, list[PoolKey]], Awaitable[list[Any]]]


class Together:
    """Redis without a pool: a coroutine for each value."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.memory = [memoryview(bytearray(MIB)) for _ in range(VALUES)]

    async def put(self, first: int, keys: list[PoolKey]) -> None:
        pairs = zip(keys, self.memory[first : first + len(keys)], strict=True)
        assert all(await asyncio.gather(*(self._client.set(flat(key), value, nx=True) for key, value in pairs)))

    async def get(self, first: int, keys: list[PoolKey]) -> list[bytes]:
        return list(await asyncio.gather(*(self._client.get(flat(key)) for key in keys)))


class InThread:
    """Mooncake without a pool: a call for all values of a node, and one for reading them, in a thread."""

    def __init__(self, store: Any, memory: Arena, segments: list[str]) -> None:
        self._module = mooncake_store.load()
        self._store = store
        self._segments = segments
        self._places = [memory.scratch + 4096 + i * MIB for i in range(VALUES)]
        self.memory = [memory.view(place, MIB) for place in self._places]

    async def put(self, first: int, keys: list[PoolKey]) -> None:
        by_node: dict[str | None, list[int]] = {}
        for i, key in enumerate(keys):
            by_node.setdefault(rendezvous(group(key), self._segments), []).append(i)
        for node, places in by_node.items():
            config = self._module.ReplicateConfig()
            config.preferred_segment = node
            memory = [self._places[first + i] for i in places]
            wanted = [flat(keys[i]) for i in places], memory, [MIB] * len(places), config
            assert await anyio.to_thread.run_sync(self._store.batch_put_from, *wanted) == [0] * len(places)

    async def get(self, first: int, keys: list[PoolKey]) -> list[memoryview]:
        wanted = [flat(key) for key in keys], self._places[first : first + len(keys)], [MIB] * len(keys)
        assert await anyio.to_thread.run_sync(self._store.batch_get_into, *wanted) == [MIB] * len(keys)
        return self.memory[first : first + len(keys)]


def batches(run: str) -> list[tuple[int, list[PoolKey]]]:
    """Return the batches of keys of one run, each with the number of its first key."""
    keys = [PoolKey("benchmark", f"{run} {i}", "") for i in range(VALUES)]
    return [(first, keys[first : first + BATCH]) for first in range(0, VALUES, BATCH)]


class Cache:
    """KV caches, and how long it takes to save blocks of them and to load them into others.

    Attributes:
        values: what the blocks are as values.
    """

    def __init__(self) -> None:
        shape = 2 * VALUES, ROWS, MIB // TENSORS // ROWS
        self.layers = [[np.full(shape, 2 * i + j, np.uint8) for j in range(2)] for i in range(TENSORS // 2)]
        self.tensors = [tensor for pair in self.layers for tensor in pair]
        self.values = [b"".join(tensor[2 * i].tobytes() for tensor in self.tensors) for i in range(VALUES)]

    async def pool(self, case: Case, run: str) -> tuple[float, float]:
        put = get = 0.0
        for first, keys in batches(run):
            start = now()
            stages = [s for s in await case.pool.stage([MIB] * BATCH, deadline=anyio.current_time() + PATIENCE) if s]
            put += now() - start
            for stage, content in zip(stages, self.values[first:], strict=False):
                stage.view()[:] = content
            start = now()
            statuses = await case.pool.put_many(keys, stages, deadline=anyio.current_time() + PATIENCE)
            put += now() - start
            assert statuses == [PutStatus.STORED] * BATCH, statuses
        for first, keys in batches(run):
            start = now()
            found = await case.pool.get_many(keys, [MIB] * BATCH, deadline=anyio.current_time() + PATIENCE)
            get += now() - start
            for value, content in zip(found, self.values[first:], strict=False):
                assert not isinstance(value, GetStatus), value
                assert value.view() == content
                value.release()
        return put, get

    async def bare(self, case: Case, run: str) -> tuple[float, float]:
        put = get = 0.0
        for memory, content in zip(case.memory, self.values, strict=True):
            memory[:] = content
        for first, keys in batches(run):
            start = now()
            await case.bare_put(first, keys)
            put += now() - start
        for first, keys in batches(run):
            start = now()
            found = await case.bare_get(first, keys)
            get += now() - start
            assert all(value == wanted for value, wanted in zip(found, self.values[first:], strict=False))
        return put, get

    async def cache(self, case: Case, run: str) -> tuple[float, float]:
        async with await ContextCache.open(CcConfig_v1(0, 0, f"benchmark {run}"), case.pool) as cache:
            await cache.register_kvcache(self.layers)
            await cache.save([-1], chunks=[[(0, ROWS)]], timeout=PATIENCE)  # leaves the note of its layout
            hashes, blocks = list(range(VALUES)), [2 * i * ROWS for i in range(VALUES)]
            start = now()
            result = await cache.save(hashes, chunks=[[(block, ROWS) for block in blocks]], timeout=PATIENCE)
            put = now() - start
            assert result.success == VALUES
            start = now()
            result = await cache.load(hashes, chunks=[[(block + ROWS, ROWS) for block in blocks]], timeout=PATIENCE)
            get = now() - start
            assert result.success == VALUES
            await cache.remove([-1, *range(VALUES)])
        return put, get

    async def by_hand(self, case: Case, run: str) -> tuple[float, float]:
        block = (TENSORS, *self.tensors[0].shape[1:])
        start = now()
        for first, keys in batches(run):
            for i, memory in enumerate(case.memory[first : first + BATCH], first):
                for source, to in zip(self.tensors, np.frombuffer(memory, np.uint8).reshape(block), strict=True):
                    to[:] = source[2 * i]
            await case.bare_put(first, keys)
        put = now() - start
        start = now()
        for first, keys in batches(run):
            for i, value in enumerate(await case.bare_get(first, keys), first):
                for tensor, source in zip(self.tensors, np.frombuffer(value, np.uint8).reshape(block), strict=True):
                    tensor[2 * i + 1] = source
        return put, now() - start


async def measure(case: Case, repeats: int) -> list[dict[str, str]]:
    kv = Cache()
    contenders = {"pool": kv.pool, "bare": kv.bare, "cache": kv.cache, "by hand": kv.by_hand}
    times: dict[tuple[str, str], list[float]] = {who: [] for who in itertools.product(contenders, ("put", "get"))}
    for turn in range(repeats + 1):
        for who, seconds in list(contenders.items())[:: 1 if turn % 2 else -1]:
            put, get = await seconds(case, f"{who} {turn}")
            if turn:  # the first connects, and touches memory for the first time
                times[who, "put"].append(put)
                times[who, "get"].append(get)
            for _, keys in batches(f"{who} {turn}") if who != "cache" else ():
                await case.pool.remove_many(keys, deadline=anyio.current_time() + PATIENCE)

    def against(who: str, other: str, what: str) -> str:
        return f"{Spread.of([b / a for a, b in zip(times[who, what], times[other, what], strict=True)])}"

    return [
        {
            "engine": case.name,
            "call": what,
            "bare MB/s": f"{VALUES * MIB / Spread.of(times['bare', what]).median / 1e6:.0f}",
            "pool/bare": against("pool", "bare", what),
            "cache/bare": against("cache", "bare", what),
            "cache/by hand": against("cache", "by hand", what),
        }
        for what in ("put", "get")
    ]


@asynccontextmanager
async def redis_case() -> AsyncIterator[Case]:
    with running(server := RedisServer()):
        async with Redis(port=server.port) as client, aclosing(await RedisPool.open(server.url)) as pool:
            bare = Together(client)
            yield Case("redis", pool, bare.memory, bare.put, bare.get)


@asynccontextmanager
async def cluster_case() -> AsyncIterator[Case]:
    with redis_cluster(512 * MIB) as servers:
        async with (
            RedisCluster(host="127.0.0.1", port=servers[0].port) as client,
            aclosing(await RedisPool.open(servers[0].url)) as pool,
        ):
            bare = Together(client)
            yield Case("redis cluster of 3", pool, bare.memory, bare.put, bare.get)


@asynccontextmanager
async def mooncake_case() -> AsyncIterator[Case]:
    master = MooncakeMaster()
    with running(master, MooncakeLender(master, 512 * MIB), MooncakeLender(master, 512 * MIB)):
        async with aclosing(await MooncakePool.open(master.url)) as pool:
            store, memory = pool._store, Arena((VALUES + BATCH) * MIB)
            store.register_buffer(memory.address, memory.nbytes)
            bare = InThread(store, memory, master.segments())
            try:
                yield Case("mooncake", pool, bare.memory, bare.put, bare.get)
            finally:
                store.unregister_buffer(memory.address)


async def run(repeats: int) -> list[dict[str, str]]:
    rows = []
    for opened in (redis_case, cluster_case, mooncake_case):
        async with opened() as case:
            rows += await measure(case, repeats)
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    mooncake_store.load()
    report("engines: 64 values of 1 MiB, 8 at a time", asyncio.run(run(args.repeats)), args.json)


if __name__ == "__main__":
    main()
