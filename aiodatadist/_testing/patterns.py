"""Contents that name their place: a misplaced block tells where it came from."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from aiodatadist._device import Memory
from aiodatadist._values.descriptors import Cache


def pattern(owner: int, tensor: int, piece: int, nbytes: int) -> bytes:
    """Return ``nbytes`` that stand for one block or slot of one tensor of one cluster."""
    unit = struct.pack("<QIIQ", owner, tensor, piece, 0x5A5A5A5A5A5A5A5A)
    return (unit * (nbytes // len(unit) + 1))[:nbytes]


def _offset(memory: Memory, cache: Cache, tensor: int, piece: int) -> int:
    return cache.tensor_addrs[tensor] - memory.address + piece * cache.cache_desc.stride


def stamp(memory: Memory, cache: Cache, owner: int) -> None:
    """Fill every block or slot of a cache that lies in ``memory`` with its own pattern."""
    stride = cache.cache_desc.stride
    view = memory.view()
    for tensor in range(cache.cache_desc.num_tensors):
        for piece in range(cache.cache_desc.shape[0]):
            at = _offset(memory, cache, tensor, piece)
            view[at : at + stride] = pattern(owner, tensor, piece, stride)


def verify(
    memory: Memory, cache: Cache, expected: Iterable[tuple[int, int, int, int]], owner: int | None = None
) -> None:
    """Compare pieces byte by byte: ``(tensor, piece, owner, owner's piece)`` says whose pattern a piece must have.

    Args:
        owner: pieces that are not listed must have this cluster's own pattern. If None, they are not compared.

    Raises:
        AssertionError: if a piece has other contents. The message names the piece and its contents.
    """
    stride = cache.cache_desc.stride
    places = {(tensor, piece): (whose, source) for tensor, piece, whose, source in expected}
    view = memory.view()
    for tensor in range(cache.cache_desc.num_tensors):
        for piece in range(cache.cache_desc.shape[0]):
            place = places.get((tensor, piece), None if owner is None else (owner, piece))
            if place is None:
                continue
            at = _offset(memory, cache, tensor, piece)
            found = bytes(view[at : at + stride])
            if found != pattern(place[0], tensor, place[1], stride):
                begin = struct.unpack_from("<QII", found.ljust(16, b"\0"))
                raise AssertionError(
                    f"tensor {tensor} piece {piece}: wanted {place}, found (owner, tensor, piece) {begin}"
                )
