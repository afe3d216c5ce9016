"""The way from "these blocks of that cache" to a grid of byte ranges. Pure; all rules on two caches' geometry are here.

Plans are made from source to destination, whichever of the two is here: in the grids the destination is the local side.
A caller that has the source uses :meth:`~aiodatadist._values.grid.Grid.mirrored`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aiodatadist._native.library import ffi, ring
from aiodatadist._values.grid import Grid, Side, blocks_for, indexes
from aiodatadist._values.selection import BlockParts, Geometry, Layers, Selection
from aiodatadist.errors import CacheNotFound, ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._cache.catalogue import RemoteCache


def plan(
    selection: Selection, source: Geometry, target: Geometry, src_slot: int | None = None, dst_slot: int | None = None
) -> Grid:
    """Return the places of a selection's bytes at both ends. Only this function chooses how they are cut.

    Args:
        src_slot, dst_slot: the slot that a key names at that end, instead of the selection's.

    Raises:
        ParamInvalid: if the caches do not fit each other or the selection.
    """
    src_slot = selection.src_slot if src_slot is None else src_slot
    dst_slot = selection.dst_slot if dst_slot is None else dst_slot
    if dst_slot and target.blocks:
        raise ParamInvalid(f"batch index {dst_slot}: the destination is a blocks cache, which has only 0")
    layers = selection.layers
    if selection.parts is not None:
        return parts_to_parts(source, target, selection, selection.parts)
    if selection.src_blocks:
        return blocks_to_blocks(source, target, selection.src_blocks, selection.dst_blocks, layers)
    if selection.dst_blocks:
        return slot_to_blocks(source, src_slot, target, selection.dst_blocks, layers)
    offsets = selection.offsets or (0, 0)
    return slot_to_slot(source, src_slot, target, dst_slot, selection.nbytes, layers, *offsets)


def target_side(selection: Selection, target: Geometry, nbytes: int) -> Side:
    """Return the local side that a plan for these would have, if all that is known of the source is the number of bytes.

    Raises:
        ParamInvalid: if this number of bytes does not fit the selection.
    """
    tensors = selection.layers.of_target(target)
    addresses, blocks = target.addresses[tensors.start : tensors.stop], selection.dst_blocks
    if selection.parts is not None:
        part = selection.parts.nbytes
        return Side(addresses, _numbered(target, blocks, selection.parts.dst, part, "destination"), part, part, part)
    stride = target.stride
    if selection.src_blocks:
        return Side(addresses, blocks, stride, stride, stride)
    if not blocks:
        offset = (selection.offsets or (0, 0))[1]
        starts = array("Q", [address + offset for address in addresses])
        return Side(starts, array("Q", [selection.dst_slot]), stride, selection.nbytes, selection.nbytes)
    each, rest = divmod(nbytes, len(addresses))
    tail = each - (len(blocks) - 1) * stride
    if rest or not 0 < tail <= stride:
        raise ParamInvalid(
            f"{nbytes} bytes in {len(addresses)} tensors: they do not fit {len(blocks)} blocks of {stride}"
        )
    return Side(addresses, blocks, stride, min(each, stride), tail)


def want_slot_there(remote: RemoteCache, slot: int) -> RemoteCache:
    """Return the peer's cache. Raises CacheNotFound if it has no such slot: then the key names no cache at all."""
    if slot >= (1 if remote.blocks else remote.pieces):
        raise CacheNotFound(f"the peer's cache {remote.cache_id} has no batch index {slot}: it has {remote.pieces}")
    return remote


def _tensors(source: Geometry, target: Geometry, layers: Layers) -> tuple[array[int], array[int]]:
    """Return the tensor addresses of both ends, paired: destination, source."""
    src, dst = layers.of_source(source), layers.of_target(target)
    if len(src) != len(dst):
        raise ParamInvalid(f"{len(src)} source tensors for {len(dst)} destination tensors: the numbers must be equal")
    return target.addresses[dst.start : dst.stop], source.addresses[src.start : src.stop]


def check_below(values: array[int], limit: int, name: str, whose: str) -> None:
    """Raise ParamInvalid if a block number is not below the number of blocks."""
    at = ring.ring_first_outside(ffi.from_buffer("uint64_t[]", values), len(values), limit)
    if at < len(values):
        raise ParamInvalid(f"{name}[{at}] is {values[at]}: the {whose} cache has {limit} blocks")


def are_below(values: array[int], limit: int) -> bool:
    """Return True if all block numbers are below a limit."""
    return int(ring.ring_first_outside(ffi.from_buffer("uint64_t[]", values), len(values), limit)) == len(values)


def check_once(values: array[int], name: str) -> None:
    """Raise ParamInvalid if a destination is named twice: one of the two sources would be lost, without a trace."""
    table = ffi.new("uint32_t[]", 4 * len(values))
    at = ring.ring_first_repeated(ffi.from_buffer("uint64_t[]", values), len(values), table)
    if at < len(values):
        first = values.index(values[at])
        raise ParamInvalid(
            f"{name}[{at}] is {values[at]}, as {name}[{first}] is: a call must name each destination only once"
        )


def _want_kind(cache: Geometry, blocks: bool, whose: str) -> None:
    if cache.blocks != blocks:
        kind, other = ("blocks", "contiguous") if blocks else ("contiguous", "blocks")
        raise ParamInvalid(f"the {whose} cache {cache.cache_id} is a {other} cache: must be a {kind} cache here")


