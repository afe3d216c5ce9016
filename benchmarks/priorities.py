"""Measure how long a small pull waits behind a large one on the same link, and what the large one loses by letting it pass.

Two clusters in this process, linked. Large pulls of 512 MiB (256 blocks of 2 MiB, every other one, so that none are merged)
are under way while small ones of 16 and 64 KiB are made, one every 5 ms, from the call to the return of `await`:

- `alone`: nothing else is under way;
- `NORMAL behind NORMAL`: no priorities: the small pull waits for the end of the large one;
- `NORMAL behind BACKGROUND`: it passes, between two windows of 8 MiB;
- `CRITICAL behind NORMAL`, `CRITICAL behind BACKGROUND`: it has a stream of its own. With SOFTNPU_STRICT=roce it passes.

Then the throughput of the large pulls, without small ones beside them and with a critical one every 5 ms. In each round all
contenders take their turn, in another order each time; a throughput is that of one round's large pulls. Bars: at most 1 ms at
the 99th percentile for `CRITICAL behind BACKGROUND`, and at most 3 % less of the background work.

At last the share of the bytes that a BACKGROUND pull of 512 MiB has beside NORMAL ones of 512 MiB, or of 512 KiB, that follow
each other without a pause. Bar: at least 10 %.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiodatadist import BlocksCacheKey, CacheDesc, CacheManager, CacheTask, DataType, TransferPriority
from aiodatadist.testing import linked_pair
from benchmarks.common import Spread, arguments, in_turns, now, percentile, report_all

LARGE_BYTES, LARGE_BLOCK = 512 << 20, 2 << 20
SMALL_BLOCK = 16 << 10
LINES = 64
"""Transfers that wait in line, so that there is no pause."""
EVERY = 0.005
"""Seconds between two small pulls."""
LARGE = CacheDesc(1, [2 * LARGE_BYTES // LARGE_BLOCK, LARGE_BLOCK], DataType.DT_UINT8)
SMALL = CacheDesc(1, [64, SMALL_BLOCK], DataType.DT_UINT8)
CRITICAL, NORMAL, BACKGROUND = TransferPriority


class Link:
    """Pulls of cluster 2 from cluster 1."""

    def __init__(self, manager: CacheManager, caches: list[Any]) -> None:
        self._manager = manager
        self._large, self._small = caches
        self._blocks = list(range(0, 2 * LARGE_BYTES // LARGE_BLOCK, 2))

    def pull_large(self, priority: TransferPriority) -> CacheTask:
        return self._manager.pull_blocks(
            BlocksCacheKey(1, 0), self._large, self._blocks, self._blocks, priority=priority
        )

    def small(self, nbytes: int, priority: TransferPriority) -> CacheTask:
        blocks = list(range(0, 2 * nbytes // SMALL_BLOCK, 2))
        return self._manager.pull_blocks(BlocksCacheKey(1, 1), self._small, blocks, blocks, priority=priority)

    async def pull_small(self, nbytes: int, priority: TransferPriority) -> float:
        """Pull a small block and return the seconds from the call to the end."""
        start = now()
        await self.small(nbytes, priority)
        return now() - start

    async def small_beside(self, nbytes: int, priority: TransferPriority, under_way: CacheTask) -> list[float]:
        """Pull a small transfer every few milliseconds, as long as the large one runs."""
        seconds: list[float] = []
        while True:
            await asyncio.sleep(EVERY)
            if under_way.done():
                return seconds
            seconds.append(await self.pull_small(nbytes, priority))


async def alone(link: Link, nbytes: int) -> list[float]:
    seconds = []
    for _ in range(8):
        await asyncio.sleep(EVERY)
        seconds.append(await link.pull_small(nbytes, NORMAL))
    return seconds


async def behind(link: Link, nbytes: int, large: TransferPriority, small: TransferPriority) -> list[float]:
    under_way = link.pull_large(large)
    seconds = await link.small_beside(nbytes, small, under_way)
    await under_way
    return seconds


async def throughput(link: Link, large: TransferPriority, pulls: int, *, passed: bool) -> float:
    """Return the GB/s of large pulls, from their reports: this end sees their end only between two small ones."""
    seconds = 0.0
    for _ in range(pulls):
        under_way = link.pull_large(large)
        if passed:
            await link.small_beside(SMALL_BLOCK, CRITICAL, under_way)
        done = await under_way
        seconds += done.queue_seconds + done.transfer_seconds
    return pulls * LARGE_BYTES / seconds / 1e9


async def share(link: Link, make: Callable[[], CacheTask]) -> float:
    """Return the background pull's share of the bytes that were moved while it ran."""
    under_way = [make() for _ in range(LINES)]
    background, others = link.pull_large(BACKGROUND), 0
    while not background.done():
        others += (await under_way.pop(0)).bytes
        under_way.append(make())
    for task in under_way:
        task.cancel()
    await asyncio.gather(*under_way, return_exceptions=True)
    done = (await background).bytes
    return done / (done + others)


