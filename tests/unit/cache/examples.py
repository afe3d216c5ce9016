"""Caches of any geometry, here and at a peer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from aiodatadist import CacheDesc, CacheKey, DataType
from aiodatadist._cache.table import CacheTable, Entry

GAP = 4096
"""Bytes between two tensors that belong to neither."""
SOURCE, TARGET = 2**48, 2**32
"""Where the first tensor is."""


@dataclass(frozen=True)
class Shape:
    """A cache without an owner: what a plan has to know."""

    cache_id: int
    blocks: bool
    pieces: int
    stride: int
    addresses: array[int]


def addresses(tensors: int, nbytes: int, start: int = TARGET) -> list[int]:
    return [start + i * (nbytes + GAP) for i in range(tensors)]


def source(tensors: int, pieces: int, stride: int, *, blocks: bool) -> Shape:
    return Shape(5, blocks, pieces, stride, array("Q", addresses(tensors, pieces * stride, SOURCE)))


def target(tensors: int, pieces: int, stride: int, *, blocks: bool) -> Shape:
    return Shape(6, blocks, pieces, stride, array("Q", addresses(tensors, pieces * stride)))


def local(
    tensors: int,
    pieces: int,
    stride: int,
    *,
    blocks: bool,
    keys: Sequence[CacheKey] = (),
    in_: CacheTable | None = None,
) -> Entry:
    """Add a cache of this cluster, in memory of the caller's."""
    desc = CacheDesc(tensors, [pieces, stride], DataType.DT_INT8)
    table = CacheTable() if in_ is None else in_
    return table.add(desc, addresses(tensors, desc.size), blocks, table.check_slots(desc, keys), True)


def place(where: Sequence[int], pieces: int, stride: int, address: int, nbytes: int) -> tuple[int, int, int]:
    """Return the one tensor and piece that hold these bytes, and their offset in the piece."""
    inside = [t for t, base in enumerate(where) if base <= address and address + nbytes <= base + pieces * stride]
    assert len(inside) == 1, f"{nbytes} bytes at {address:#x} lie in {len(inside)} tensors"
    piece, offset = divmod(address - where[inside[0]], stride)
    assert offset + nbytes <= stride, f"{nbytes} bytes at {offset} leave piece {piece}"
    return inside[0], piece, offset


async def quiet(entry: Entry) -> None:
    """Wait until no transfer uses a cache and no peer may reach it, or it is poisoned."""
    while not entry.is_quiet and not entry.is_poisoned:
        await entry.wait_change()
