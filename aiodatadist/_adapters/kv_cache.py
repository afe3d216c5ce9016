"""A worker's KV cache: where its tensors are, and what it says of them to other engines. Pure.

An engine gives each layer's tensor with its address and strides. Layers that share memory are one region, and layers that
are side by side in each block are regions of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from aiodatadist._adapters.regions import (
    ALL_HEADS,
    MAX_NAMES,
    MAX_PLANES,
    WORKERS,
    Axis,
    Composition,
    Heads,
    Memory,
    Plane,
    Region,
    described,
    folded,
)
from aiodatadist._values.descriptors import CacheDesc, DataType
from aiodatadist.errors import ParamInvalid


@dataclass(frozen=True)
class TensorGroup:
    """Tensors whose blocks, or items, have the same size: ``count`` of ``nbytes`` bytes at each of these addresses."""

    addresses: tuple[int, ...]
    count: int
    nbytes: int

    @property
    def desc(self) -> CacheDesc:
        """The description of a cache over these tensors."""
        return CacheDesc(len(self.addresses), [self.count, self.nbytes], DataType.DT_UINT8)


@dataclass(frozen=True)
class Placed:
    """A region where an engine has it.

    Attributes:
        name: the layer's, with the tensor's if the layer has several.
        address: of block 0.
        stride: bytes from a block to the next one.
        blocks: number of blocks.
        composed: the composition of a block; its plane is not known yet.
        heads: the heads of each worker of the engine, by rank.
        group: number of the group of layers whose blocks these are.
        layer: number of the layer in the order in which they are computed.
        start, stop: the memory in which it is; 0 if the engine does not say it.
    """

    name: str
    address: int
    stride: int
    blocks: int
    composed: Composition
    heads: tuple[Heads, ...] = (ALL_HEADS,)
    group: int = 0
    layer: int = 0
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class KvCache:
    """A worker's KV cache.

    Attributes:
        memory: what other engines are told of it.
        tensors: the tensors of each plane.
        layers: number of layers, in the order in which they are computed.
        steps: by plane and tensor: the number of the last layer in it.
        mates: the memory of all workers of this engine, by rank.
    """

    memory: Memory
    tensors: tuple[TensorGroup, ...]
    layers: int
    steps: tuple[tuple[int, ...], ...]
    mates: tuple[Memory, ...]

    @property
    def is_replicated(self) -> bool:
        """True if all workers of this engine have the same."""
        return len(set(self.mates)) == 1

    def words(self) -> dict[str, str | int]:
        """Return what must be the same at both ends where blocks are pushed, because whole blocks are."""
        planes = ", ".join(f"{plane.tensors} of {plane.stride} bytes" for plane in self.memory.planes)
        return {**described(self.memory.by_name().values()), "tensors": planes, WORKERS: len(self.mates)}


def kv_cache_of(placed: Sequence[Placed], rank: int = 0) -> KvCache:
    """Return the KV cache that is made of these regions.

    Raises:
        ParamInvalid: if there are none or too many, or if some of a group overlap.
    """
    if not 0 < len(placed) <= MAX_NAMES:
        raise ParamInvalid(f"the KV cache has {len(placed)} regions: there must be 1 to {MAX_NAMES}")
    apart = _without_shared(placed)
    found = _Planes()
    for group in sorted({each.group for each in apart}):
        for first, inside in _tensors_of([each for each in apart if each.group == group]):
            found.add(first, inside)
    return found.cache(rank, apart)


def _without_shared(placed: Iterable[Placed]) -> list[Placed]:
    """Return the regions without those that are another one's memory, as layers have that share a KV cache."""
    first: dict[tuple[int, int], Placed] = {}
    last: dict[tuple[int, int], int] = {}
    for each in placed:
        key = each.group, each.address
        known = first.setdefault(key, each)
        if (known.stride, known.composed) != (each.stride, each.composed):
            raise ParamInvalid(f"{each.name} and {known.name} share memory, and compose their blocks differently")
        last[key] = max(last.get(key, 0), each.layer)
    return [replace(each, layer=last[key]) for key, each in first.items()]


