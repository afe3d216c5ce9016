"""Measure how fast KV blocks are saved and loaded.

`save` and `load`: 128 MiB in 128 values of 1 MiB between a KV cache in host memory and the embedded pool, through
`ContextCache`. Each value is 64 ranges of 16 KiB, one per tensor. Beside it, in the same run and in turns: a plain one-thread
memcpy of the same ranges. Bar: at least 0.7 of it. `load, local` reads them from the local read cache.
`exists`: 10 000 hashes that are all there, in one call. Bar: 20 ms.
`loop late`: how late a 1 ms ticker on the event loop was, at most, during the call; and while 1000 tasks, all woken at once,
save and load, garbage collection aside. Bar there: 20 ms.
"""

from __future__ import annotations

import asyncio
import gc
import random
from array import array
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from aiodatadist._cli.bench.lateness import ticking
from aiodatadist._device.plain_copy import plain_copy_seconds
from aiodatadist.context_caching import CcConfig_v1, ContextCache, KVPool, MemoryPool
from benchmarks.common import Spread, arguments, now, report

TENSORS = 64
BLOCK = 16
TOKEN = 1024
PIECE = BLOCK * TOKEN
VALUES = 128
TOTAL = VALUES * TENSORS * PIECE
HASHES = 10_000
TASKS = 1000

POOLS: dict[str, Callable[[int], Awaitable[KVPool]]] = {"memory": MemoryPool.open}
"""The pools by name, each a function of its bytes. Engines join here, and their own client takes the place of memcpy."""

Work = Callable[[], Awaitable[object]]


def layers(blocks: int, token: int, tensors: int) -> list[list[NDArray[np.uint8]]]:
    """Return K and V of each layer. Every page has been touched."""
    return [[np.ones((blocks, BLOCK, token), np.uint8) for _ in range(2)] for _ in range(tensors // 2)]


class Ranges:
    """Ranges of the cache that travel, and the same number of ranges of a plain buffer that stands for the pool's memory."""

    def __init__(self, cache: list[list[NDArray[np.uint8]]], blocks: list[int]) -> None:
        self._values = np.ones(TOTAL, np.uint8)
        base, starts = self._values.ctypes.data, [tensor.ctypes.data for layer in cache for tensor in layer]
        self.cache = array("Q", [start + block * PIECE for block in blocks for start in starts])
        self.values = array("Q", range(base, base + TOTAL, PIECE))


async def compare(name: str, prepare: Work, work: Work, memcpy: Callable[[], float], repeats: int) -> dict[str, Any]:
    """Measure the work and a memcpy of the same ranges, in turns."""
    seconds, copies, late = [], [], []
    for turn in range(repeats + 1):
        await prepare()
        with ticking() as ticks:
            start = now()
            await work()
            took = now() - start
        copied = await anyio.to_thread.run_sync(memcpy)
        if turn:  # the first touches every page for the first time
            seconds.append(took)
            copies.append(copied)
            late.append(max(ticks, default=0.0) * 1e3)
    ratio = Spread.of([c / s for c, s in zip(copies, seconds, strict=True)])
    return {
        "what": name,
        "ms": f"{Spread.of([s * 1e3 for s in seconds])}",
        "GB/s": f"{TOTAL / Spread.of(seconds).median / 1e9:.2f}",
        "memcpy GB/s": f"{TOTAL / Spread.of(copies).median / 1e9:.2f}",
        "of memcpy": f"{ratio}",
        "loop late ms": f"{Spread.of(late)}",
    }


async def bandwidth(name: str, pool: KVPool, repeats: int) -> list[dict[str, Any]]:
    blocks, hashes = [2 * i for i in range(VALUES)], list(range(VALUES))
    random.Random(1).shuffle(blocks)  # no two neighbours
    kv = layers(2 * VALUES, TOKEN, TENSORS)
    ranges = Ranges(kv, blocks)
    where: dict[str, Any] = {"chunks": [[(block * BLOCK, BLOCK) for block in blocks]], "timeout": 60}
    config = CcConfig_v1(0, 0, "benchmark")
    async with (
        await ContextCache.open(config, pool) as cache,
        await ContextCache.open(config, pool, read_cache_bytes=TOTAL) as local,
    ):
        await cache.register_kvcache(kv)
        await local.register_kvcache(kv)

        async def forget() -> None:
            await cache.remove(hashes)

        async def nothing() -> None:
            """Do nothing: all hashes are in the pool."""

        def copied_out() -> float:
            return plain_copy_seconds(ranges.values, ranges.cache, PIECE)

        def copied_in() -> float:
            return plain_copy_seconds(ranges.cache, ranges.values, PIECE)

        async def save() -> None:
            assert (await cache.save(hashes, **where)).success == VALUES

        async def load() -> None:
            assert (await cache.load(hashes, **where)).success == VALUES

        async def load_local() -> None:
            assert (await local.load(hashes, **where, read_local_only=True)).success == VALUES

        rows = [
            await compare(f"{name}: save", forget, save, copied_out, repeats),
            await compare(f"{name}: load", nothing, load, copied_in, repeats),
        ]
        assert (await local.load(hashes, **where)).success == VALUES
        rows.append(await compare(f"{name}: load, local", nothing, load_local, copied_in, repeats))
    return rows


async def measured(name: str, work: Work, repeats: int) -> dict[str, Any]:
    seconds, late = [], []
    for _ in range(repeats):
        with ticking() as ticks:
            start = now()
            await work()
            seconds.append((now() - start) * 1e3)
        late.append(max(ticks, default=0.0) * 1e3)
    row = dict.fromkeys(("what", "ms", "GB/s", "memcpy GB/s", "of memcpy", "loop late ms"), "")
    return {**row, "what": name, "ms": f"{Spread.of(seconds)}", "loop late ms": f"{Spread.of(late)}"}


async def small(name: str, pool: KVPool, repeats: int) -> list[dict[str, Any]]:
    hashes = list(range(HASHES))
    async with await ContextCache.open(CcConfig_v1(0, 0, "small"), pool) as cache:
        await cache.register_kvcache(layers(HASHES // BLOCK, 8, 2))
        await cache.save(hashes, slots=range(HASHES), offsets=[1] * HASHES, timeout=60)

        async def exists() -> None:
            assert (await cache.exists(hashes, timeout=60)).success == HASHES

        async def crowd() -> None:
            go = anyio.Event()
            async with anyio.create_task_group() as group:
                for i in range(TASKS):
                    group.start_soon(one, i, go)
                    await anyio.lowlevel.checkpoint()  # to make a thousand in one go takes 10 to 20 ms by itself
                go.set()

        async def one(i: int, go: anyio.Event) -> None:
            await go.wait()
            await cache.save([HASHES + i], slots=[i], offsets=[1], timeout=60)
            await cache.load([HASHES + i], slots=[i], offsets=[1], timeout=60)

        rows = [await measured(f"{name}: exists, {HASHES} hashes", exists, repeats)]
        gc.collect()
        gc.disable()  # a full collection takes 20 ms by itself, and is not what is measured
        rows.append(await measured(f"{name}: {TASKS} tasks", crowd, repeats))
        gc.enable()
    return rows


async def measure(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for name, open_pool in POOLS.items():
        async with AsyncExitStack() as stack:
            pool = await open_pool(TOTAL + (64 << 20))
            stack.push_async_callback(pool.aclose)
            rows += await bandwidth(name, pool, repeats)
            rows += await small(name, pool, repeats)
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    report("context cache: 128 MiB in values of 1 MiB", asyncio.run(measure(args.repeats)), args.json)


if __name__ == "__main__":
    main()
