"""Measure what an awaited transfer costs, apart from moving bytes.

On one core (the process pins itself): from submitting to having awaited, for a program without steps on a stream (`empty
program`), for one block of 64 bytes pulled over a link (`pull_blocks, 64 B`) and, for scale, a bare asyncio future that is
resolved by `call_soon`. Bar: an empty transfer costs at most 25 us in the median.

Then what it costs to be seen: the same pull with an observer that wants to know nothing (`observed`), and, where
OpenTelemetry's SDK is installed, with one whose spans are not sampled, and with one whose spans are (`spans`) and go nowhere.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMRole,
)
from aiodatadist._cli.kit.place import Place, add_place_arguments, place_options, places
from aiodatadist._device import Device, Program
from aiodatadist.telemetry import Call, Observer
from benchmarks.common import arguments, percentile, report, seconds_of
from benchmarks.peers import info_of, link_to

DESC = CacheDesc(2, [16, 64], DataType.DT_UINT8)
POOL = '{"memory_size": 2097152}'


async def sample(once: Callable[[], Awaitable[object]], count: int) -> list[float]:
    await seconds_of(once, count // 10)
    gc.collect()
    return await seconds_of(once, count)


def row(name: str, seconds: list[float]) -> dict[str, Any]:
    return {
        "what": name,
        "median us": f"{percentile(seconds, 50) * 1e6:.1f}",
        "p90 us": f"{percentile(seconds, 90) * 1e6:.1f}",
        "p99 us": f"{percentile(seconds, 99) * 1e6:.1f}",
    }


async def bare_future() -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.call_soon(future.set_result, None)
    await future


async def measure(count: int, ends: list[Place]) -> list[dict[str, Any]]:
    rows = [row("bare asyncio future", await sample(bare_future, count))]
    async with await Device.open(ends[0].device) as device:
        stream = device.open_stream("benchmark")

        async def empty() -> None:
            await stream.submit(Program(), 1.0).wait()

        rows.append(row("empty program", await sample(empty, count)))
        await stream.aclose()
    async with linked(ends) as (decoder, cache):
        key, manager = BlocksCacheKey(1), decoder.cache_manager

        async def small() -> None:
            await manager.pull_blocks(key, cache, [3], [5])

        for name, observer in observers():
            decoder.observer = observer
            rows.append(row(f"pull_blocks, 64 B{name}", await sample(small, count)))
    return rows


class Uninterested:
    """An observer that wants to know nothing."""

    def began(self, call: Call) -> None:
        return None


def observers() -> list[tuple[str, Observer | None]]:
    found: list[tuple[str, Observer | None]] = [("", None), (", observed", Uninterested())]
    if find_spec("opentelemetry.sdk"):
        otel, trace = import_module("aiodatadist.telemetry.otel"), import_module("opentelemetry.sdk.trace")
        sampling = import_module("opentelemetry.sdk.trace.sampling")
        found.append((", not sampled", otel.SpanObserver(trace.TracerProvider(sampler=sampling.ALWAYS_OFF))))
        found.append((", spans", otel.SpanObserver(trace.TracerProvider())))
    return found


@asynccontextmanager
async def linked(ends: list[Place]) -> AsyncIterator[tuple[LLMDataDist, Cache]]:
    """Link two clusters of this process, on two devices, each with a cache of pool memory. Yield the one that pulls."""
    options: dict[str, Any] = {"listen_ip_info": "127.0.0.1:0", "mem_pool_cfg": POOL}
    prefill_at, decode_at = [await place_options(place) for place in ends]
    async with (
        LLMDataDist(LLMRole.PROMPT, 1, LLMConfig(**options, **prefill_at)) as prompt,
        LLMDataDist(LLMRole.DECODER, 2, LLMConfig(**options, **decode_at)) as decoder,
    ):
        await prompt.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))
        cache = await decoder.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(2))
        await link_to(decoder, info_of(1, prompt.listen_address or ("", 0)))
        yield decoder, cache


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--count", type=int, default=20_000)
    add_place_arguments(parser)
    args = parser.parse_args()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})
    report("overhead: submit to awaited, one core", asyncio.run(measure(args.count, places(args))), args.json)


if __name__ == "__main__":
    main()
