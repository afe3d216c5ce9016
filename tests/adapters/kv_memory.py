"""KV caches in numpy, which know of each element whose it is: layer, head, token and place."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from aiodatadist._adapters.block_service import BlockService
from aiodatadist._adapters.ended import Ended
from aiodatadist._adapters.kv_cache import KvCache, Placed, dense, kv_cache_of
from aiodatadist._adapters.regions import ALL_HEADS, Axis, Composition, Heads, Memory, Plane, Region, folded

EMPTY = -1
ITEM = 4


@dataclass(frozen=True)
class Layer:
    """A layer's tensor: ``parts`` are the sizes of the axes that are the same everywhere.

    ``order`` has the axes in memory, outermost first: ``tokens``, ``heads`` and numbers of parts.
    """

    name: str
    parts: tuple[int, ...] = (8,)
    order: tuple[str | int, ...] = ("tokens", "heads", 0)
    group: int = 0
    is_optional: bool = False
    hides: tuple[str, ...] = ()


@dataclass
class Worker:
    """The memory of one worker, and its description.

    Attributes:
        arrays: the tensors of each plane, ``[blocks, items of a block]``.
    """

    memory: Memory
    arrays: list[list[np.ndarray]]
    regions: dict[str, Region] = field(default_factory=dict)

    @property
    def addresses(self) -> list[list[int]]:
        return [[array.ctypes.data for array in plane] for plane in self.arrays]

    def places(
        self, name: str, blocks: Sequence[int], tokens: range
    ) -> Iterator[tuple[tuple[int, ...], np.ndarray, int, int]]:
        """Yield head, token and place in the parts; and the element: array, block, item."""
        region = self.regions[name]
        composed = region.composed
        array = self.arrays[composed.plane][region.tensor]
        heads = range(composed.heads.first, composed.heads.stop if composed.axis("heads") else composed.heads.first + 1)
        tokens = tokens if composed.axis("tokens") else tokens[:: composed.tokens]
        sizes = [range(axis.size) for axis in composed.parts]
        for token, head, *rest in product(tokens, heads, *sizes):
            at = region.offset
            for axis in composed.axes:
                if axis.kind == "tokens":
                    at += axis.stride * (token % composed.tokens)
                elif axis.kind == "heads":
                    at += axis.stride * (head - composed.heads.first)
            at += sum(axis.stride * index for axis, index in zip(composed.parts, rest, strict=True))
            assert at % ITEM == 0
            yield (head, token, *rest), array, blocks[token // composed.tokens], at // ITEM


def value_of(name: str, where: Sequence[int]) -> int:
    """Return the element that a region has at a head, a token and a place."""
    head, token, *rest = where
    place: int = sum(index * 31 ** (i + 1) for i, index in enumerate(rest))
    return (sum(map(ord, name)) * 131 + head * 7919 + token * 104_729 + place) % (2**31 - 1)


def fill(worker: Worker, name: str, blocks: Sequence[int], tokens: range) -> None:
    """Write a prompt's elements."""
    for where, array, block, at in worker.places(name, blocks, tokens):
        array[block, at] = value_of(name, where)


def check(worker: Worker, name: str, blocks: Sequence[int], tokens: range) -> None:
    """Check that a prompt's elements are there. ``blocks`` begin with the block of token 0."""
    for where, array, block, at in worker.places(name, blocks, tokens):
        assert array[block, at] == value_of(name, where), (name, where)


def strides_of(
    order: Sequence[str | int], sizes: dict[str | int, int], gap: int = 1
) -> tuple[dict[str | int, int], int]:
    """Return the stride of each axis in bytes, and the bytes of all. ``gap``: the innermost-but-one axis is spread by it."""
    strides: dict[str | int, int] = {}
    run = ITEM
    for axis in reversed(order):
        strides[axis] = run
        run *= sizes[axis]
    return strides, run * gap


