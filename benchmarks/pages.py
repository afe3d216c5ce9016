"""Measure what the kernel needs to copy private memory, by the size of its pages.

`process_vm_readv` runs on two threads, 1 MiB per call. In turns with it, the same ranges are copied between shared memory
with non-temporal stores. 128 MiB, scattered. softnpu moves the caller's memory to pages of 2 MiB when it is registered.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodatadist import empty
from aiodatadist._native.library import ring
from benchmarks.common import arguments, now, report
from benchmarks.copies import THREADS, ranges_of

TOTAL, CALL, HUGE_PAGE = 128 << 20, 1 << 20, 2 << 20
BLOCKS_OF = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
MADV_COLLAPSE = 25
"""Linux 6.1; Python does not name it."""

Pairs = list[tuple[int, int]]
Array = NDArray[np.uint8]
Work = Callable[[], object]


class IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_readv.restype = ctypes.c_ssize_t
_RANGES = (ctypes.c_void_p, ctypes.c_ulong)
libc.process_vm_readv.argtypes = [ctypes.c_int, *_RANGES, *_RANGES, ctypes.c_ulong]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def private(advice: int) -> Array:
    """Twice as many bytes as are copied, all touched.

    Raises:
        OSError: the kernel refused the advice: it has no pages of 2 MiB to give, or is too old.
    """
    area = np.frombuffer(mmap.mmap(-1, 2 * TOTAL + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    skip = -area.ctypes.data % HUGE_PAGE
    array = area[skip : skip + 2 * TOTAL]
    array[:] = 1
    if libc.madvise(array.ctypes.data, array.nbytes, advice):
        raise OSError(ctypes.get_errno(), f"madvise({advice}): {os.strerror(ctypes.get_errno())}")
    return array


def kernel_copy(source: Array, target: Array, pairs: Pairs, block: int) -> Work:
    """Read memory of this process through the kernel. The path is the same as for another process."""
    each = CALL // block
    calls = [
        (iovecs(target, [b for _, b in part], block), iovecs(source, [a for a, _ in part], block))
        for part in (pairs[i : i + each] for i in range(0, len(pairs), each))
    ]
    return partial(read_all, calls)


def iovecs(array: Array, numbers: list[int], block: int) -> Any:
    return (IoVec * len(numbers))(*[IoVec(array.ctypes.data + number * block, block) for number in numbers])


def read_all(calls: list[tuple[Any, Any]]) -> None:
    for target, source in calls:
        if libc.process_vm_readv(os.getpid(), target, len(target), source, len(source), 0) != CALL:
            raise OSError(ctypes.get_errno(), f"process_vm_readv: {os.strerror(ctypes.get_errno())}")


def streamed_copy(source: Array, target: Array, pairs: Pairs, block: int) -> Work:
    ranges = ranges_of(source.ctypes.data, target.ctypes.data, pairs, block)
    return partial(ring.ring_copy, ranges, len(pairs), TOTAL)


def shares(pairs: Pairs) -> Iterator[Pairs]:
    size = len(pairs) // THREADS
    return (pairs[i : i + size] for i in range(0, len(pairs), size))


def seconds_of(threads: ThreadPoolExecutor, works: list[Work]) -> tuple[float, float]:
    """Return the wall time and the processor time of the works, run on the threads."""
    started, before = now(), time.process_time()
    list(threads.map(lambda work: work(), works))
    return now() - started, time.process_time() - before


def rows(seconds: float = 1.0) -> Iterator[dict[str, Any]]:
    memories = {
        "shared, non-temporal": (streamed_copy, [empty((2 * TOTAL,), np.uint8) for _ in range(2)]),
        "private, pages of 4 KiB": (kernel_copy, [private(mmap.MADV_NOHUGEPAGE) for _ in range(2)]),
        "private, pages of 2 MiB": (kernel_copy, [private(MADV_COLLAPSE) for _ in range(2)]),
    }
    for array in memories["shared, non-temporal"][1]:
        array[:] = 1
    with ThreadPoolExecutor(THREADS) as threads:
        for block in BLOCKS_OF:
            numbers = [2 * i for i in range(TOTAL // block)]
            pairs = list(zip(random.sample(numbers, len(numbers)), random.sample(numbers, len(numbers)), strict=True))
            works: dict[str, list[Work]] = {
                name: [copy(source, target, share, block) for share in shares(pairs)]
                for name, (copy, (source, target)) in memories.items()
            }
            yield from compared(threads, block, works, seconds)


def compared(
    threads: ThreadPoolExecutor, block: int, works: dict[str, list[Work]], seconds: float
) -> Iterator[dict[str, Any]]:
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    end = now() + seconds * len(works)
    while now() < end:
        for name, work in works.items():
            taken[name].append(seconds_of(threads, work))
    clock, processor = ({name: statistics.median(t[i] for t in taken[name]) for name in works} for i in range(2))
    first = next(iter(works))
    for name in works:
        yield {
            "block": f"{block >> 10} KiB",
            "memory": name,
            "GB/s": TOTAL / clock[name] / 1e9,
            "of the first": clock[first] / clock[name],
            "CPU s per GB": processor[name] / TOTAL * 1e9,
            "of the first's": processor[name] / processor[first],
        }


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    report("pages: private memory, copied by the kernel", list(rows()), given.json)


if __name__ == "__main__":
    main()
