"""What two threads copy between shared memory of one process, by the processor's non-temporal stores: what copiers could do
at best. 128 MiB in ranges of 1 MiB, scattered, as `aiodatadist bench` has them.
"""

from __future__ import annotations

import random
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from aiodatadist import empty
from aiodatadist._native.library import ffi, ring
from benchmarks.common import arguments, now, report

BLOCK, BLOCKS = 1 << 20, 128
THREADS = 2


def ranges_of(source: int, target: int, pairs: list[tuple[int, int]], block: int = BLOCK) -> Any:
    made = ffi.new("HcclOneSideOpDesc[]", len(pairs))
    for each, (a, b) in zip(made, pairs, strict=True):
        each.localAddr = ffi.cast("void *", target + b * block)
        each.remoteAddr = ffi.cast("void *", source + a * block)
        each.count = block
    return made


def gigabytes_per_second(seconds: float = 1.0) -> list[float]:
    """Of each round, for so long."""
    source, target = (empty((2 * BLOCKS, BLOCK), np.uint8) for _ in range(2))
    source[:], target[:] = 1, 0
    numbers = [2 * i for i in range(BLOCKS)]
    pairs = list(zip(random.sample(numbers, BLOCKS), random.sample(numbers, BLOCKS), strict=True))
    share = BLOCKS // THREADS
    parts = [ranges_of(source.ctypes.data, target.ctypes.data, pairs[i : i + share]) for i in range(0, BLOCKS, share)]
    rates = []
    with ThreadPoolExecutor(THREADS) as threads:
        end = now() + seconds
        while now() < end:
            started = now()
            list(threads.map(lambda part: ring.ring_copy(part, share, BLOCK * BLOCKS), parts))
            rates.append(BLOCK * BLOCKS / (now() - started) / 1e9)
    assert int(target.sum(dtype=np.int64)) == BLOCK * BLOCKS
    return rates


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    rates = sorted(gigabytes_per_second())
    row = {"threads": THREADS, "GB/s": f"{statistics.median(rates):.2f}", "most": f"{rates[-1]:.2f}"}
    report("copies: the processor's own, without its caches", [row], given.json)


if __name__ == "__main__":
    main()
