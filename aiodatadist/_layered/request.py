"""The checked arguments of a layered transfer: which layers go where, and how their blocks correspond."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from aiodatadist._cache.catalogue import RemoteCache
from aiodatadist._cache.names import AddressKey, Key
from aiodatadist._cache.plan import are_below, check_below, check_once, plan
from aiodatadist._cache.table import Entry
from aiodatadist._link.control.layer_events import LandedLayers
from aiodatadist._values import checks
from aiodatadist._values.descriptors import Placement
from aiodatadist._values.grid import BlockNumbers, Grid, Side, indexes
from aiodatadist._values.selection import Geometry, Layers, Selection, layers_of
from aiodatadist._values.transfer_config import TransferConfig, TransferWithCacheKeyConfig
from aiodatadist.errors import ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._link import AwaitedLink, Transfers


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The tensors of a plan that no cache describes: given by addresses, or blocks treated as slots."""

    cache_id: int
    blocks: bool
    pieces: int
    stride: int
    addresses: array[int]


def _as_slots(cache: Geometry) -> Geometry:
    """Return a blocks cache with block n as batch slot n.

    Without block lists, one stride of it travels: block 0.
    """
    return _Tensors(cache.cache_id, False, cache.pieces, cache.stride, cache.addresses) if cache.blocks else cache


@dataclass(frozen=True, slots=True)
class Wanted:
    """A destination, as far as this end knows it.

    Attributes:
        link: the link to the peer; or one that is being re-established, for which it waits.
        layers: layers of the source.
        first: destination layer of the first of them; None if the destination is given by addresses.
        selection: all layers at once.
        block_size: bytes of the destination's blocks; 0 if it is a slot.
        addresses: of the destination's tensors, if the caller gave them; otherwise the key's cache has them.
        places: of the destinations of the same call, as far as their caches are known.
    """

    link: Transfers | AwaitedLink
    key: Key
    layers: range
    first: int | None
    selection: Selection
    block_size: int
    places: Places
    addresses: array[int] | None = None

    @property
    def tensors(self) -> int:
        """Tensors of a layer."""
        return self.selection.layers.tensors_per_layer

    def grid(self, source: Entry, remote: RemoteCache, slot: int) -> Grid:
        """Return all layers' ranges, once the peer's cache is known.

        Raises LLMException if they do not fit, or would overwrite those of another destination of the same call.
        """
        grid = self._ranges(source, remote, slot)
        if self.addresses is None:
            self.places.take(self, grid.local_side)
        return grid

    def _ranges(self, source: Entry, remote: RemoteCache, slot: int) -> Grid:
        if source.blocks and not self.selection.src_blocks:
            return self._one_stride(source, remote, slot)
        if self.addresses is not None:
            return plan(self.selection, source, self._at_addresses(source, remote, self.addresses))
        if self.block_size and remote.stride != self.block_size:
            raise ParamInvalid(f"the peer's blocks have {remote.stride} bytes, not {self.block_size}")
        return plan(self.selection, source, remote, dst_slot=slot)

    def _one_stride(self, source: Entry, remote: RemoteCache, slot: int) -> Grid:
        """Plan one stride of a blocks cache, to the first stride at the addresses, or to the key's block 0 or slot."""
        if self.addresses is not None:
            return plan(self.selection, _as_slots(source), self._at_addresses(source, remote, self.addresses))
        return plan(self.selection, _as_slots(source), _as_slots(remote), dst_slot=slot)

    def _at_addresses(self, source: Entry, remote: RemoteCache, addresses: array[int]) -> _Tensors:
        stride = self.block_size or source.stride
        pieces = min(remote.room_at(address) for address in addresses) // stride
        if pieces < 1:
            raise ParamInvalid(
                f"less than {stride} bytes of the peer's cache {remote.cache_id} follow an address of dst_addrs"
            )
        return _Tensors(remote.cache_id, bool(self.selection.dst_blocks), pieces, stride, addresses)

    def numbering(self, remote: RemoteCache) -> Callable[[int, int], list[LandedLayers]]:
        """Return a function that names layers of the destination.

        It names those that become complete when the layers from ``first`` to ``stop``, counted from the first that is sent,
        have landed in this order. Addresses may name the tensors of the destination in any order.
        """
        if self.addresses is None:
            base = self.first or 0
            return lambda first, stop: [LandedLayers(base + first, base + stop, self.tensors)]
        completed, each = _completed(remote, self.addresses, self.tensors)
        return lambda first, stop: _ranges(sorted(layer for some in completed[first:stop] for layer in some), each)

    def __str__(self) -> str:
        return f"{self.key}, {self.selection}"


