"""Time the first transfer into memory, and later ones: as it is after opening, and once the pools have been populated.

128 MiB in scattered blocks of 64 KiB are pulled from another process's pool, and pushed back to other blocks of it. In each
round both processes open new pools of 1 GiB: with `"populate": "use"`, and with the default, and wait until these have
their pages. Behind a pull of other blocks, the first pull, the first push, and later ones of the same blocks are timed.
Bar: once the pools are populated, a first transfer takes at most twice as long as a later one. The benchmark needs 3 GiB
of memory.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import anyio

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, CacheManager, DataType
from aiodatadist._native.library import ffi
from aiodatadist.testing import Cluster, open_cluster
from benchmarks.common import Spread, arguments, now, report
from benchmarks.peers import info_of, link_to, process_of

BLOCK, COUNT, TENSORS = 64 << 10, 256, 8
TOTAL = BLOCK * COUNT * TENSORS
SIZE = 1 << 30
PEER, BAR, LATER = 2, 2.0, 5


def _pool(populate: str) -> str:
    return json.dumps({"memory_size": SIZE, "populate": populate})


def _cache(manager: CacheManager, cluster_id: int) -> Any:
    desc = CacheDesc(TENSORS, [4 * COUNT, BLOCK], DataType.DT_UINT8)
    return manager.allocate_blocks_cache(desc, BlocksCacheKey(cluster_id))


def _address(cache: Cache) -> int:
    return min(cache.tensor_addrs)


async def _populated(cluster: Cluster, cache: Cache) -> None:
    """Wait until the whole cache has pages."""
    acl = cluster.datadist.device.runtime.acl
    start, nbytes = ffi.cast("void *", _address(cache)), 4 * TOTAL
    await _until(lambda: acl.softnpu_present(start, nbytes) == nbytes)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110, the kernel has no event for it
        await anyio.sleep(0.05)


def _mapped() -> bool:
    """Return True if the pages of both pools are in this process's tables."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return any(int(line.split()[1]) >= 2 * 4 * TOTAL >> 10 for line in lines if line.startswith("RssShmem:"))


@asynccontextmanager
async def _peer(populate: str) -> AsyncIterator[object]:
    """Open a cluster whose cache has been written to where it is pulled from."""
    async with open_cluster(PEER, mem_pool_cfg=_pool(populate)) as peer:
        manager = peer.datadist.cache_manager
        cache = await _cache(manager, PEER)
        if populate == "background":
            await _populated(peer, cache)
        for array in manager.arrays(cache):
            array[: 2 * COUNT] = 1
        yield peer.datadist.listen_address


async def _round(populate: str) -> dict[str, float]:
    """Return how many times as long as later ones the first transfers of each direction took."""
    async with (
        process_of(_peer, populate) as (_, address),
        open_cluster(1, device_id=1, mem_pool_cfg=_pool(populate)) as hub,
    ):
        await link_to(hub.datadist, info_of(PEER, address))
        manager = hub.datadist.cache_manager
        cache = await _cache(manager, 1)
        if populate == "background":
            await _populated(hub, cache)
            await _until(_mapped)
        here, there = list(range(0, 2 * COUNT, 2)), list(range(2 * COUNT, 4 * COUNT, 2))

        async def seconds(way: str) -> float:
            began = now()
            if way == "pull":
                await manager.pull_blocks(BlocksCacheKey(PEER), cache, here, there[::-1])
            else:
                await manager.push_blocks(BlocksCacheKey(PEER), cache, there, there[::-1])
            return now() - began

        # other blocks before: threads are started, and lanes opened
        beside = [number + 1 for number in here], [number + 1 for number in there]
        await manager.pull_blocks(BlocksCacheKey(PEER), cache, *beside)
        found = {}
        for way in ("pull", "push"):
            first = await seconds(way)
            found[way] = first / median([await seconds(way) for _ in range(LATER)])
        return found


def ratios(rounds: int) -> dict[tuple[str, str], Spread]:
    """Return how many times as long as later ones the first transfers took, by ``populate`` and direction."""
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for populate in ("use", "background"):
            for way, ratio in asyncio.run(_round(populate)).items():
                found.setdefault((populate, way), []).append(ratio)
            time.sleep(0.1)
    return {key: Spread.of(each) for key, each in sorted(found.items())}


def rows(rounds: int) -> Iterator[dict[str, object]]:
    for (populate, way), spread in ratios(rounds).items():
        reached = "-" if populate == "use" else "reached" if spread.median <= BAR else "missed"
        yield {"populate": populate, "first": way, "of a later one": spread, "it is": reached}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    report("first touch: the first transfer, times a later one", list(rows(given.rounds)), given.json)


if __name__ == "__main__":
    main()
