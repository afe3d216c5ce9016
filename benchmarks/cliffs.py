"""Look for cliffs: transfers that take much longer than ones that are hardly smaller.

Pulls from a pool of another process are awaited one behind the other: of one range of 4 KiB to 4 MiB, each a quarter
larger than the one before, and of 1 to 4096 ranges of 1 KiB. All sizes are timed in each turn, from the smallest to the
largest, and a step is the median of the turns' ratios of neighbours. Bar: no step above 1.5.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, CacheManager, DataType
from aiodatadist.testing import open_cluster
from benchmarks.common import Spread, arguments, now, report
from benchmarks.peers import info_of, link_to, process_of

LEAST, MOST, STEP = 4 << 10, 4 << 20, 1.25
MOST_RANGES, RANGE = 4096, 1 << 10
BAR = 1.5
POOL = '{"memory_size": 268435456}'
PEER = 2


def growing(least: int, most: int, step: float, unit: int) -> list[int]:
    """Return sizes from the least to the most, each larger by the step and a multiple of the unit."""
    sizes, size = [least], float(least)
    while sizes[-1] < most:
        size *= step
        if (rounded := min(round(size / unit) * unit, most)) > sizes[-1]:
            sizes.append(rounded)
    return sizes


SIZES: Sequence[int] = growing(LEAST, MOST, STEP, 512)
COUNTS: Sequence[int] = growing(1, MOST_RANGES, STEP, 1)


@dataclass(frozen=True)
class Step:
    """From one size to the next: seconds of each, and the ratio."""

    what: str
    before: int
    after: int
    seconds: tuple[float, float]
    ratio: Spread


async def _caches(manager: CacheManager, cluster_id: int) -> list[Cache]:
    """Make a cache for each size, and one with many small blocks, from the pool."""
    shapes = [(2, size) for size in SIZES] + [(2 * MOST_RANGES, RANGE)]
    made = []
    for model, (blocks, size) in enumerate(shapes):
        desc = CacheDesc(1, [blocks, size], DataType.DT_UINT8)
        cache = await manager.allocate_blocks_cache(desc, BlocksCacheKey(cluster_id, model))
        for array in manager.arrays(cache):
            array[:] = 1
        made.append(cache)
    return made


@asynccontextmanager
async def _peer() -> AsyncIterator[object]:
    async with open_cluster(PEER, mem_pool_cfg=POOL) as peer:
        await _caches(peer.datadist.cache_manager, PEER)
        yield peer.datadist.listen_address


Pull = Callable[[], Awaitable[object]]


@asynccontextmanager
async def _pulls() -> AsyncIterator[tuple[list[Pull], list[Pull]]]:
    """Return a pull for each size, and one for each number of ranges."""
    async with process_of(_peer) as (_, address), open_cluster(1, device_id=1, mem_pool_cfg=POOL) as hub:
        await link_to(hub.datadist, info_of(PEER, address))
        manager = hub.datadist.cache_manager
        caches = await _caches(manager, 1)

        def pull(model: int, sources: list[int], targets: list[int]) -> Pull:
            key, cache = BlocksCacheKey(PEER, model), caches[model]
            return lambda: manager.pull_blocks(key, cache, sources, targets)

        sizes = [pull(model, [1], [0]) for model in range(len(SIZES))]
        ranges = [pull(len(SIZES), list(range(0, 2 * count, 2)), list(range(1, 2 * count, 2))) for count in COUNTS]
        yield sizes, ranges


async def _seconds(pull: Pull) -> float:
    began = now()
    await pull()
    return now() - began


async def _steps(what: str, values: Sequence[int], pulls: Sequence[Pull], turns: int) -> Iterator[Step]:
    """Time all pulls in each turn, from the smallest to the largest; return the step to each from the one before it."""
    times: list[list[float]] = [[] for _ in pulls]
    for turn in range(turns + 1):
        for pull, found in zip(pulls, times, strict=True):
            seconds = await _seconds(pull)
            if turn:
                found.append(seconds)
    return (
        Step(what, before, after, (median(first), median(second)), Spread.of([b / a for a, b in pairs]))
        for (before, after), (first, second) in zip(pairwise(values), pairwise(times), strict=True)
        for pairs in [list(zip(first, second, strict=True))]
    )


async def steps(turns: int = 60) -> list[Step]:
    """Measure each step from one size, or one number of ranges, to the next."""
    async with _pulls() as (sizes, ranges):
        return [*await _steps("bytes", SIZES, sizes, turns), *await _steps("ranges", COUNTS, ranges, turns)]


def largest(found: Sequence[Step]) -> dict[str, Step]:
    """Return the largest step of each kind."""
    return {step.what: step for step in sorted(found, key=lambda each: each.ratio.median)}


def rows(found: Sequence[Step]) -> Iterator[dict[str, object]]:
    for step in found:
        yield {
            "of": step.what,
            "from": step.before,
            "to": step.after,
            "us": 1e6 * step.seconds[0],
            "us after": 1e6 * step.seconds[1],
            "step": step.ratio,
            "it is": "reached" if step.ratio.median <= BAR else "missed",
        }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--turns", type=int, default=60, help="for each step")
    given = parser.parse_args()
    report("cliffs: steps between neighbouring sizes", list(rows(asyncio.run(steps(given.turns)))), given.json)


if __name__ == "__main__":
    main()
