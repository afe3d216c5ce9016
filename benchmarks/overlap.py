"""Measure how much of a layered transfer is hidden behind compute.

32 layers of 20 MiB travel to another process while they are computed. Compute is emulated by device time (a timer; the CPU
is idle) or by a matrix product that releases the interpreter lock, on one core. C: compute alone; C': beside the transfer;
X: the transfer alone, all layers at once; T: from the start of compute until the last byte is there. E = T - C is exposed,
H = (C + X - T) / X is hidden, H* is the most that can be, score = T* / T with T* = max(C, X) + min(C, X) / L.

Rows: `timer, gates` gates the layers on the device, `timer` and `gemm` wait for an AwaitableLayerSynchronizer; `serial`
sends everything after the last layer. G: layers that were sent at a time. Caller: processor time that the caller's thread
spends in saying that one layer is ready. Bars: score at least 0.95 and H at least 0.92 with device time, score at least 0.85
beside the matrix product, compute slowed by at most 3 %, at most 50 us of the caller's time. `--stamps FILE` writes when each
layer of the last rounds was ready and when it had landed.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported; the other core is the transfer's
import numpy as np

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    EventLayerSynchronizer,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    TransferWithCacheKeyConfig,
)
from aiodatadist._cli.kit.place import Place, add_place_arguments, place_options, places
from aiodatadist._link.data.cost_model import best_hidden_share, hidden_share, ideal_uniform
from benchmarks.common import Spread, arguments, now, report
from benchmarks.peers import info_of, link_to, process_of

LAYERS = 32
BLOCK = 256 << 10
BLOCKS = 40
"""Per tensor: a layer is 20 MiB, more than 2 ms of transfer."""
DESC = CacheDesc(2 * LAYERS, [BLOCKS, BLOCK], DataType.DT_UINT8)
POOL = f'{{"memory_size": {2 * LAYERS * BLOCKS * BLOCK}, "page_shift": 20}}'

Ready = Callable[[int], None]
Compute = Callable[[float, Ready], Awaitable[float]]


def touch(datadist: LLMDataDist, cache: Cache) -> None:
    """Touch every page once, so that the first touch is not measured. An NPU's memory has its pages from the start."""
    if datadist.runtime.is_soft:
        for array in datadist.cache_manager.arrays(cache):
            array[:] = 1


@asynccontextmanager
async def decode(place: Place) -> AsyncIterator[object]:
    """Open the cluster that the layers are sent to."""
    config = LLMConfig(listen="127.0.0.1:0", mem_pool_cfg=POOL, **await place_options(place))
    async with LLMDataDist(LLMRole.DECODER, 2, config) as datadist:
        touch(datadist, await datadist.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(2)))
        yield datadist.listen_address


# ---- compute ----


async def by_timer(seconds: float, ready: Ready) -> float:
    """Compute layers with a timer: each takes its share of device time, and no CPU."""
    loop, started = asyncio.get_running_loop(), now()
    done = asyncio.Event()

    def layer(index: int) -> None:
        ready(index)
        if index == LAYERS - 1:
            done.set()

    begin = loop.time()
    for index in range(LAYERS):
        loop.call_at(begin + (index + 1) * seconds / LAYERS, layer, index)
    await done.wait()
    return now() - started


class Gemm:
    """A product of two matrices, repeated for as long as a layer takes. It holds one core but not the interpreter lock."""

    def __init__(self) -> None:
        self._a = np.random.default_rng(0).random((256, 256), np.float32)
        self._out = np.empty_like(self._a)
        started = now()
        self._run(200)
        self._seconds = (now() - started) / 200

    def _run(self, count: int) -> None:
        for _ in range(count):
            np.matmul(self._a, self._a, out=self._out)

    async def __call__(self, seconds: float, ready: Ready) -> float:
        loop, started = asyncio.get_running_loop(), now()
        count = max(1, round(seconds / LAYERS / self._seconds))

        def work() -> None:
            for index in range(LAYERS):
                self._run(count)
                loop.call_soon_threadsafe(ready, index)

        await anyio.to_thread.run_sync(work)
        return now() - started


# ---- transfers ----


@dataclass
class Run:
    """A transfer beside compute. Times are seconds; stamps count from the start of compute."""

    total: float = 0.0
    beside: float = 0.0
    group: int = LAYERS
    caller: float = 0.0
    ready: list[float] = field(default_factory=list)
    landed: list[float] = field(default_factory=list)


