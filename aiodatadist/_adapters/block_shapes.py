"""The mapping from a peer's blocks to the blocks here, if both ends cut a KV cache differently.

A block has axes, outermost first: tokens, heads, and numbers for axes that are the same everywhere. Two ends may differ
in the tokens of a block, and in their share of the heads. A run of bytes that both have in one piece is a *unit*.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict

from aiodatadist._cache.units import numbers_of_units
from aiodatadist._values.selection import BlockParts
from aiodatadist.errors import IncompatiblePeer

MAX_AXES = 16
MAX_CACHES = 64
"""Most caches of one worker: the number of different block sizes."""
MAX_LAYOUT = 32
"""Most entries of a layout: names with a word of at most :data:`MAX_WORD` characters, or a number."""
MAX_WORD = 64
Size = Annotated[int, Field(ge=1, lt=2**31)]
Axis = Literal["tokens", "heads"] | Size
Axes = Annotated[tuple[Axis, ...], Field(max_length=MAX_AXES), FailFast()]
Word = Annotated[str, Field(max_length=MAX_WORD)]
Layout = Annotated[dict[Word, Word | Annotated[int, Field(ge=-(2**63), lt=2**63)]], Field(max_length=MAX_LAYOUT)]
"""The properties that must be the same at both ends of a transfer."""


class BlockShape(BaseModel):
    """The shape of one worker's blocks, as JSON has it.

    Attributes:
        tokens: tokens of a block.
        heads: heads of this worker.
        axes: axes for each of its caches; empty if the composition of a block is unknown.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    tokens: Size
    heads: Size
    axes: Annotated[tuple[Annotated[Axes, Strict(False)], ...], Strict(False), Field(max_length=MAX_CACHES), FailFast()]


def axes_of(shape: Sequence[int], tokens: int, heads: int) -> Axes:
    """Return the axes of a block of this shape; empty if its dimensions of tokens and heads cannot be told apart."""
    sizes = list(shape)
    names: dict[int, Axis] = {}
    for name, size in (("tokens", tokens), ("heads", heads)):
        if sizes.count(size) > 1 or (size not in sizes and size > 1):
            return ()
        if size in sizes:
            names[size] = "tokens" if name == "tokens" else "heads"
    return tuple(names.get(size, size) for size in sizes)


@dataclass(frozen=True)
class End:
    """An end of a transfer: the tokens of a block, and its heads among the model's."""

    tokens: int
    heads: range

    def size(self, axis: Axis) -> int:
        """Return the length of an axis at this end."""
        return {"tokens": self.tokens, "heads": len(self.heads)}.get(str(axis), 0) or int(axis)


def check_cut(source: End, target: End, axes: Axes, place: str, first_token: int = 0) -> None:
    """Raise IncompatiblePeer if blocks cannot be cut into units that both ends have."""
    if first_token and "tokens" not in axes:
        hint = "the place of the tokens in a block is unknown"
        raise IncompatiblePeer(f"{first_token} tokens of the first block at {place} are not wanted", hint=hint)
    for axis, name, here, there in (
        ("tokens", "block_size", target.tokens, source.tokens),
        ("heads", "heads", len(target.heads), len(source.heads)),
    ):
        if here != there and axis not in axes:
            hint = f"the place of the {axis} in a block is unknown"
            raise IncompatiblePeer(f"{name} is {here} here and {there} at {place}", hint=hint)


def parts_between(source: End, target: End, axes: Axes, block_nbytes: int, first_token: int, tokens: int) -> BlockParts:
    """Return the units of these tokens, from ``first_token`` of the source's first block to the destination's first block.

    Args:
        axes: axes of both ends.
        block_nbytes: bytes of a block of the destination.
    """
    units = _Units(
        axes,
        tokens=gcd(source.tokens, target.tokens, first_token),
        heads=gcd(len(source.heads), len(target.heads)),
        cut={axis for axis in axes if source.size(axis) != target.size(axis)} | ({"tokens"} if first_token else set()),
    )
    itemsize = block_nbytes // prod(target.size(axis) for axis in axes)
    shared = range(max(source.heads.start, target.heads.start), min(source.heads.stop, target.heads.stop))
    is_even = units.is_even(source) and units.is_even(target)
    stretch = max(tokens, 1) if is_even else gcd(source.tokens, target.tokens, first_token)
    src = units.numbers(source, shared, first_token, tokens, stretch)
    dst = units.numbers(target, shared, 0, tokens, stretch)
    return BlockParts(units.run * itemsize, src, dst)


class _Units:
    """The pieces that both ends have whole: ``run`` elements each. ``cut`` has the axes of which a unit is a part."""

    def __init__(self, axes: Axes, tokens: int, heads: int, cut: set[Axis]) -> None:
        self._outer = axes[: max((i + 1 for i, axis in enumerate(axes) if axis in cut), default=0)]
        before = self._outer[:-1]  # a unit has one index of these axes: the axis behind them is cut
        self._tokens, self._heads = 1 if "tokens" in before else tokens, 1 if "heads" in before else heads
        inner = axes[max(len(self._outer) - 1, 0) :]
        self.run = prod(self._size(axis) for axis in inner)

    def _size(self, axis: Axis) -> int:
        return {"tokens": self._tokens, "heads": self._heads}.get(str(axis), 0) or int(axis)

    def _counts(self, end: End) -> list[int]:
        """Return the units in a block of this end, along each axis."""
        return [axis if isinstance(axis, int) else end.size(axis) // self._size(axis) for axis in self._outer]

    def _step(self, counts: Sequence[int]) -> int:
        """Return the distance from a unit to that of the next tokens."""
        return prod(counts[self._outer.index("tokens") + 1 :]) if "tokens" in self._outer else prod(counts)

    def is_even(self, end: End) -> bool:
        """Return True if the step from a block's last tokens to the next block is the same as within a block."""
        counts = self._counts(end)
        return self._step(counts) * (end.tokens // self._tokens) == prod(counts)

    def numbers(self, end: End, heads: range, first_token: int, tokens: int, stretch: int) -> array[int]:
        """Return the numbers of the units of these tokens and heads, through an end's blocks.

        They are ordered by stretch of tokens, and within one as in a block, each for all its tokens.
        """
        counts = self._counts(end)
        each, step = prod(counts), self._step(counts)
        choices: list[list[int]] = []
        for i, axis in enumerate(self._outer):
            stride = prod(counts[i + 1 :])
            if axis == "heads":
                first, last = heads.start - end.heads.start, heads.stop - end.heads.start
                choices.append([stride * (head // self._heads) for head in range(first, last, self._heads)])
            elif isinstance(axis, int):
                choices.append([stride * index for index in range(axis)])
        offsets = [sum(chosen) for chosen in product(*choices)]
        return numbers_of_units(offsets, first_token, tokens, stretch, end.tokens, each, self._tokens, step)