def blocks_to_blocks(
    source: Geometry, target: Geometry, src: Sequence[int], dst: Sequence[int], layers: Layers
) -> Grid:
    """Return the grid in which block ``src[i]`` of the source goes to block ``dst[i]`` of the destination.

    An array is a selection's own copy, as C reads it, and is not copied again.
    """
    if not (source.blocks and target.blocks):
        _want_kind(source, True, "source")
        _want_kind(target, True, "destination")
    stride = target.stride
    if source.stride != stride:
        raise ParamInvalid(
            f"a block has {source.stride} bytes at the source and {stride} at the destination: they must be equal"
        )
    sources = src if isinstance(src, array) else indexes(src, "src_blocks")
    targets = dst if isinstance(dst, array) else indexes(dst, "dst_blocks")
    if len(sources) != len(targets):
        raise ParamInvalid(f"{len(sources)} src_blocks for {len(targets)} dst_blocks: they must have the same length")
    check_below(sources, source.pieces, "src_blocks", "source")
    check_below(targets, target.pieces, "dst_blocks", "destination")
    check_once(targets, "dst_blocks")
    to, fro = _tensors(source, target, layers)
    return Grid(to, fro, targets, sources, stride, stride, stride, stride)


def parts_to_parts(source: Geometry, target: Geometry, selection: Selection, parts: BlockParts) -> Grid:
    """Return the grid in which parts of the source's blocks go to parts of the destination's."""
    fro = _numbered(source, selection.src_blocks, parts.src, parts.nbytes, "source")
    check_once(selection.dst_blocks, "dst_blocks")
    to = _numbered(target, selection.dst_blocks, parts.dst, parts.nbytes, "destination")
    check_once(array("Q", parts.dst), "parts.dst")
    targets, sources = _tensors(source, target, selection.layers)
    return Grid(targets, sources, to, fro, parts.nbytes, parts.nbytes, parts.nbytes, parts.nbytes)


def _numbered(cache: Geometry, blocks: array[int], parts: Sequence[int], nbytes: int, whose: str) -> array[int]:
    """Return the numbers within the cache of parts that are numbered within some of its blocks."""
    _want_kind(cache, True, whose)
    if cache.stride % nbytes:
        raise ParamInvalid(f"a block of the {whose} has {cache.stride} bytes: must be a multiple of a part's {nbytes}")
    name, each = ("src" if whose == "source" else "dst"), cache.stride // nbytes
    check_below(blocks, cache.pieces, f"{name}_blocks", whose)
    found = array("Q", parts)
    limit = min(len(blocks) * each, 2**64 - 1)  # capped, because a peer may claim blocks of any size
    at = ring.ring_first_outside(ffi.from_buffer("uint64_t[]", found), len(found), limit)
    if at < len(found):
        raise ParamInvalid(f"parts.{name}[{at}] is {found[at]}: {len(blocks)} blocks of {each} parts are named")
    ring.ring_number_parts(
        ffi.from_buffer("uint64_t[]", found), len(found), ffi.from_buffer("uint64_t[]", blocks), each
    )
    return found


def slot_to_blocks(source: Geometry, slot: int, target: Geometry, dst: Sequence[int], layers: Layers) -> Grid:
    """Return the grid in which a batch slot of a contiguous cache is cut into chunks that go to the blocks ``dst``."""
    _want_kind(source, False, "source")
    _want_kind(target, True, "destination")
    _want_slot(source, slot, "source")
    block = target.stride
    targets = indexes(dst, "dst_blocks")
    needed = blocks_for(source.stride, block)
    if len(targets) != needed:
        raise ParamInvalid(
            f"{len(targets)} dst_blocks: a slot of {source.stride} bytes needs exactly {needed} blocks of {block} bytes"
        )
    check_below(targets, target.pieces, "dst_blocks", "destination")
    check_once(targets, "dst_blocks")
    to, fro = _tensors(source, target, layers)
    offset = slot * source.stride
    starts = array("Q", [address + offset for address in fro])
    tail = source.stride - (needed - 1) * block
    return Grid(to, starts, targets, array("Q", range(needed)), block, block, min(block, source.stride), tail)


def _want_slot(cache: Geometry, slot: int, whose: str) -> None:
    if slot >= cache.pieces:
        raise ParamInvalid(f"batch index {slot}: the {whose} cache {cache.cache_id} has {cache.pieces} slots")


def slot_to_slot(
    source: Geometry,
    src_slot: int,
    target: Geometry,
    dst_slot: int,
    nbytes: int,
    layers: Layers,
    src_offset: int = 0,
    dst_offset: int = 0,
) -> Grid:
    """Return the grid in which ``nbytes`` of one contiguous cache's slot go to a slot of another.

    Each end may have an offset.
    """
    _want_kind(source, False, "source")
    _want_kind(target, False, "destination")
    _want_slot(source, src_slot, "source")
    _want_slot(target, dst_slot, "destination")
    ends = (("source", source.stride, src_offset), ("destination", target.stride, dst_offset))
    for whose, limit, offset in ends:
        if offset >= limit:
            raise ParamInvalid(f"offset is {offset}: a slot of the {whose} cache has only {limit} bytes")
        if nbytes > limit - offset:
            raise ParamInvalid(f"{nbytes} bytes from {offset} do not fit: a slot of the {whose} cache has {limit}")
    to, fro = _tensors(source, target, layers)
    if src_offset or dst_offset:
        to, fro = array("Q", [a + dst_offset for a in to]), array("Q", [a + src_offset for a in fro])
    return Grid(to, fro, array("Q", [dst_slot]), array("Q", [src_slot]), target.stride, source.stride, nbytes, nbytes)


def inside(cache: Geometry, pairs: Mapping[int, Sequence[int]]) -> Grid:
    """Return the grid in which block ``src`` of one blocks cache goes to each block of ``pairs[src]``."""
    src = [source for source, targets in pairs.items() for _ in targets]
    dst = [target for targets in pairs.values() for target in targets]
    return blocks_to_blocks(cache, cache, src, dst, Layers())
