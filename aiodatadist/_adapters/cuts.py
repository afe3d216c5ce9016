"""The pieces of blocks that two ends have in one piece each, where they compose their blocks differently.

Two ends may differ in the tokens of a block, in their heads, and in the order of a block's axes. A *unit* is a run of bytes
that both have in one piece. Its places are numbered in parts of equal size, as
:class:`~aiodatadist._values.selection.BlockParts` wants them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd

from aiodatadist._adapters.regions import Axis, Composition, Heads
from aiodatadist._cache.units import numbers_of_units
from aiodatadist._values.selection import BlockParts
from aiodatadist.errors import IncompatiblePeer


@dataclass(frozen=True, slots=True)
class Cut:
    """The way of one region's heads from a source's blocks into a destination's.

    Attributes:
        src, dst: the compositions there and here.
        src_offset, dst_offset: the places in a block.
        first, stop: the heads that travel, counted among all of the model's.
    """

    src: Composition
    dst: Composition
    src_offset: int
    dst_offset: int
    first: int
    stop: int

    @property
    def is_same(self) -> bool:
        """True if a block has the same bytes in the same places at both ends."""
        here, there = self.dst, self.src
        return (
            self.src_offset == self.dst_offset
            and (here.tokens, here.heads, here.axes) == (there.tokens, there.heads, there.axes)
            and (self.first, self.stop) == (here.heads.first, here.heads.stop)
        )


def why_uncut(src: Composition, dst: Composition, first_token: int = 0) -> str:
    """Return why blocks of one composition cannot become blocks of another; empty if they can."""
    for what, here, there in (
        ("dtype", dst.dtype, src.dtype),
        ("packing", dst.packing or "plain", src.packing or "plain"),
        ("number of heads", dst.heads.of, src.heads.of),
    ):
        if here != there:
            return f"{what} is {here} here and {there}"
    if (dst.tokens != src.tokens or first_token) and not (dst.axis("tokens") and src.axis("tokens")):
        what = f"block_size is {dst.tokens} here and {src.tokens}"
        if dst.tokens == src.tokens:
            what = f"{first_token} tokens of the first block are not wanted, of {src.tokens}"
        return f"the place of the tokens in a block is unknown, and {what}"
    if (here := _sizes(dst)) != (there := _sizes(src)):
        return f"block_shape is {here} here and {there}"
    if dst.heads != src.heads and not (_can_be_cut(src) and _can_be_cut(dst)):
        return f"the place of the heads in a block is unknown, and heads are {dst.heads} here and {src.heads}"
    return ""


def _can_be_cut(composed: Composition) -> bool:
    return composed.axis("heads") is not None or composed.heads.number == 1


def _sizes(composed: Composition) -> str:
    """Return what must be equal of two blocks: their other axes, in the order of the engine's dimensions."""
    sizes = "x".join(str(axis.size) for axis in composed.parts if axis.size > 1)
    unsaid = (
        "" if composed.axis("heads") or composed.heads.number == 1 else f", {composed.heads.number} heads among them"
    )
    return f"{sizes or 1} of {composed.itemsize} bytes{unsaid}"


def check_cut(src: Composition, dst: Composition, name: str, place: str, first_token: int = 0) -> None:
    """Raise IncompatiblePeer if blocks of a region cannot be cut into units that both ends have."""
    if why := why_uncut(src, dst, first_token):
        raise IncompatiblePeer(f"{name}: {why} at {place}")


def parts_of(cuts: Iterable[Cut], src_stride: int, dst_stride: int, first_token: int, tokens: int) -> BlockParts:
    """Return the parts in which regions of the same tensors travel.

    Args:
        src_stride, dst_stride: bytes of a block of either plane.
        first_token: the first wanted token of the source's first block; it goes to the destination's first block.
        tokens: number of wanted tokens.
    """
    units = [_Units(cut, first_token, (src_stride, dst_stride)) for cut in cuts]
    nbytes = gcd(src_stride, dst_stride, *(number for each in units for number in each.distances()))
    src, dst = array("Q"), array("Q")
    for each in units:
        src += each.numbers(0, nbytes, first_token, tokens)
        dst += each.numbers(1, nbytes, 0, tokens)
    return BlockParts(nbytes, src, dst)


