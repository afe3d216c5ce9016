"""How much of what two threads can copy has a pull of pool memory?

128 MiB in blocks of 64 KiB, or of 1 MiB, scattered, as `aiodatadist bench` has them: pulled from another process, awaited;
and in turns with it the same blocks copied between shared memory of one process, by the processor's non-temporal stores on
two threads. The ratio is that of each turn. Bar, on two cores: at least 0.85.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMStatusCode, empty
from aiodatadist._native.library import ffi, ring
from aiodatadist.testing import Cluster, open_cluster
from benchmarks.common import Spread, arguments, now, report

TOTAL = 128 << 20
BLOCKS = (64 << 10, 1 << 20)
TENSORS, THREADS = 8, 2
POOL = '{"memory_size": 1073741824}'


@dataclass(frozen=True)
class Share:
    """Of one size of blocks. GB/s, and the pull's of the copies'."""

    block: int
    pulled: Spread
    copied: Spread
    ratio: Spread


def ranges_of(source: int, target: int, pairs: Sequence[tuple[int, int]], block: int) -> Any:
    made = ffi.new("HcclOneSideOpDesc[]", len(pairs))
    for each, (a, b) in zip(made, pairs, strict=True):
        each.localAddr = ffi.cast("void *", target + b * block)
        each.remoteAddr = ffi.cast("void *", source + a * block)
        each.count = block
    return made


def _scattered(count: int) -> list[int]:
    """Every other number, in any order."""
    return random.sample(range(0, 2 * count, 2), count)


class Copies:
    """By two threads of this process, of blocks of each size."""

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
        """Seconds."""
        began = now()
        list(self._threads.map(lambda part: ring.ring_copy(part, len(part), TOTAL), self._parts[block]))
        return now() - began


class Pulls:
    """From another process, into pool memory."""

    def __init__(self, hub: Cluster, peer: int) -> None:
        self._manager, self._peer = hub.datadist.cache_manager, peer
        self._caches: dict[int, Any] = {}
        self._numbers = {block: _scattered(TOTAL // block // TENSORS) for block in BLOCKS}

    async def prepare(self) -> None:
        self._caches = await _caches(self._manager, 1)

    async def run(self, block: int) -> float:
        """Seconds."""
        numbers, key = self._numbers[block], BlocksCacheKey(self._peer, BLOCKS.index(block))
        began = now()
        await self._manager.pull_blocks(key, self._caches[block], numbers, numbers[::-1])
        return now() - began


async def _caches(manager: Any, cluster_id: int) -> dict[int, Any]:
    """One for each size of blocks, twice as large as what is moved."""
    caches = {}
    for model, block in enumerate(BLOCKS):
        desc = CacheDesc(TENSORS, [2 * TOTAL // block // TENSORS, block], DataType.DT_UINT8)
        caches[block] = await manager.allocate_blocks_cache(desc, BlocksCacheKey(cluster_id, model))
        for array in manager.arrays(caches[block]):
            array[:] = 1
    return caches


def _host_peer(port: Connection) -> None:
    async def host() -> None:
        async with open_cluster(2, mem_pool_cfg=POOL) as peer:
            await _caches(peer.datadist.cache_manager, 2)
            port.send(peer.datadist.listen_address)
            await asyncio.get_running_loop().run_in_executor(None, port.recv)

    asyncio.run(host())


@asynccontextmanager
async def _linked() -> AsyncIterator[Pulls]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_host_peer, args=(theirs,), daemon=True)
    process.start()
    try:
        info = LLMClusterInfo(2)
        info.append_remote_ip_info(*await asyncio.get_running_loop().run_in_executor(None, ours.recv))
        async with open_cluster(1, device_id=1, mem_pool_cfg=POOL) as hub:
            linked = await hub.datadist.link_clusters([info], 20_000)
            if linked[0] is not LLMStatusCode.LLM_SUCCESS:
                raise SystemExit(f"the peer could not be linked: {linked.errors}")
            pulls = Pulls(hub, 2)
            await pulls.prepare()
            yield pulls
    finally:
        process.kill()
        process.join()


async def shares(seconds: float = 2.0) -> list[Share]:
    """Of each size of blocks, in turns for so many seconds each."""
    times: dict[int, list[tuple[float, float]]] = {block: [] for block in BLOCKS}
    with ThreadPoolExecutor(THREADS) as threads:
        copies = Copies(threads)
        async with _linked() as pulls:
            for block in BLOCKS:
                copies.run(block), await pulls.run(block)
            end = now() + seconds * len(BLOCKS)
            while now() < end:
                for block, found in times.items():
                    found.append((await pulls.run(block), copies.run(block)))
    return [_share(block, found) for block, found in times.items()]


def _share(block: int, times: Sequence[tuple[float, float]]) -> Share:
    pulled, copied = ([TOTAL / each / 1e9 for each in side] for side in zip(*times, strict=True))
    return Share(block, Spread.of(pulled), Spread.of(copied), Spread.of([b / a for a, b in times]))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size of blocks")
    given = parser.parse_args()
    rows = [
        {
            "block KiB": each.block >> 10,
            "pull GB/s": f"{each.pulled}",
            "two threads' copies": f"{each.copied}",
            "ratio": f"{each.ratio}",
        }
        for each in asyncio.run(shares(given.seconds))
    ]
    report("copies: a pull against the processor's own, past its caches", rows, given.json)


if __name__ == "__main__":
    main()