def _tensors_of(regions: Sequence[Placed]) -> list[tuple[int, list[Placed]]]:
    """Return the tensors of one group, in the order of their first regions: address and regions.

    Regions whose blocks are closer to each other than one block is to the next are in the same tensor.
    """
    tensors: list[list[Placed]] = []
    for each in sorted(regions, key=lambda each: each.address):
        if tensors and each.address < tensors[-1][0].address + tensors[-1][0].stride:
            tensors[-1].append(each)
        else:
            tensors.append([each])
    made = []
    for inside in tensors:
        _check_apart(inside)
        made.append((_begin_of(inside), inside))
    places = {id(each): at for at, each in enumerate(regions)}
    return sorted(made, key=lambda tensor: min(places[id(each)] for each in tensor[1]))


def _check_apart(inside: Sequence[Placed]) -> None:
    """Raise ParamInvalid if regions of one tensor overlap, or their blocks are not side by side."""
    for one, other in pairwise(inside):
        if one.stride != other.stride or one.blocks != other.blocks:
            raise ParamInvalid(
                f"{one.name} and {other.name} overlap: they have {one.blocks} blocks of {one.stride} bytes, and "
                f"{other.blocks} of {other.stride}"
            )
    first, last = inside[0], inside[-1]
    if last.address + last.composed.extent > first.address + first.stride:
        if len(inside) == 1:
            why = f"a block reaches {last.composed.extent} bytes far, and the next one begins after {first.stride}"
            raise ParamInvalid(f"the blocks of {first.name} lie within each other: {why}")
        raise ParamInvalid(f"{last.name} ends behind the blocks that begin with {first.name}")


def _begin_of(inside: Sequence[Placed]) -> int:
    """Return the address of a tensor whose blocks hold these regions, within the memory in which they are."""
    first, need = inside[0], inside[0].blocks * inside[0].stride
    if not first.stop or first.address + need <= first.stop:
        return first.address
    begin = first.address - (first.address - first.start) % first.stride
    if begin + need > first.stop:
        raise ParamInvalid(f"{first.name}: {first.blocks} blocks of {first.stride} bytes end behind its memory")
    return begin


class _Planes:
    """The planes of a cache while they are found."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, int, int], int] = {}
        self._addresses: list[list[int]] = []
        self._steps: list[list[int]] = []
        self._regions: list[tuple[Placed, int, int, int]] = []

    def add(self, begin: int, inside: Sequence[Placed]) -> None:
        """Add a tensor."""
        first = inside[0]
        plane = self._keys.setdefault((first.group, first.stride, first.blocks), len(self._keys))
        if plane == len(self._addresses):
            self._addresses.append([])
            self._steps.append([])
        tensor = len(self._addresses[plane])
        self._addresses[plane].append(begin)
        self._steps[plane].append(max(each.layer for each in inside))
        self._regions += [(each, plane, tensor, each.address - begin) for each in inside]

    def cache(self, rank: int, placed: Sequence[Placed]) -> KvCache:
        """Return the cache. ``placed`` are the regions in the engine's order."""
        if len(self._keys) > MAX_PLANES:
            raise ParamInvalid(f"the KV cache has {len(self._keys)} kinds of tensors: the limit is {MAX_PLANES}")
        order = {id(each): at for at, each in enumerate(placed)}
        self._regions.sort(key=lambda found: order[id(found[0])])
        planes = tuple(
            Plane(group=group, stride=stride, tensors=len(self._addresses[plane]))
            for (group, stride, _), plane in self._keys.items()
        )
        ranks = max(len(each.heads) for each in placed)
        heads = [tuple(each.heads[number % len(each.heads)] for each, *_ in self._regions) for number in range(ranks)]
        known = {those: Memory(planes=planes, regions=folded(self._said(those))) for those in dict.fromkeys(heads)}
        mates = tuple(known[those] for those in heads)
        return KvCache(
            mates[rank],
            tuple(
                TensorGroup(tuple(self._addresses[plane]), blocks, stride)
                for (_, stride, blocks), plane in self._keys.items()
            ),
            max(each.layer for each in placed) + 1,
            tuple(map(tuple, self._steps)),
            mates,
        )

    def _said(self, heads: Sequence[Heads]) -> Iterable[Region]:
        for mine, (each, plane, tensor, offset) in zip(heads, self._regions, strict=True):
            yield Region(each.name, tensor, offset, replace(each.composed, plane=plane, heads=mine))


def dense(sizes: Sequence[int], itemsize: int) -> tuple[Axis, ...]:
    """Return axes that are the same everywhere, of memory without gaps."""
    axes: list[Axis] = []
    run = itemsize
    for size in reversed(sizes):
        axes.insert(0, Axis("part", size, run))
        run *= size
    return tuple(axes)