@dataclass(slots=True)
class _End:
    """An end of a cut.

    Attributes:
        tokens: tokens of a block.
        offset: place of the first head that travels.
        axes: the axes that are not within a unit, innermost last.
        parts: the axes that are the same everywhere, in the order of the engine's dimensions.
        step: bytes from a unit to that of the next tokens.
        head_stride: bytes from a head to the next one.
    """

    tokens: int
    offset: int
    axes: list[Axis]
    parts: list[Axis]
    step: int
    head_stride: int

    @classmethod
    def of(cls, cut: Cut, composed: Composition, offset: int) -> _End:
        """Return the end that has this composition."""
        heads, tokens = (composed.axis(kind) for kind in ("heads", "tokens"))
        head_stride = 0 if heads is None else heads.stride
        return cls(
            composed.tokens,
            offset + head_stride * (cut.first - composed.heads.first),
            [axis for axis in sorted(composed.axes, key=lambda axis: -axis.stride) if axis.size > 1],
            [axis for axis in composed.parts if axis.size > 1],
            tokens.stride if tokens is not None and tokens.size > 1 else 0,
            head_stride,
        )

    def is_even(self, unit_tokens: int, stride: int) -> bool:
        """Return True if the step from a block's last unit to the next block is the same as within a block."""
        return unit_tokens == self.tokens or self.step * (self.tokens // unit_tokens) == stride


class _Units:
    """The units of one cut: ``run`` bytes, of ``unit_tokens`` tokens and ``unit_heads`` heads."""

    def __init__(self, cut: Cut, first_token: int, blocks: tuple[int, int]) -> None:
        self._cut, self._blocks = cut, blocks
        src, dst = cut.src, cut.dst
        self._ends = _End.of(cut, src, cut.src_offset), _End.of(cut, dst, cut.dst_offset)
        self.run = dst.itemsize
        is_told = dst.axis("heads") is not None and src.axis("heads") is not None
        self._unit_heads = 1 if is_told else cut.stop - cut.first
        self._aligned = gcd(src.tokens, dst.tokens, first_token)
        self._unit_tokens = 1 if src.axis("tokens") and dst.axis("tokens") else dst.tokens
        self._grow(first_token)
        for end in self._ends:
            end.step *= 0 if self._unit_tokens == end.tokens else self._unit_tokens

    def _grow(self, first_token: int) -> None:
        """Let units have axes whole that are innermost at both ends, and at last the common part of one."""
        (src, dst), cut = self._ends, self._cut
        while src.axes and dst.axes:
            there, here = src.axes[-1], dst.axes[-1]
            if there.kind != here.kind or not there.stride == here.stride == self.run:
                return
            is_whole, grown = there.size == here.size, here.size
            if here.kind == "part":
                if src.parts.index(there) != dst.parts.index(here):
                    return
            elif here.kind == "heads":
                is_whole = is_whole and here.size == cut.stop - cut.first
                places = cut.first - cut.src.heads.first, cut.first - cut.dst.heads.first
                grown = self._unit_heads = gcd(there.size, here.size, cut.stop - cut.first, *places)
            else:
                is_whole = is_whole and not first_token
                grown = self._unit_tokens = self._aligned
            self.run *= grown
            if not is_whole:
                return
            src.axes.pop()
            dst.axes.pop()

    def distances(self) -> Iterator[int]:
        """Yield all distances that a part's size must divide."""
        yield self.run
        for end in self._ends:
            yield from (end.offset, end.step)
            for axis in end.axes:
                yield axis.stride * (self._unit_heads if axis.kind == "heads" else 1)

    def numbers(self, which: int, nbytes: int, first_token: int, tokens: int) -> array[int]:
        """Return the numbers of the parts of an end. Those of the other end are in the same order."""
        cut, end, stride = self._cut, self._ends[which], self._blocks[which]
        choices = [[end.head_stride * head for head in range(0, cut.stop - cut.first, self._unit_heads)]]
        for number in self._outer_parts():
            axis = end.parts[number]
            choices.append([axis.stride * at for at in range(axis.size)])
        starts = [end.offset + sum(chosen) for chosen in product(*choices)]
        offsets = [(start + piece) // nbytes for start in starts for piece in range(0, self.run, nbytes)]
        is_even = all(
            each.is_even(self._unit_tokens, block) for each, block in zip(self._ends, self._blocks, strict=True)
        )
        stretch = max(tokens, 1) if is_even else self._aligned
        step = stride if self._unit_tokens == end.tokens else end.step
        return numbers_of_units(
            offsets, first_token, tokens, stretch, end.tokens, stride // nbytes, self._unit_tokens, step // nbytes
        )

    def _outer_parts(self) -> list[int]:
        """Return the axes that are the same everywhere and are not within a unit, outermost here first."""
        end = self._ends[1]
        return [end.parts.index(axis) for axis in end.axes if axis.kind == "part"]


def shared(src: Heads, dst: Heads) -> range:
    """Return the heads that both have."""
    return range(max(src.first, dst.first), min(src.stop, dst.stop))
