"""Layers x blocks x batch slots -> byte ranges. Pure arithmetic: no memory, no device, no I/O.

A cache is ``num_tensors`` tensors of one shape. Each tensor is cut along dimension 0 into ``shape[0]`` pieces of equal
*stride*: batch slots of a contiguous cache, blocks of a blocks cache. A layer is ``tensor_num_per_layer`` consecutive
tensors.

A :class:`Grid` describes the bytes of a transfer: the same list of blocks for each tensor of a range. C expands it
(``native/grid.c``). :meth:`Grid.ranges` does the same in Python, one range per block, as the reference for tests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from aiodatadist.errors import ParamInvalid

UINT64 = 2**64


class Range(NamedTuple):
    """A range of ``nbytes`` bytes, at two addresses."""

    local: int
    remote: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Side:
    """A side of a grid: ``len(addresses)`` tensors x ``len(index)`` blocks.

    Block ``i`` of tensor ``t`` is at ``addresses[t] + index[i] * stride``. It has ``nbytes`` bytes, or ``tail`` if it
    is the last one of its tensor.
    """

    addresses: array[int]
    index: array[int]
    stride: int
    nbytes: int
    tail: int

    @property
    def tensor_bytes(self) -> int:
        """Bytes of each tensor."""
        return (len(self.index) - 1) * self.nbytes + self.tail if self.index else 0

    @property
    def total(self) -> int:
        """Bytes of all tensors and blocks."""
        blocks = len(self.index)
        return len(self.addresses) * ((blocks - 1) * self.nbytes + self.tail) if blocks else 0

    def tensors(self, which: range) -> Side:
        """Return a side with only these consecutive tensors."""
        return Side(self.addresses[which.start : which.stop], self.index, self.stride, self.nbytes, self.tail)

    def blocks(self, first: int, count: int) -> Side:
        """Return a side with ``count`` of its blocks, or fewer if it has fewer from ``first`` on."""
        index = self.index[first : first + count]
        tail = self.tail if first + count >= len(self.index) else self.nbytes
        return Side(self.addresses, index, self.stride, self.nbytes, tail)

    def parts(self, most: int) -> Iterator[tuple[int, Side]]:
        """Yield the side in parts of at most ``most`` bytes, each with the number of its first block.

        The bytes of a block come in the order of its tensors.
        """
        each = self.tensor_bytes
        if each <= most:
            step = max(1, most // max(each, 1))
            for t in range(0, len(self.addresses), step):
                yield 0, Side(self.addresses[t : t + step], self.index, self.stride, self.nbytes, self.tail)
            return
        for address in self.addresses:
            yield from self._parts_of(address, most)

    def _parts_of(self, address: int, most: int) -> Iterator[tuple[int, Side]]:
        """Yield the parts of one tensor."""
        tensor = Side(array("Q", [address]), self.index, self.stride, self.nbytes, self.tail)
        step = most // self.nbytes
        if step == 0:
            yield from self._slices_of(address, most)
            return
        for first in range(0, len(self.index), step):
            yield first, tensor.blocks(first, step)

    def _slices_of(self, address: int, most: int) -> Iterator[tuple[int, Side]]:
        """Yield the parts of blocks that are larger than a part."""
        last = len(self.index) - 1
        for i, block in enumerate(self.index):
            whole, start = self.tail if i == last else self.nbytes, address + block * self.stride
            for offset in range(0, whole, most):
                nbytes = min(most, whole - offset)
                yield i, Side(array("Q", [start + offset]), array("Q", [0]), nbytes, nbytes, nbytes)


@dataclass(frozen=True, slots=True)
class Grid:
    """The byte ranges of a transfer: ``len(local)`` tensors x ``len(local_index)`` blocks.

    Block ``i`` of tensor ``t`` is at ``local[t] + local_index[i] * local_stride`` on this side and at ``remote[t] +
    remote_index[i] * remote_stride`` on the other. It has ``nbytes`` bytes; the last block of each tensor has only
    ``tail``. Addresses, indexes, strides and lengths are bytes and fit 64 bits; the arrays are ``array('Q')``.
    """

    local: array[int]
    remote: array[int]
    local_index: array[int]
    remote_index: array[int]
    local_stride: int
    remote_stride: int
    nbytes: int
    tail: int

    @property
    def total(self) -> int:
        """Bytes of all tensors and blocks."""
        blocks = len(self.local_index)
        return len(self.local) * ((blocks - 1) * self.nbytes + self.tail) if blocks else 0

    def __str__(self) -> str:
        return f"{len(self.local_index)} blocks of {len(self.local)} tensors"

    @property
    def local_side(self) -> Side:
        return Side(self.local, self.local_index, self.local_stride, self.nbytes, self.tail)

    @property
    def remote_side(self) -> Side:
        return Side(self.remote, self.remote_index, self.remote_stride, self.nbytes, self.tail)

    def mirrored(self) -> Grid:
        """Return the same ranges with the two sides exchanged."""
        return Grid(self.remote, self.local, self.remote_index, self.local_index,
                    self.remote_stride, self.local_stride, self.nbytes, self.tail)  # fmt: skip

    def ranges(self) -> Iterator[Range]:
        """Yield one range per tensor and block, not merged."""
        last = len(self.local_index) - 1
        for local, remote in zip(self.local, self.remote, strict=True):
            for i, (mine, theirs) in enumerate(zip(self.local_index, self.remote_index, strict=True)):
                nbytes = self.tail if i == last else self.nbytes
                yield Range(local + mine * self.local_stride, remote + theirs * self.remote_stride, nbytes)


class ArrayLike(Protocol):
    """An array of numpy or torch, or another object that gives its numbers as a list."""

    def tolist(self) -> Any:
        """Return the numbers as a list of int."""


BlockNumbers: TypeAlias = Sequence[int] | ArrayLike
"""Block numbers as callers give them: a list, tuple or range of int, or a one-dimensional array of integers."""


def indexes(values: BlockNumbers, name: str) -> array[int]:
    """Return block numbers as C reads them: a copy, because C reads them after the caller has continued.

    Raises:
        TypeError: if an element is not an integer, or the numbers are neither in a list nor in a one-dimensional array.
        ValueError: if an element is negative or does not fit 64 bits.
    """
    numbers = values if isinstance(values, (list, tuple, range, array)) else _listed(values, name)
    try:
        return array("Q", numbers)
    except OverflowError:
        bad = next(v for v in numbers if not 0 <= v < UINT64)
        raise ValueError(f"{name} has {bad}: block numbers must be in [0, 2**64)") from None
    except TypeError:
        bad = next(v for v in numbers if not isinstance(v, int))
        raise TypeError(f"{name} has {bad!r} of type {type(bad).__name__}: block numbers must be int") from None


def _listed(values: Any, name: str) -> list[int]:
    numbers = values.tolist() if hasattr(values, "tolist") else None
    if not isinstance(numbers, list):
        what = "a list, tuple or range of int, or a one-dimensional array of integers"
        raise TypeError(f"{name} is a {type(values).__name__}: must be {what}")
    return numbers


def tensor_range(num_tensors: int, layers: range | None, tensors_per_layer: int, name: str) -> range:
    """Return the tensors of a half-open layer range; all of them if it is None.

    Raises:
        ParamInvalid: if the step is not 1, the range is empty or negative, it ends past the last layer, or the cache's
            tensors are not a whole number of layers.
    """
    if layers is None:
        return range(num_tensors)
    if layers.step != 1 or layers.start < 0 or layers.stop <= layers.start:
        raise ParamInvalid(f"{name} is {layers}: must have step 1 and 0 <= start < stop")
    if num_tensors % tensors_per_layer:
        raise ParamInvalid(
            f"{name} is given, but {num_tensors} tensors are not a whole number of layers of {tensors_per_layer}"
        )
    count = num_tensors // tensors_per_layer
    if layers.stop > count:
        raise ParamInvalid(f"{name} is {layers}, but the cache has {count} layers")
    return range(layers.start * tensors_per_layer, layers.stop * tensors_per_layer)


def blocks_for(nbytes: int, block: int) -> int:
    """Return the number of blocks of ``block`` bytes that hold ``nbytes``: the ceiling."""
    return -(-nbytes // block)
