"""Compare pulls of pool memory with what two threads can copy, and pulls of the caller's memory with pulls of pool memory.

128 MiB in scattered blocks of 16 KiB to 2 MiB, as in `aiodatadist bench`, are pulled from another process and awaited:
first from a pool, then from numpy's arrays. In turns with the pulls, the same blocks are copied between shared memory of
one process, with the processor's non-temporal stores on two threads. Each ratio is taken within one turn. Bars, on two
cores: 0.85 of the copies, and 0.6 of a pool's memory. The benchmark needs 6 GiB of memory.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, CacheManager, DataType, empty
from aiodatadist._native.library import ffi, ring
from aiodatadist.testing import Cluster, open_cluster
from benchmarks.common import Spread, arguments, now, report
from benchmarks.peers import info_of, link_to, process_of

TOTAL = 128 << 20
BLOCKS = tuple(kib << 10 for kib in (16, 64, 256, 1024, 2048))
TENSORS, THREADS = 8, 2
POOL = '{"memory_size": 2147483648}'


@dataclass(frozen=True)
class Share:
    """Speeds in GB/s for one size of blocks, and the ratio of each pull's speed to the next faster one's."""

    block: int
    pool: Spread
    user: Spread
    copies: Spread
    pool_of_copies: Spread
    user_of_pool: Spread


def ranges_of(source: int, target: int, pairs: Sequence[tuple[int, int]], block: int) -> Any:
    made = ffi.new("HcclOneSideOpDesc[]", len(pairs))
    for each, (a, b) in zip(made, pairs, strict=True):
        each.localAddr = ffi.cast("void *", target + b * block)
        each.remoteAddr = ffi.cast("void *", source + a * block)
        each.count = block
    return made


def _scattered(count: int) -> list[int]:
    """Return every other number, in random order."""
    return random.sample(range(0, 2 * count, 2), count)


class Copies:
    """Copies by two threads of this process, of blocks of each size."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._memory = [empty((2 * TOTAL,), np.uint8) for _ in range(2)]
        for array in self._memory:
            array[:] = 1
        source, target = (array.ctypes.data for array in self._memory)
        self._parts: dict[int, list[Any]] = {}
        for block in BLOCKS:
            pairs = list(zip(_scattered(TOTAL // block), _scattered(TOTAL // block), strict=True))
            self._parts[block] = [ranges_of(source, target, pairs[i::THREADS], block) for i in range(THREADS)]

    def run(self, block: int) -> float:
        """Copy blocks of this size and return the seconds."""
        began = now()
        list(self._threads.map(lambda part: ring.ring_copy(part, len(part), TOTAL), self._parts[block]))
        return now() - began


class Pulls:
    """Pulls from another process."""

    def __init__(self, hub: Cluster, peer: int) -> None:
        self._manager, self._peer = hub.datadist.cache_manager, peer
        self._caches: list[Cache] = []
        self._numbers = {block: _scattered(TOTAL // block // TENSORS) for block in BLOCKS}

    async def prepare(self) -> None:
        self._caches = await _caches(self._manager, 1)

    async def run(self, block: int, *, user: bool) -> float:
        """Pull blocks of this size and return the seconds."""
        numbers, model = self._numbers[block], 2 * BLOCKS.index(block) + user
        began = now()
        await self._manager.pull_blocks(BlocksCacheKey(self._peer, model), self._caches[model], numbers, numbers[::-1])
        return now() - began


async def _caches(manager: CacheManager, cluster_id: int) -> list[Cache]:
    """Make two caches for each size of blocks, of the pool and of arrays, each twice as large as what is moved."""
    caches: list[Cache] = []
    for block in BLOCKS:
        desc = CacheDesc(TENSORS, [2 * TOTAL // block // TENSORS, block], DataType.DT_UINT8)
        pool = await manager.allocate_blocks_cache(desc, BlocksCacheKey(cluster_id, len(caches)))
        for array in manager.arrays(pool):
            array[:] = 1
        arrays = [np.ones(desc.shape, np.uint8) for _ in range(TENSORS)]
        key = BlocksCacheKey(cluster_id, len(caches) + 1)
        caches += [pool, await manager.register_blocks_cache(desc, arrays, key)]
    return caches


@asynccontextmanager
async def _peer() -> AsyncIterator[object]:
    async with open_cluster(2, mem_pool_cfg=POOL) as peer:
        await _caches(peer.datadist.cache_manager, 2)
        yield peer.datadist.listen_address


@asynccontextmanager
async def _linked() -> AsyncIterator[Pulls]:
    async with process_of(_peer) as (_, address), open_cluster(1, device_id=1, mem_pool_cfg=POOL) as hub:
        await link_to(hub.datadist, info_of(2, address))
        pulls = Pulls(hub, 2)
        await pulls.prepare()
        yield pulls


async def shares(seconds: float = 2.0) -> list[Share]:
    """Measure each size of blocks in turns, for ``seconds`` each on average."""
    times: dict[int, list[tuple[float, float, float]]] = {block: [] for block in BLOCKS}
    with ThreadPoolExecutor(THREADS) as threads:
        copies = Copies(threads)
        async with _linked() as pulls:

            async def turn(block: int) -> tuple[float, float, float]:
                return await pulls.run(block, user=False), await pulls.run(block, user=True), copies.run(block)

            for block in BLOCKS:
                await turn(block)
            end = now() + seconds * len(BLOCKS)
            while now() < end:
                for block, found in times.items():
                    found.append(await turn(block))
    return [_share(block, found) for block, found in times.items()]


def _share(block: int, times: Sequence[tuple[float, float, float]]) -> Share:
    pool, user, copies = (Spread.of([TOTAL / each / 1e9 for each in side]) for side in zip(*times, strict=True))
    of_copies, of_pool = Spread.of([c / p for p, _, c in times]), Spread.of([p / u for p, u, _ in times])
    return Share(block, pool, user, copies, of_copies, of_pool)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size of blocks")
    given = parser.parse_args()
    rows = [
        {
            "block KiB": each.block >> 10,
            "pool GB/s": each.pool,
            "user GB/s": each.user,
            "two threads' copies": each.copies,
            "pool/copies": each.pool_of_copies,
            "user/pool": each.user_of_pool,
        }
        for each in asyncio.run(shares(given.seconds))
    ]
    report("copies: a pull against the processor's own, past its caches", rows, given.json)


if __name__ == "__main__":
    main()