def _completed(remote: RemoteCache, addresses: array[int], tensors: int) -> tuple[list[list[int]], int]:
    """Return, for each layer that is sent, the layers of the peer's cache to which it brings the last tensor.

    Also return the number of tensors that these have. One layer that is sent touches this many: one if keys and values
    share a tensor.
    """
    starts = {address: tensor for tensor, address in enumerate(remote.addresses)}
    touched = [starts[a] if a in starts else remote.tensor_at(a) for a in addresses]
    each = max(len(set(touched[at : at + tensors])) for at in range(0, len(touched), tensors))
    last = {tensor: at // tensors for at, tensor in enumerate(touched)}
    completed: list[list[int]] = [[] for _ in range(len(touched) // tensors)]
    for layer in {tensor // each for tensor in last}:
        parts = [last.get(tensor) for tensor in range(layer * each, (layer + 1) * each)]
        known = [part for part in parts if part is not None]
        if len(known) == each:
            completed[max(known)].append(layer)
    return completed, each


def _ranges(numbers: Sequence[int], tensors: int) -> list[LandedLayers]:
    """Return layers with ascending numbers as ranges."""
    found: list[LandedLayers] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = found[-1]._replace(stop=number + 1)
        else:
            found.append(LandedLayers(number, number + 1, tensors))
    return found


def check_apart(wanted: Sequence[Wanted]) -> None:
    """Raise ParamInvalid if two layers have the same destination, because their order is unknown.

    Only :class:`Places` finds two keys of the same memory, once the caches behind them are known.
    """
    layers: dict[Key, dict[int, int]] = {}
    addresses: dict[tuple[int, int], int] = {}
    places: dict[int, list[tuple[int, int]]] = {}  # addresses of each cluster, with their config
    for i, each in enumerate(wanted):
        if each.addresses is not None:
            for address in each.addresses:
                other = addresses.setdefault((each.key.cluster_id, address), i)
                if other != i:
                    raise ParamInvalid(
                        f"transfer_configs[{i}] and [{other}] both name the address {address:#x} of cluster "
                        f"{each.key.cluster_id}: a destination can be named only once in a call"
                    )
                places.setdefault(each.key.cluster_id, []).append((address, i))
        elif each.first is not None:
            taken = layers.setdefault(each.key, {})
            for layer in range(each.first, each.first + len(each.layers)):
                other = taken.setdefault(layer, i)
                if other != i:
                    raise ParamInvalid(
                        f"transfer_configs[{i}] and [{other}] both name layer {layer} of {each.key}: "
                        "a destination layer can be named only once in a call"
                    )
    for cluster_id, named in places.items():
        _check_bytes_apart(cluster_id, sorted(named), wanted[0].selection, wanted[0].block_size)


def _check_bytes_apart(
    cluster_id: int, named: Sequence[tuple[int, int]], selection: Selection, block_size: int
) -> None:
    """Raise ParamInvalid if the bytes at two addresses overlap: some would be lost, without a trace.

    Args:
        named: ascending addresses, each with its config.
        block_size: bytes of the blocks that are filled from each address on; 0 if it is a slot.
    """
    nbytes, numbers = block_size or selection.nbytes, selection.dst_blocks or array("Q", [0])
    least = min((b - a for (a, _), (b, _) in pairwise(named)), default=0)
    if are_below(numbers, least // nbytes):  # as almost always, and quickly known
        return
    blocks = set(numbers)
    reach, known = (max(blocks) - min(blocks) + 1) * nbytes, dict[int, bool]()
    for at, (address, i) in enumerate(named):
        for other, j in named[at + 1 :]:
            apart = other - address
            if apart >= reach:
                break
            if apart not in known:
                known[apart] = _is_shared(apart, blocks, nbytes)
            if known[apart]:
                raise ParamInvalid(
                    f"{address:#x} of transfer_configs[{i}] and {other:#x} of [{j}], in cluster {cluster_id}, are {apart} "
                    "bytes apart: what is written there would overlap, and must not"
                )


def _is_shared(apart: int, blocks: set[int], nbytes: int) -> bool:
    """Return True if some blocks overlap with the same ones ``apart`` bytes further on."""
    whole, rest = divmod(apart, nbytes)
    return any(not blocks.isdisjoint([block + step for block in blocks]) for step in (whole, whole + (rest > 0)))


class Places:
    """The places of a call's destinations by key, as they become known: two keys may name the same memory of a peer.

    A place is a slot, or the first block of a tensor. All destinations of a call have the same blocks, and a peer's regions
    are the same or apart, so no more is compared.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[int, Wanted]]] = {}  # ascending addresses of each cluster

    def take(self, wanted: Wanted, side: Side) -> None:
        """Note the place of a destination, instead of an earlier one. Raises ParamInvalid if it overlaps another one's."""
        starts = side.addresses
        if len(side.index) == 1:
            starts = array("Q", [start + side.index[0] * side.stride for start in starts])
        known = self._known.setdefault(wanted.key.cluster_id, [])
        known[:] = [place for place in known if place[1] is not wanted]
        for start in starts:
            after = bisect_right(known, start - side.nbytes, key=itemgetter(0))
            if after < len(known) and known[after][0] < start + side.nbytes:
                raise ParamInvalid(
                    f"{known[after][1].key} and {wanted.key} name the same memory of cluster {wanted.key.cluster_id}: "
                    "a destination can be named only once in a call"
                )
        known.extend((start, wanted) for start in starts)
        known.sort(key=itemgetter(0))


@dataclass(frozen=True, slots=True)
class LayeredRequest:
    """The checked arguments that all destinations share."""

    entry: Entry
    src_blocks: array[int]
    dst_blocks: array[int]
    block_size: int
    tensors: int
    places: Places = field(default_factory=Places)

    @classmethod
    def of(
        cls, entry: Entry, src: BlockNumbers | None, dst: BlockNumbers | None, block_size: int | None, tensors: int
    ) -> LayeredRequest:
        """Return the request. Raises TypeError, ValueError or ParamInvalid if the arguments do not fit together."""
        sources = indexes(() if src is None else src, "src_block_indices")
        targets = indexes(() if dst is None else dst, "dst_block_indices")
        size = 0 if block_size is None else checks.integer(block_size, "dst_block_memory_size", checks.UINT64)
        check_once(targets, "dst_block_indices")
        if entry.placement is Placement.HOST:
            raise ParamInvalid("src_cache is in host memory: layered transfers start from device memory")
        if len(entry.addresses) % layers_of(None, None, tensors).tensors_per_layer:
            raise ParamInvalid(
                f"src_cache has {len(entry.addresses)} tensors: must be a multiple of tensor_num_per_layer, {tensors}"
            )
        if entry.blocks and (sources or targets):
            if not targets or len(sources) != len(targets):
                raise ParamInvalid(
                    f"src_block_indices has {len(sources)} entries, dst_block_indices has {len(targets)}: "
                    "they must have the same length, at least 1"
                )
            check_below(sources, entry.pieces, "src_block_indices", "source")
            if size not in {0, entry.stride}:
                raise ParamInvalid(
                    f"dst_block_memory_size is {size}: must be {entry.stride}, the bytes of a block of the source"
                )
        elif sources:
            raise ParamInvalid(f"src_block_indices has {len(sources)} entries: a contiguous source has no blocks")
        elif targets and not size:
            raise ParamInvalid("dst_block_memory_size is missing: give the bytes of the destination's blocks")
        elif size and not targets:
            raise ParamInvalid(f"dst_block_memory_size is {size}, but there are no dst_block_indices")
        return cls(entry, sources, targets, size or (entry.stride if sources else 0), tensors)

    def wanted(
        self, config: TransferConfig | TransferWithCacheKeyConfig, find_link: Callable[[Any], Transfers | AwaitedLink]
    ) -> Wanted:
        """Return one destination.

        Raises ParamInvalid if it does not fit the source, and what ``find_link`` raises if the peer is not linked.
        """
        count = len(self.entry.addresses) // self.tensors
        layers = range(count) if config.src_layer_range is None else config.src_layer_range
        if layers.stop > count:
            raise ParamInvalid(f"src_layer_range is {layers}, but the cache has {count} layers")
        slot = config.src_batch_index
        if slot >= (1 if self.entry.blocks else self.entry.pieces):
            raise ParamInvalid(f"src_batch_index is {slot}: the source has {self.entry.pieces}, and blocks only 0")
        if isinstance(config, TransferWithCacheKeyConfig):
            key, dst_layers = config.cache_key, config.dst_layer_range
            if dst_layers is not None and len(dst_layers) != len(layers):
                raise ParamInvalid(
                    f"src_layer_range {layers} and dst_layer_range {dst_layers}: they must have the same length"
                )
            selection = self._selection(slot, Layers(layers, dst_layers, self.tensors))
            first = 0 if dst_layers is None else dst_layers.start
            return Wanted(find_link(key), key, layers, first, selection, self.block_size, self.places)
        return self._wanted_by_address(config, layers, find_link)

    def _selection(self, slot: int, layers: Layers) -> Selection:
        return Selection(layers, self.src_blocks, self.dst_blocks, src_slot=slot, nbytes=self.entry.stride)

    def _wanted_by_address(
        self, config: TransferConfig, layers: range, find_link: Callable[[Any], Transfers | AwaitedLink]
    ) -> Wanted:
        addresses = array("Q", config.dst_addrs)
        if len(addresses) != self.tensors * len(layers):
            raise ParamInvalid(
                f"{len(addresses)} dst_addrs for {len(layers)} layers: there must be {self.tensors} for each layer"
            )
        check_once(addresses, "dst_addrs")
        key = AddressKey(config.dst_cluster_id, addresses[0])
        selection = self._selection(config.src_batch_index, Layers(layers, None, self.tensors))
        return Wanted(find_link(key), key, layers, None, selection, self.block_size, self.places, addresses)
