"""From "these blocks of that cache" to a grid of byte ranges. Pure; every rule that both ends' geometry has is here."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from aiodatadist._native.library import ffi, ring
from aiodatadist.cache.catalogue import RemoteCache
from aiodatadist.cache.table import Entry
from aiodatadist.errors import ParamInvalid
from aiodatadist.layout import Grid, blocks_for, indexes, tensor_range


@dataclass(frozen=True, slots=True)
class Layers:
    """Which layers of either end; None is all of them."""

    src: range | None = None
    dst: range | None = None
    tensors_per_layer: int = 2

    @property
    def is_all(self) -> bool:
        return self.src is None and self.dst is None


def _tensors(local: Entry, remote: RemoteCache, layers: Layers) -> tuple[array[int], array[int]]:
    """The tensor addresses of both ends, paired; the local cache is the destination."""
    mine, theirs = local.addresses, remote.addresses
    if not layers.is_all:
        dst = tensor_range(len(mine), layers.dst, layers.tensors_per_layer, "dst_layer_range")
        src = tensor_range(len(theirs), layers.src, layers.tensors_per_layer, "src_layer_range")
        mine, theirs = mine[dst.start : dst.stop], theirs[src.start : src.stop]
    if len(mine) != len(theirs):
        raise ParamInvalid(f"{len(theirs)} source tensors for {len(mine)} destination tensors: they have to be as many")
    return mine, theirs


def check_below(values: array[int], limit: int, name: str, whose: str) -> None:
    """Raises ParamInvalid: a block number is not below the number of blocks."""
    at = ring.ring_first_outside(ffi.from_buffer("uint64_t[]", values), len(values), limit)
    if at < len(values):
        raise ParamInvalid(f"{name}[{at}] is {values[at]}: the {whose} cache has {limit} blocks")


def blocks_to_blocks(local: Entry, remote: RemoteCache, src: Sequence[int], dst: Sequence[int], layers: Layers) -> Grid:
    """Block ``src[i]`` of the remote blocks cache goes to block ``dst[i]`` of the local one."""
    if not remote.blocks:
        raise ParamInvalid(f"the peer's cache {remote.cache_id} is contiguous: name its slot by a CacheKey")
    stride = local.stride
    if remote.stride != stride:
        raise ParamInvalid(f"a block has {remote.stride} bytes at the peer and {stride} here: they have to be equal")
    sources, targets = indexes(src, "src_blocks"), indexes(dst, "dst_blocks")
    if len(sources) != len(targets):
        raise ParamInvalid(f"{len(sources)} src_blocks for {len(targets)} dst_blocks: they have to be as many")
    check_below(sources, remote.pieces, "src_blocks", "peer's")
    check_below(targets, local.pieces, "dst_blocks", "local")
    mine, theirs = _tensors(local, remote, layers)
    return Grid(mine, theirs, targets, sources, stride, stride, stride, stride)


def slot_to_blocks(local: Entry, remote: RemoteCache, dst: Sequence[int], layers: Layers) -> Grid:
    """A batch slot of the remote contiguous cache is cut into chunks that go to the local blocks ``dst``."""
    if remote.blocks:
        raise ParamInvalid(f"the peer's cache {remote.cache_id} is a blocks cache: name it by a BlocksCacheKey")
    block = local.stride
    targets = indexes(dst, "dst_blocks")
    needed = blocks_for(remote.stride, block)
    if len(targets) != needed:
        raise ParamInvalid(
            f"{len(targets)} dst_blocks: a slot of {remote.stride} bytes needs exactly {needed} blocks of {block} bytes"
        )
    check_below(targets, local.pieces, "dst_blocks", "local")
    mine, theirs = _tensors(local, remote, layers)
    offset = remote.slot * remote.stride
    starts = array("Q", [address + offset for address in theirs])
    tail = remote.stride - (needed - 1) * block
    return Grid(mine, starts, targets, array("Q", range(needed)), block, block, min(block, remote.stride), tail)


def slot_to_slot(local: Entry, remote: RemoteCache, batch_index: int, size: int, layers: Layers) -> Grid:
    """A batch slot of the remote contiguous cache goes to a slot of the local one; ``size`` -1 is the local slot."""
    if remote.blocks:
        raise ParamInvalid(f"the peer's cache {remote.cache_id} is a blocks cache: pull it with pull_blocks")
    stride = local.stride
    if batch_index >= local.pieces:
        raise ParamInvalid(f"batch_index is {batch_index}: the local cache has {local.pieces} slots")
    nbytes = stride if size == -1 else size
    for whose, limit in (("local", stride), ("peer's", remote.stride)):
        if nbytes > limit:
            raise ParamInvalid(f"{nbytes} bytes do not fit: a slot of the {whose} cache has {limit}")
    mine, theirs = _tensors(local, remote, layers)
    return Grid(
        mine, theirs, array("Q", [batch_index]), array("Q", [remote.slot]), stride, remote.stride, nbytes, nbytes
    )
