"""CRC-32C of memory that the host can address."""

from __future__ import annotations

from array import array

from aiodatadist._native.library import ffi, ring
from aiodatadist._values.grid import Side


def is_fast() -> bool:
    """Return True if the processor has an instruction for CRC-32C, some GB/s faster than the tables used otherwise."""
    return bool(ring.checksum_is_fast())


def add_checksums(sums: array[int], first: int, side: Side) -> None:
    """Add the bytes of each block of a side, tensor by tensor, to the sums from position ``first`` on.

    Runs without the interpreter lock: call it in a thread.

    Args:
        sums: of type ``"I"``; 0 if nothing was added yet.
        side: its addresses must be readable by the host. They are not checked.
    """
    ring.checksum_blocks(
        *(ffi.from_buffer("uint32_t[]", sums) + first, _uint64s(side.addresses), len(side.addresses)),
        *(_uint64s(side.index), len(side.index), side.stride, side.nbytes, side.tail),
    )


def _uint64s(values: array[int]) -> object:
    return ffi.from_buffer("uint64_t[]", values)