def worker_of(
    layers: Sequence[Layer],
    heads: Heads,
    tokens: int,
    blocks: int,
    packed: bool = False,
    pad: int = 0,
    latent: frozenset[str] = frozenset(),
) -> Worker:
    """Make a worker with these layers.

    Args:
        packed: all layers of a group are in one tensor, a block of which has all of them.
        pad: items that are in no region, behind each layer's.
        latent: layers that each worker has whole.
    """
    shapes: list[tuple[Layer, Composition, int]] = []
    for layer in layers:
        mine = Heads(0, 1, 1) if layer.name in latent else heads
        sizes: dict[str | int, int] = {"tokens": tokens, "heads": mine.number, **dict(enumerate(layer.parts))}
        order = [each for each in layer.order if each != "heads" or layer.name not in latent]
        strides, nbytes = strides_of(order, sizes)
        axes = [Axis("part", size, strides[number]) for number, size in enumerate(layer.parts)]
        for kind in ("tokens", "heads"):
            if kind in order and kind not in layer.hides:
                axes.insert(0, Axis(kind, sizes[kind], strides[kind]))
            elif kind in order:
                axes.append(Axis("part", sizes[kind], strides[kind]))
        composed = Composition(
            0, tokens, mine, tuple(axes), ITEM, "int32", "own" if layer.hides else "", layer.is_optional
        )
        shapes.append((layer, composed, nbytes + pad * ITEM))
    return _laid_out(shapes, blocks, packed)


def _laid_out(shapes: Sequence[tuple[Layer, Composition, int]], blocks: int, packed: bool) -> Worker:
    planes: list[Plane] = []
    arrays: list[list[np.ndarray]] = []
    regions: list[Region] = []
    for key in dict.fromkeys((layer.group, None if packed else nbytes) for layer, _, nbytes in shapes):
        mine = [each for each in shapes if (each[0].group, None if packed else each[2]) == key]
        stride = sum(nbytes for *_, nbytes in mine) if packed else mine[0][2]
        tensors = [np.full((blocks, stride // ITEM), EMPTY, np.int32) for _ in ([0] if packed else mine)]
        offset = 0
        for at, (layer, composed, nbytes) in enumerate(mine):
            made = Composition(
                len(planes), composed.tokens, composed.heads, composed.axes, ITEM, composed.dtype, composed.packing,
                composed.is_optional,
            )  # fmt: skip
            regions.append(Region(layer.name, 0 if packed else at, offset, made))
            offset += nbytes if packed else 0
        planes.append(Plane(group=key[0], stride=stride, tensors=len(tensors)))
        arrays.append(tensors)
    memory = Memory(planes=tuple(planes), regions=folded(regions))
    return Worker(memory, arrays, memory.by_name())


Order = tuple[str | int, ...]
"""The axes of a block, outermost first: ``tokens``, ``heads``, and sizes of others."""


def axes_in(order: Order, tokens: int, heads: int, itemsize: int) -> tuple[Axis, ...]:
    """Return the axes of memory without gaps."""
    named = {"tokens": tokens, "heads": heads}
    axes: list[Axis] = []
    run = itemsize
    for each in reversed(order):
        size = named[each] if isinstance(each, str) else each
        kind: Any = each if isinstance(each, str) else "part"
        axes.insert(0, Axis(kind, size, run))
        run *= size
    return tuple(axes)


def opaque(
    layers: Sequence[Sequence[np.ndarray]],
    blocks: int,
    tokens: int = 16,
    order: Order | None = None,
    heads: tuple[Heads, ...] = (ALL_HEADS,),
    rank: int = 0,
) -> KvCache:
    """Return a KV cache of these arrays, by layer, whose blocks have these axes; by default it is not said what is where."""
    placed = []
    for number, layer in enumerate(layers):
        for part, array in enumerate(layer):
            nbytes = array.nbytes // blocks
            size = array.itemsize
            axes = dense((nbytes // size,), size) if order is None else axes_in(order, tokens, heads[rank].number, size)
            composed = Composition(0, tokens, heads[rank], axes, size, str(array.dtype))
            name = f"layers.{number}.{part}"
            placed.append(Placed(name, array.ctypes.data, nbytes, blocks, composed, heads, layer=number))
    return kv_cache_of(placed, rank)


def opaque_memory(tokens: int = 16, order: Order | None = None, heads: Heads = ALL_HEADS, nbytes: int = 4096) -> Memory:
    """Return the memory of a worker with one tensor of bytes."""
    axes = dense((nbytes,), 1) if order is None else axes_in(order, tokens, heads.number, 1)
    composed = Composition(0, tokens, heads, axes, 1, "uint8")
    stride = nbytes if order is None else composed.content
    return Memory(planes=(Plane(stride=stride, tensors=1),), regions=folded([Region("layers.0.0", 0, 0, composed)]))


def ended_of(service: BlockService, request: str) -> Ended:
    """Wait until a request has ended, and return the news that say so."""
    while request not in (ended := service.take()).outcomes:
        time.sleep(0.001)
    return ended