def share_rows(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        {"512 MiB BACKGROUND": name, "of the bytes": Spread.of(shares), "least": min(shares)}
        for name, shares in found.items()
    ]


def latency_rows(found: dict[str, list[Any]]) -> list[dict[str, Any]]:
    rows = []
    for name, rounds in found.items():
        seconds = [each for one in rounds for each in one]
        p50, p99 = (percentile(seconds, percent) * 1e3 for percent in (50, 99))
        largest = max(seconds) * 1e3
        rows.append({"small pull": name, "pulls": len(seconds), "p50 ms": p50, "p99 ms": p99, "max ms": largest})
    return rows


def throughput_rows(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for name, rates in found.items():
        plain = found[name.replace("beside CRITICAL", "by itself")]
        shares = [rate / other for rate, other in zip(rates, plain, strict=True)]
        rows.append({"large pulls": name, "GB/s": Spread.of(rates), "of it by itself": Spread.of(shares)})
    return rows


async def measure(rounds: int, pulls: int) -> dict[str, list[dict[str, Any]]]:
    async with linked_pair(LARGE, sync_kv_timeout=60_000) as (prompt, decoder, _, large):
        await prompt.blocks(SMALL, 1)
        small = await decoder.blocks(SMALL, 1)
        link = Link(decoder.datadist.cache_manager, [large, small])
        await link.pull_large(NORMAL)
        await alone(link, SMALL_BLOCK)
        latencies: dict[str, Callable[[], Awaitable[Any]]] = {}
        for nbytes in (SMALL_BLOCK, 4 * SMALL_BLOCK):
            size = f"{nbytes >> 10} KiB"
            latencies[f"{size} alone"] = lambda nbytes=nbytes: alone(link, nbytes)  # type: ignore[misc]
            for first, second in ((NORMAL, NORMAL), (NORMAL, BACKGROUND), (CRITICAL, NORMAL), (CRITICAL, BACKGROUND)):
                name = f"{size} {first} behind {second}"
                latencies[name] = lambda n=nbytes, a=first, b=second: behind(link, n, b, a)  # type: ignore[misc]
        rates: dict[str, Callable[[], Awaitable[Any]]] = {}
        for priority in (NORMAL, BACKGROUND):
            for passed in (False, True):
                name = f"{priority} {'beside CRITICAL' if passed else 'by itself'}"
                rates[name] = lambda p=priority, w=passed: throughput(link, p, pulls, passed=w)  # type: ignore[misc]
        shares: dict[str, Callable[[], Awaitable[Any]]] = {
            "beside NORMAL of 512 MiB": lambda: share(link, lambda: link.pull_large(NORMAL)),
            "beside NORMAL of 512 KiB": lambda: share(link, lambda: link.small(32 * SMALL_BLOCK, NORMAL)),
        }
        return {
            "latency of a small pull": latency_rows(await in_turns(latencies, rounds)),
            "throughput of large pulls": throughput_rows(await in_turns(rates, rounds)),
            "share of background work": share_rows(await in_turns(shares, max(1, rounds // 5))),
        }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pulls", type=int, default=5, help="large pulls of a round's throughput")
    args = parser.parse_args()
    found = asyncio.run(measure(args.rounds, args.pulls))
    report_all({f"priorities: {name}": rows for name, rows in found.items()}, args.json)


if __name__ == "__main__":
    main()
