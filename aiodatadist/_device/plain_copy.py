"""The baseline for transfers: one thread, one memcpy per range, nothing else."""

from __future__ import annotations

import time
from array import array

from aiodatadist._native.library import ffi, ring


def plain_copy_seconds(targets: array[int], sources: array[int], nbytes: int, rounds: int = 1) -> float:
    """Return the seconds for copying ranges of ``nbytes`` in memory that the host can address, ``rounds`` times.

    Runs without the interpreter lock: call it in a thread.

    Args:
        targets, sources: addresses, of type ``"Q"``. They are not checked.
    """
    start = time.perf_counter()
    ring.plain_copy(
        ffi.from_buffer("uint64_t[]", targets), ffi.from_buffer("uint64_t[]", sources), len(targets), nbytes, rounds
    )
    return time.perf_counter() - start
