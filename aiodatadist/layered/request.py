"""What a layered transfer is asked for, checked: which layers go where, and how their blocks correspond."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiodatadist.cache.catalogue import RemoteCache
from aiodatadist.cache.names import AddressKey, Key
from aiodatadist.cache.plan import Geometry, Layers, blocks_to_blocks, check_below, slot_to_blocks, slot_to_slot
from aiodatadist.cache.table import Entry
from aiodatadist.errors import ParamInvalid
from aiodatadist.values import checks
from aiodatadist.values.descriptors import Placement
from aiodatadist.values.grid import Grid, indexes
from aiodatadist.values.transfer_config import TransferConfig, TransferWithCacheKeyConfig

if TYPE_CHECKING:
    from aiodatadist.link import Link

TENSORS = 2
"""In a layer: K and V."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One destination, as far as this end knows.

    Attributes:
        layers: of the source.
        first: destination layer of the first of them; None: the one that the key's address lies in.
        plan: all layers' ranges at once, once the peer's cache is known; raises LLMException when they do not fit.
    """

    link: Link
    key: Key
    layers: range
    first: int | None
    plan: Callable[[RemoteCache, int], Grid]


@dataclass(frozen=True, slots=True)
class _Target:
    """Tensors of a peer, given by addresses, as a plan sees them."""

    cache_id: int
    blocks: bool
    pieces: int
    stride: int
    addresses: array[int]


@dataclass(frozen=True, slots=True)
class LayeredRequest:
    """The arguments that all destinations share, checked."""

    entry: Entry
    src_blocks: array[int]
    dst_blocks: array[int]
    block_size: int

    @classmethod
    def of(
        cls, entry: Entry, src: Sequence[int] | None, dst: Sequence[int] | None, block_size: int | None
    ) -> LayeredRequest:
        """Raises TypeError, ValueError, ParamInvalid: they make no sense together."""
        sources = indexes(() if src is None else src, "src_block_indices")
        targets = indexes(() if dst is None else dst, "dst_block_indices")
        size = 0 if block_size is None else checks.integer(block_size, "dst_block_memory_size", checks.UINT64)
        if entry.placement is Placement.HOST:
            raise ParamInvalid("src_cache is in host memory: layered transfers start from device memory")
        if len(entry.addresses) % TENSORS:
            raise ParamInvalid(f"src_cache has {len(entry.addresses)} tensors: a layer is {TENSORS} of them")
        if entry.blocks:
            if not targets or len(sources) != len(targets):
                raise ParamInvalid(
                    f"{len(sources)} src_block_indices for {len(targets)} dst_block_indices: as many are needed, and some"
                )
            check_below(sources, entry.pieces, "src_block_indices", "source")
            if size not in {0, entry.stride}:
                raise ParamInvalid(f"dst_block_memory_size is {size}: a block of the source has {entry.stride} bytes")
        elif sources:
            raise ParamInvalid(f"{len(sources)} src_block_indices: a contiguous source has no blocks")
        elif targets and not size:
            raise ParamInvalid("dst_block_memory_size is missing: it says how large the destination's blocks are")
        elif size and not targets:
            raise ParamInvalid(f"dst_block_memory_size is {size}, but there are no dst_block_indices")
        return cls(entry, sources, targets, size or (entry.stride if entry.blocks else 0))

    def wanted(self, config: TransferConfig | TransferWithCacheKeyConfig, find_link: Callable[[Any], Link]) -> Wanted:
        """One destination. Raises ParamInvalid: it does not fit the source. NotLinked and the like: the peer is not there."""
        count = len(self.entry.addresses) // TENSORS
        layers = range(count) if config.src_layer_range is None else config.src_layer_range
        if layers.stop > count:
            raise ParamInvalid(f"src_layer_range is {layers}, but the cache has {count} layers")
        slot = config.src_batch_index
        if slot >= (1 if self.entry.blocks else self.entry.pieces):
            raise ParamInvalid(f"src_batch_index is {slot}: the source has {self.entry.pieces}, and blocks only 0")
        if isinstance(config, TransferWithCacheKeyConfig):
            key, dst_layers = config.cache_key, config.dst_layer_range
            if len(dst_layers) != len(layers):
                raise ParamInvalid(
                    f"src_layer_range {layers} and dst_layer_range {dst_layers}: they have to be equally long"
                )
            return Wanted(find_link(key), key, layers, dst_layers.start, self._plan_by_key(slot, layers, dst_layers))
        return self._wanted_by_address(config, layers, find_link)

    def _plan_by_key(self, slot: int, src: range, dst: range) -> Callable[[RemoteCache, int], Grid]:
        layers = Layers(src, dst, TENSORS)

        def plan(remote: RemoteCache, dst_slot: int) -> Grid:
            if self.block_size and remote.stride != self.block_size:
                raise ParamInvalid(f"the peer's blocks have {remote.stride} bytes, not {self.block_size}")
            return self._plan(slot, remote, dst_slot, layers)

        return plan

    def _plan(self, slot: int, target: Geometry, dst_slot: int, layers: Layers) -> Grid:
        if target.blocks and dst_slot:
            raise ParamInvalid(f"batch index {dst_slot}: the destination is a blocks cache, which has only 0")
        if self.entry.blocks:
            return blocks_to_blocks(self.entry, target, self.src_blocks, self.dst_blocks, layers)
        if self.dst_blocks:
            return slot_to_blocks(self.entry, slot, target, self.dst_blocks, layers)
        return slot_to_slot(self.entry, slot, target, dst_slot, self.entry.stride, layers)

    def _wanted_by_address(self, config: TransferConfig, layers: range, find_link: Callable[[Any], Link]) -> Wanted:
        addresses = array("Q", config.dst_addrs)
        if len(addresses) != TENSORS * len(layers):
            raise ParamInvalid(
                f"{len(addresses)} dst_addrs for {len(layers)} layers: there have to be {TENSORS} for each"
            )
        key = AddressKey(config.dst_cluster_id, addresses[0])
        stride = self.block_size or self.entry.stride
        slot = config.src_batch_index

        def plan(remote: RemoteCache, _: int) -> Grid:
            pieces = min(remote.room_at(address) for address in addresses) // stride
            target = _Target(remote.cache_id, bool(self.dst_blocks), pieces, stride, addresses)
            if pieces < 1:
                raise ParamInvalid(
                    f"less than {stride} bytes of the peer's cache {remote.cache_id} follow an address of dst_addrs"
                )
            return self._plan(slot, target, 0, Layers(layers, None, TENSORS))

        return Wanted(find_link(key), key, layers, None, plan)