class Sender:
    """The prefill side of the transfer."""

    def __init__(self, datadist: LLMDataDist, cache: Cache) -> None:
        self._datadist = datadist
        self._cache = cache
        self._blocks = list(range(BLOCKS))
        self._target = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(LAYERS), range(LAYERS))

    async def alone(self) -> float:
        """Return X, the seconds of all layers at once."""
        started = now()
        await self._datadist.cache_manager.push_blocks(BlocksCacheKey(2), self._cache, self._blocks, self._blocks)
        return now() - started

    async def layered(self, compute: Compute, seconds: float) -> Run:
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        return await self._both(synchronizer, synchronizer.ready, compute, seconds)

    async def gated(self, compute: Compute, seconds: float) -> Run:
        """Run compute and transfer together, with gates on the device."""
        device = self._datadist.device
        synchronizer, stream = EventLayerSynchronizer(device, LAYERS), device.open_stream("compute")
        try:
            return await self._both(synchronizer, lambda layer: synchronizer.record(layer, stream), compute, seconds)
        finally:
            await stream.aclose()

    async def serial(self, compute: Compute, seconds: float) -> Run:
        started = now()
        computed = await compute(seconds, lambda _: None)
        await self.alone()
        return Run(now() - started, computed)

    async def _both(self, synchronizer: Any, say: Ready, compute: Compute, seconds: float) -> Run:
        run, started = Run(), now()
        task = self._datadist.cache_manager.transfer_cache_async(
            self._cache, synchronizer, [self._target], self._blocks, self._blocks
        )
        late = now() - started

        def ready(layer: int) -> None:
            before = time.thread_time()
            say(layer)
            run.caller += (time.thread_time() - before) / LAYERS
            run.ready.append(now() - started)

        run.beside = await compute(seconds, ready)
        await task
        run.total = now() - started
        run.beside += late
        run.group = task._transfer.parts[0].group  # type: ignore[attr-defined]
        run.landed = [done.seconds async for done in task.progress()]
        return run


async def measure(rounds: int, ratio: float, stamps: Path | None, place: Place, other: Place) -> list[dict[str, Any]]:
    config = LLMConfig(sync_kv_timeout=60_000, mem_pool_cfg=POOL, **await place_options(place))
    async with process_of(decode, other) as (_, address), LLMDataDist(LLMRole.PROMPT, 1, config) as datadist:
        cache = await datadist.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))
        touch(datadist, cache)
        await link_to(datadist, info_of(2, address))
        sender, gemm = Sender(datadist, cache), Gemm()
        await sender.alone()
        transfer = statistics.median([await sender.alone() for _ in range(rounds)])
        want = ratio * transfer
        ways: dict[str, tuple[Compute, Any]] = {
            "timer, gates": (by_timer, sender.gated),
            "timer": (by_timer, sender.layered),
            "timer, serial": (by_timer, sender.serial),
            "gemm": (gemm, sender.layered),
            "gemm, serial": (gemm, sender.serial),
        }
        taken: dict[str, list[tuple[float, float, Run]]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, (compute, way) in ways.items():
                x = await sender.alone()
                c = await compute(want, lambda _: None)
                taken[name].append((c, x, await way(compute, want)))
        if stamps is not None:
            last = {name: values[-1][2] for name, values in taken.items()}
            text = {name: {"ready": run.ready, "landed": run.landed} for name, run in last.items() if run.landed}
            await anyio.Path(stamps).write_text(json.dumps(text, indent=1))
        return [row(name, values) for name, values in taken.items()]


def row(name: str, values: list[tuple[float, float, Run]]) -> dict[str, Any]:
    """Return the medians as a row. Ratios are taken within rounds, because the machine changes between rounds."""
    c, x = statistics.median(v[0] for v in values), statistics.median(v[1] for v in values)
    runs = [run for _, _, run in values]
    beside, total = statistics.median(run.beside for run in runs), statistics.median(run.total for run in runs)
    scores = [ideal_uniform(c, x, LAYERS) / run.total for c, x, run in values]
    hidden = [hidden_share(c, x, run.total) for c, x, run in values]
    return {
        "compute": name,
        "C ms": c * 1e3,
        "C' ms": beside * 1e3,
        "X ms": x * 1e3,
        "T ms": total * 1e3,
        "E ms": (total - c) * 1e3,
        "H": statistics.median(hidden),
        "H*": best_hidden_share(c, x, LAYERS),
        "score": statistics.median(scores),
        "slowed %": Spread.of([100 * (run.beside / c - 1) for c, _, run in values]),
        "G": statistics.median(run.group for run in runs),
        "caller us": statistics.median(run.caller for run in runs) * 1e6,
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ratio", type=float, default=1.2, help="compute time as a multiple of the transfer's")
    parser.add_argument("--stamps", type=Path, help="when each layer was ready, and when it had landed, as JSON")
    add_place_arguments(parser)
    args = parser.parse_args()
    prefill_at, decode_at = places(args)
    rows = asyncio.run(measure(args.rounds, args.ratio, args.stamps, prefill_at, decode_at))
    report(f"overlap: {LAYERS} layers of {2 * BLOCKS * BLOCK >> 20} MiB", rows, args.json)


if __name__ == "__main__":
    main()
