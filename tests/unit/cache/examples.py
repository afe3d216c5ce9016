"""Caches of both ends, of any geometry."""

from __future__ import annotations

from collections.abc import Sequence

from aiodatadist import CacheDesc, CacheKeyByIdAndIndex, DataType
from aiodatadist.cache.catalogue import Catalogue, RemoteCache
from aiodatadist.cache.table import CacheTable, Entry
from aiodatadist.wire.messages import CacheEntry

GAP = 4096
"""Bytes between two tensors that belong to nobody."""


def addresses(tensors: int, nbytes: int, start: int = 2**32) -> list[int]:
    return [start + i * (nbytes + GAP) for i in range(tensors)]


def local(tensors: int, pieces: int, stride: int, *, blocks: bool) -> Entry:
    """A cache of this cluster."""
    desc = CacheDesc(tensors, [pieces, stride], DataType.DT_INT8)
    where = addresses(tensors, desc.size)
    table = CacheTable()
    return table.add_blocks(desc, where, None, True) if blocks else table.add_contiguous(desc, where, [], True)


def remote(tensors: int, pieces: int, stride: int, *, blocks: bool, slot: int = 0) -> RemoteCache:
    """A cache that the peer published, and a slot of it."""
    entry = CacheEntry(
        cache_id=5,
        blocks=blocks,
        placement=1,
        data_type=2,
        pieces=pieces,
        stride=stride,
        addresses=addresses(tensors, pieces * stride, 2**48),
    )
    return Catalogue(7, [entry]).find(CacheKeyByIdAndIndex(7, 5, slot))


def place(where: Sequence[int], pieces: int, stride: int, address: int, nbytes: int) -> tuple[int, int, int]:
    """The tensor and the piece that hold these bytes, and where in it they begin. They lie in exactly one."""
    inside = [t for t, base in enumerate(where) if base <= address and address + nbytes <= base + pieces * stride]
    assert len(inside) == 1, f"{nbytes} bytes at {address:#x} lie in {len(inside)} tensors"
    piece, offset = divmod(address - where[inside[0]], stride)
    assert offset + nbytes <= stride, f"{nbytes} bytes at {offset} leave piece {piece}"
    return inside[0], piece, offset
