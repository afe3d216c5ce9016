"""Measure what a layered transfer costs its caller, and whether it is ever worse than sending everything at the end.

`gated`: 80 layers to 4 destinations, held by gates on the device: milliseconds of the event loop's thread in all, from the
call to the last completion; bar: 2 ms. `awaitable`: the same with an AwaitableLayerSynchronizer: microseconds per layer and
destination. `small`: layers of 4 KiB to 256 KiB that are computed in no time or in 100 us each, layer by layer as the library
chooses, against one push behind the last layer; bar: at most 2 % longer. `large`: 128 MiB in four layers that are all
ready, in scattered blocks, against one push of the same blocks; bar: at most 10 % longer. Both are taken in turns.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    EventLayerSynchronizer,
    TransferWithCacheKeyConfig,
)
from aiodatadist._device import Device, Stream
from aiodatadist.testing import Cluster, cluster_info, open_cluster
from benchmarks.common import Spread, arguments, in_turns, now, percentile, report
from benchmarks.peers import link_to

LAYERS = 80
DESTINATIONS = 4
LARGE, LARGE_BLOCKS, LARGE_LAYERS = 128 << 20, (64 << 10, 1 << 20), 4

Moves = tuple[list[int], list[int]]
"""Blocks of the source, and of the destination."""
FEW: Moves = ([0, 2], [1, 3])


async def clusters(stack: AsyncExitStack, count: int, desc: CacheDesc) -> tuple[Cluster, Cache, list[Cluster]]:
    """Open a source and the destinations that it is linked to."""
    source = await stack.enter_async_context(open_cluster(1))
    cache = await source.blocks(desc)
    others = []
    for device in range(1, count + 1):
        other = await stack.enter_async_context(open_cluster(1 + device, device_id=device))
        await other.blocks(desc)
        others.append(other)
    await link_to(source.datadist, *(cluster_info(other) for other in others))
    return source, cache, others


def targets(count: int, layers: int) -> list[TransferWithCacheKeyConfig]:
    return [TransferWithCacheKeyConfig(BlocksCacheKey(2 + i), range(layers), range(layers)) for i in range(count)]


async def gated(source: Cluster, cache: Cache, device: Device, compute: Stream) -> tuple[float, float]:
    """Make one transfer. Return the seconds of the loop's thread, and of these the seconds of the call itself."""
    synchronizer = EventLayerSynchronizer(device, LAYERS)
    before = time.thread_time()
    task = source.datadist.cache_manager.transfer_cache_async(
        cache, synchronizer, targets(DESTINATIONS, LAYERS), [0, 2], [1, 3]
    )
    called = time.thread_time() - before
    await asyncio.sleep(0.02)
    between = time.thread_time()
    for layer in range(LAYERS):  # the model's cost, not the transfer's
        synchronizer.record(layer, compute)
    recording = time.thread_time() - between
    await task
    return time.thread_time() - before - recording, called


async def awaitable(source: Cluster, cache: Cache) -> float:
    """Make one transfer. Return the seconds of the loop's thread per layer and destination."""
    synchronizer = AwaitableLayerSynchronizer(LAYERS)
    before = time.thread_time()
    task = source.datadist.cache_manager.transfer_cache_async(
        cache, synchronizer, targets(DESTINATIONS, LAYERS), [0, 2], [1, 3]
    )
    for layer in range(LAYERS):
        await asyncio.sleep(0.0005)
        synchronizer.ready(layer)
    await task
    return (time.thread_time() - before) / LAYERS / DESTINATIONS


async def idle() -> float:
    """Measure the CPU time of the sleeps alone, per layer and destination."""
    before = time.thread_time()
    for _ in range(LAYERS):
        await asyncio.sleep(0.0005)
    return (time.thread_time() - before) / LAYERS / DESTINATIONS


async def measure_caller(rounds: int) -> list[dict[str, Any]]:
    desc = CacheDesc(2 * LAYERS, [4, 65536], DataType.DT_UINT8)
    async with AsyncExitStack() as stack:
        source, cache, _ = await clusters(stack, DESTINATIONS, desc)
        device = source.datadist.device
        compute = device.open_stream("compute")
        stack.push_async_callback(compute.aclose)
        await gated(source, cache, device, compute)  # opens the streams, learns where the caches are
        gc.collect()
        whole, calls, each, nothing = [], [], [], []
        for _ in range(rounds):
            total, called = await gated(source, cache, device, compute)
            whole.append(total)
            calls.append(called)
            each.append(await awaitable(source, cache))
            nothing.append(await idle())
    return [
        row(f"gated, {LAYERS} layers x {DESTINATIONS}: all, ms", whole, 1e3),
        row("gated: the call itself, ms", calls, 1e3),
        row("awaitable: per layer and destination, us", [a - b for a, b in zip(each, nothing, strict=True)], 1e6),
    ]


