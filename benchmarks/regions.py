"""Compare pulls from regions of the caller's memory: how large they are, and what pages they are on.

128 MiB in scattered blocks of 256 KiB are pulled from another process, in turns: from its pool into a pool, and from regions
that it allocated itself into a region of 256 MiB of the same kind. The regions begin on pages of 4 KiB, as an allocator's do.
softnpu moves the small one to huge pages while it is registered, and the large one behind that, for which the other process
waits. The last one is under `MADV_NOHUGEPAGE`, and stays as it is. Bars: the large region is at least 0.9 times as fast as
the small one, the small one 0.75 times as fast as the pool, and the last one 0.5 times. A pool as large as the large region
shows what its mere size costs. `--cpu` compares processor time
instead, which a busy machine changes less.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, CacheManager, DataType
from aiodatadist.testing import open_cluster
from benchmarks.common import Spread, arguments, now, report
from benchmarks.peers import info_of, link_to, process_of

BLOCK, TOTAL, SMALL, HUGE_PAGE = 256 << 10, 128 << 20, 256 << 20, 2 << 20
PEER, PATIENCE = 2, 240
KINDS = ("pool", "small", "large", "no huge pages", "large pool")

libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def region(nbytes: int, *, may_be_huge: bool) -> NDArray[np.uint8]:
    """Return memory whose pages have 4 KiB, all of them touched."""
    area = np.frombuffer(mmap.mmap(-1, nbytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    array = area[-area.ctypes.data % HUGE_PAGE :][:nbytes]
    if not may_be_huge and libc.madvise(array.ctypes.data, array.nbytes, mmap.MADV_NOHUGEPAGE):
        raise OSError(ctypes.get_errno(), "madvise")
    array[::4096] = 1
    return array


async def caches(manager: CacheManager, cluster_id: int, large: int) -> list[Cache]:
    """Make a cache of one tensor for each kind of memory."""
    made = [await manager.allocate_blocks_cache(_desc(SMALL), BlocksCacheKey(cluster_id, 0))]
    for array in manager.arrays(made[0]):
        array[:] = 1
    for model, (nbytes, may_be_huge) in enumerate(((SMALL, True), (large, True), (SMALL, False)), 1):
        array = region(nbytes, may_be_huge=may_be_huge).reshape(-1, BLOCK)
        made.append(await manager.register_blocks_cache(_desc(nbytes), [array], BlocksCacheKey(cluster_id, model)))
    made.append(await manager.allocate_blocks_cache(_desc(large), BlocksCacheKey(cluster_id, 4)))
    for array in manager.arrays(made[-1]):
        array[:] = 1
    return made


def _pool(large: int) -> str:
    return json.dumps({"memory_size": SMALL + large})


def _desc(nbytes: int) -> CacheDesc:
    return CacheDesc(1, [nbytes // BLOCK, BLOCK], DataType.DT_UINT8)


def huge_bytes() -> int:
    """Return the bytes of this process that are on huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:")) << 10


@asynccontextmanager
async def _peer(large: int) -> AsyncIterator[object]:
    async with open_cluster(PEER, mem_pool_cfg=_pool(large)) as peer:
        kept = await caches(peer.datadist.cache_manager, PEER, large)
        with anyio.move_on_after(PATIENCE):
            while huge_bytes() < 0.98 * (SMALL + large):  # noqa: ASYNC110, the kernel has no event for it
                await anyio.sleep(0.5)
        yield peer.datadist.listen_address, huge_bytes() - SMALL
        del kept


def numbers(kind: str, large: int) -> list[int]:
    """Return scattered blocks over the whole of the peer's memory of this kind."""
    blocks = (large if kind.startswith("large") else SMALL) // BLOCK
    return random.sample(range(blocks), TOTAL // BLOCK)


async def times(large: int, turns: int, *, cpu: bool) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of the pulls from each kind of memory, and the share of the large one on huge pages."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    clock = time.process_time if cpu else now
    async with (
        process_of(_peer, large) as (_, (address, moved)),
        open_cluster(1, device_id=1, mem_pool_cfg=_pool(SMALL)) as hub,
    ):
        await link_to(hub.datadist, info_of(PEER, address))
        manager = hub.datadist.cache_manager
        mine = await caches(manager, 1, SMALL)
        for turn in range(turns + 1):
            for model, kind in enumerate(KINDS):
                target = list(range(0, 2 * TOTAL // BLOCK, 2))
                began = clock()
                await manager.pull_blocks(BlocksCacheKey(PEER, model), mine[model], numbers(kind, large), target)
                if turn:
                    found[kind].append(clock() - began)
    return found, moved / large


@dataclass(frozen=True)
class Ratio:
    """The speed of pulls from one kind of memory, as a multiple of the speed from another kind, with its bar."""

    what: str
    as_fast: Spread
    bar: float | None
    speed: Spread


def ratios(found: dict[str, list[float]]) -> Iterator[Ratio]:
    for what, kind, of, bar in (
        ("the large region, of the small one", "large", "small", 0.9),
        ("the small region, of the pool", "small", "pool", 0.75),
        ("memory without huge pages, of the pool", "no huge pages", "pool", 0.5),
        ("a pool as large, of the pool", "large pool", "pool", None),
        ("the large region, of a pool as large", "large", "large pool", None),
    ):
        speed = Spread.of([TOTAL / each / 1e9 for each in found[kind]])
        yield Ratio(what, Spread.of([b / a for a, b in zip(found[kind], found[of], strict=True)]), bar, speed)


def rows(found: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    for each in ratios(found):
        reached = "-" if each.bar is None else "reached" if each.as_fast.median >= each.bar else "missed"
        bar = "-" if each.bar is None else each.bar
        yield {"pull": each.what, "GB/s": each.speed, "as fast": each.as_fast, "bar": bar, "it is": reached}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--gib", type=int, default=4, help="of the large region")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--cpu", action="store_true", help="compare processor time")
    given = parser.parse_args()
    found, moved = asyncio.run(times(given.gib << 30, given.turns, cpu=given.cpu))
    what = f"regions of {given.gib} GiB, {moved:.0%} of it on huge pages, and of 256 MiB"
    report(f"{what}{'; processor time' if given.cpu else ''}", list(rows(found)), given.json)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
