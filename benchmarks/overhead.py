"""What does an awaited transfer cost, apart from moving bytes?

On one core (the process pins itself): from submitting to having awaited, for a program without steps on a stream (`empty
program`), for one block of 64 bytes pulled over a link (`pull_blocks, 64 B`) and, for scale, a bare asyncio future that is
resolved by `call_soon`. Bar: an empty transfer costs at most 25 us in the median.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable
from typing import Any

from aiodatadist import BlocksCacheKey, CacheDesc, DataType
from aiodatadist.device import Device, Program
from aiodatadist.testing import linked_pair
from benchmarks.common import arguments, now, percentile, report


async def sample(once: Callable[[], Awaitable[object]], count: int) -> list[float]:
    for _ in range(count // 10):
        await once()
    seconds = []
    gc.collect()
    for _ in range(count):
        start = now()
        await once()
        seconds.append(now() - start)
    return seconds


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


async def measure(count: int) -> list[dict[str, Any]]:
    rows = [row("bare asyncio future", await sample(bare_future, count))]
    async with await Device.open(0) as device:
        stream = device.open_stream("benchmark")

        async def empty() -> None:
            await stream.submit(Program(), 1.0).wait()

        rows.append(row("empty program", await sample(empty, count)))
        await stream.aclose()
    desc = CacheDesc(2, [16, 64], DataType.DT_UINT8)
    async with linked_pair(desc, transport="hccl") as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager
        key = BlocksCacheKey(1)

        async def small() -> None:
            await manager.pull_blocks(key, cache, [3], [5])

        rows.append(row("pull_blocks, 64 B", await sample(small, count)))
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--count", type=int, default=20_000)
    args = parser.parse_args()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})
    report("overhead: submit to awaited, one core", asyncio.run(measure(args.count)), args.json)


if __name__ == "__main__":
    main()