def row(what: str, values: list[float], scale: float) -> dict[str, Any]:
    return {
        "what": what,
        "median": f"{statistics.median(values) * scale:.2f}",
        "p90": f"{percentile(values, 90) * scale:.2f}",
    }


# ---- small layers ----


async def as_they_come(source: Cluster, cache: Cache, layers: int, pause: float, moves: Moves) -> float:
    """Send layers as they are computed. Return the seconds from the start of compute until the last byte has landed."""
    synchronizer = AwaitableLayerSynchronizer(layers)
    started = now()
    task = source.datadist.cache_manager.transfer_cache_async(cache, synchronizer, targets(1, layers), *moves)
    await compute(layers, pause, synchronizer.ready)
    await task
    return now() - started


async def at_the_end(source: Cluster, cache: Cache, layers: int, pause: float, moves: Moves) -> float:
    started = now()
    await compute(layers, pause, lambda _: None)
    await source.datadist.cache_manager.push_blocks(BlocksCacheKey(2), cache, *moves)
    return now() - started


async def compute(layers: int, pause: float, ready: Any) -> None:
    """Compute layers that take ``pause`` seconds each. The loop sees only their ends."""
    begin = now()
    for layer in range(layers):
        while (left := begin + (layer + 1) * pause - now()) > 0:  # noqa: ASYNC110 - a clock, not a condition
            await asyncio.sleep(0 if left < 0.002 else left - 0.001)
        ready(layer)


async def both(
    source: Cluster, cache: Cache, layers: int, pause: float, moves: Moves, rounds: int
) -> dict[str, list[float]]:
    """Measure both ways in turns, after some rounds that measure what the link costs."""
    ways = {"as they come": as_they_come, "at the end": at_the_end}
    contenders = {name: partial(way, source, cache, layers, pause, moves) for name, way in ways.items()}
    return await in_turns(contenders, rounds, warm=5)


async def measure_small(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for block in (2048, 16384, 131072):
        desc = CacheDesc(64, [4, block], DataType.DT_UINT8)
        async with AsyncExitStack() as stack:
            source, cache, _ = await clusters(stack, 1, desc)
            for pause in (0.0, 1e-4, 1e-3):
                layered, serial = (await both(source, cache, 32, pause, FEW, rounds)).values()
                ratio = statistics.median([a / b for a, b in zip(layered, serial, strict=True)])
                rows.append(
                    {
                        "layer": f"{4 * block >> 10} KiB",
                        "compute per layer": f"{pause * 1e6:.0f} us",
                        "as they come": f"{statistics.median(layered) * 1e3:.3f} ms",
                        "at the end": f"{statistics.median(serial) * 1e3:.3f} ms",
                        "ratio": f"{ratio:.3f}",
                    }
                )
    return rows


# ---- large ones ----


async def ratio_of_large(block: int, rounds: int) -> Spread:
    """Compare a layered transfer whose layers are all ready with one push: the ratio of their times."""
    count = LARGE // block // (2 * LARGE_LAYERS)
    desc = CacheDesc(2 * LARGE_LAYERS, [2 * count, block], DataType.DT_UINT8)
    moves = random.sample(range(0, 2 * count, 2), count), random.sample(range(0, 2 * count, 2), count)
    async with AsyncExitStack() as stack:
        source, cache, _ = await clusters(stack, 1, desc)
        layered, pushed = (await both(source, cache, LARGE_LAYERS, 0.0, moves, rounds)).values()
    return Spread.of([a / b for a, b in zip(layered, pushed, strict=True)])


async def measure_large(rounds: int) -> list[dict[str, Any]]:
    return [
        {"block": f"{block >> 10} KiB", "layered/push": f"{await ratio_of_large(block, rounds)}"}
        for block in LARGE_BLOCKS
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    report("layers: what the caller pays", asyncio.run(measure_caller(args.rounds)), args.json)
    report(
        "layers: small ones, as they come against one push at the end", asyncio.run(measure_small(args.rounds)), None
    )
    report("layers: large ones that are ready, against one push", asyncio.run(measure_large(4 * args.rounds)), None)


if __name__ == "__main__":
    main()
