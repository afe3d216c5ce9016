"""The memory of one worker's KV cache, as it tells other engines: named regions, and what each block of them holds.

A worker has *planes*: tensors that are cut into blocks in the same way, for one group of layers. A plane is what a lease
is on, so the blocks of a request are a lease in each plane. A *region* is the part of a plane's blocks that belongs to one
layer, or to one tensor of a layer. It says which heads it holds, of how many, and how a block is composed: an axis for its
tokens, one for its heads, and others, each with its stride. An axis that a block does not say cannot be cut.

Nothing here knows an engine. What a peer says is bounded before it is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict

MAX_AXES = 8
MAX_PLANES = 64
"""Most planes of one worker."""
MAX_REGIONS = 256
"""Most compositions of one worker's regions."""
MAX_NAMES = 4096
"""Most regions of one worker."""
MAX_LAYOUT = 32
"""Most entries of a layout: names with a word of at most :data:`MAX_WORD` characters, or a number."""
MAX_WORD = 64
MAX_TEMPLATE = 192
MAX_NUMBERS = 192
"""Most characters of the numbers in the names of regions."""
WORKERS = "tensor_parallel_size"
"""The entry of a layout that has the number of an engine's workers."""
Word = Annotated[str, Field(max_length=MAX_WORD)]
Layout = Annotated[dict[Word, Word | Annotated[int, Field(ge=-(2**63), lt=2**63)]], Field(max_length=MAX_LAYOUT)]
"""The properties that must be the same at both ends of a transfer."""
Size = Annotated[int, Field(ge=1, lt=2**31)]
Bytes = Annotated[int, Field(ge=0, lt=2**47)]
Index = Annotated[int, Field(ge=0, lt=2**20)]

Kind = Literal["tokens", "heads", "part"]


class Axis(NamedTuple):
    """An axis of a block: ``size`` steps of ``stride`` bytes. Axes of the kind ``part`` are the same everywhere."""

    kind: Kind
    size: int
    stride: int


class Heads(NamedTuple):
    """The heads ``first`` to ``stop - 1`` of ``of``. Workers that have the same ones are replicas."""

    first: int
    stop: int
    of: int

    def __str__(self) -> str:
        return f"{self.first} to {self.stop - 1} of {self.of}"

    @property
    def number(self) -> int:
        """Number of heads."""
        return self.stop - self.first


ALL_HEADS = Heads(0, 1, 1)
"""The heads of a region that every worker has whole, as of latent attention."""

_Axis = Annotated[tuple[Kind, Size, Bytes], Strict(False)]
_Heads = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], Size, Size], Strict(False)]


@dataclass(frozen=True, slots=True)
class Composition:
    """The composition of one region's blocks.

    Attributes:
        plane: number of the worker's plane.
        tokens: tokens of a block.
        heads: the heads that it holds.
        axes: in the order of the engine's dimensions.
        itemsize: bytes in a row within which nothing is cut.
        dtype: the element type.
        packing: how tokens are stored where no axis says it; empty if an axis does.
        is_optional: True if a worker can do without it, such as the cache of a draft model.
    """

    plane: int
    tokens: int
    heads: Heads
    axes: tuple[Axis, ...]
    itemsize: int
    dtype: str
    packing: str = ""
    is_optional: bool = False

    def axis(self, kind: Kind) -> Axis | None:
        """Return the axis of a kind that can only be there once; None if the block does not say it."""
        return next((axis for axis in self.axes if axis.kind == kind), None)

    @property
    def parts(self) -> list[Axis]:
        """The axes that are the same everywhere."""
        return [axis for axis in self.axes if axis.kind == "part"]

    @property
    def extent(self) -> int:
        """Bytes from the first byte of a block to its last one."""
        return self.itemsize + sum((axis.size - 1) * axis.stride for axis in self.axes)

    @property
    def content(self) -> int:
        """Bytes of a block that mean something."""
        product = self.itemsize
        for axis in self.axes:
            product *= axis.size
        return product


@dataclass(frozen=True, slots=True)
class Region:
    """A named region: block ``b`` begins ``offset`` bytes behind block ``b`` of the plane's tensor ``tensor``."""

    name: str
    tensor: int
    offset: int
    composed: Composition


class Plane(BaseModel):
    """Tensors that are cut into blocks of ``stride`` bytes, for the blocks of one group of layers."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    group: Annotated[int, Field(ge=0, lt=MAX_PLANES)] = 0
    stride: Annotated[int, Field(ge=1, lt=2**47)]
    tensors: Annotated[int, Field(ge=1, lt=2**20)]


class Regions(BaseModel):
    """Regions of one composition, whose names differ in a number, as JSON has them.

    Attributes:
        template, numbers: the names: the numbers, such as ``0-60`` or ``3-47/4,60``, take the place of ``*``.
        tensor, tensor_step: the first region's tensor, and the distance to the next region's.
        offset, offset_step: the same of their places in a block.
        plane, tokens, heads, axes, itemsize, dtype, packing, is_optional: see :class:`Composition`.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    template: Annotated[str, Field(max_length=MAX_TEMPLATE)]
    numbers: Annotated[str, Field(max_length=MAX_NUMBERS, pattern=r"^([0-9]{1,6}([-/,][0-9]{1,6})*)?$")] = ""
    tensor: Index
    tensor_step: Annotated[int, Field(gt=-(2**20), lt=2**20)] = 0
    offset: Bytes = 0
    offset_step: Annotated[int, Field(gt=-(2**47), lt=2**47)] = 0
    plane: Annotated[int, Field(ge=0, lt=MAX_PLANES)] = 0
    tokens: Size
    heads: _Heads
    axes: Annotated[tuple[_Axis, ...], Strict(False), Field(max_length=MAX_AXES), FailFast()]
    itemsize: Size
    dtype: Word
    packing: Word = ""
    is_optional: bool = False

    def each(self) -> Iterator[Region]:
        """Yield the regions. Raises ValueError if there are more than :data:`MAX_NAMES`."""
        composed = Composition(
            self.plane,
            self.tokens,
            Heads(*self.heads),
            tuple(Axis(*axis) for axis in self.axes),
            self.itemsize,
            self.dtype,
            self.packing,
            self.is_optional,
        )
        for at, name in enumerate(names_of(self.template, self.numbers)):
            tensor, offset = self.tensor + at * self.tensor_step, self.offset + at * self.offset_step
            yield Region(name, tensor, offset, composed)


class Memory(BaseModel):
    """The memory of a worker's KV cache, as JSON has it."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    planes: Annotated[tuple[Plane, ...], Strict(False), Field(min_length=1, max_length=MAX_PLANES), FailFast()]
    regions: Annotated[tuple[Regions, ...], Strict(False), Field(max_length=MAX_REGIONS), FailFast()]

    @cached_property
    def said(self) -> bytes:
        """The same as JSON, for a digest."""
        return self.model_dump_json().encode()

    def __hash__(self) -> int:
        return hash(self.said)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Memory) and self.said == other.said)

    def block_sizes(self, group: int) -> set[int]:
        """Return the tokens of a group's blocks, of each of its regions."""
        return self.sizes_by_group().get(group, set())

    def sizes_by_group(self) -> dict[int, set[int]]:
        """Return the tokens of each group's blocks, of each of its regions."""
        found: dict[int, set[int]] = {}
        for some in self.regions:
            if some.plane < len(self.planes):
                found.setdefault(self.planes[some.plane].group, set()).add(some.tokens)
        return found

    def by_name(self) -> dict[str, Region]:
        """Return the regions by name.

        Raises ValueError if they are not regions of these planes, or there are too many: a peer may have made them up.
        """
        found: dict[str, Region] = {}
        for some in self.regions:
            run = list(some.each())
            for region in run:
                if region.name in found:
                    raise ValueError(f"two regions have the name {region.name}")
                if len(found) == MAX_NAMES:
                    raise ValueError(f"there are more than {MAX_NAMES} regions")
                found[region.name] = region
            for region in (run[0], run[-1]) if run else ():  # the places of the others are between theirs
                self._check(region)
        return found

    def _check(self, region: Region) -> None:
        """Raise ValueError if a region is not in its plane, or contradicts itself."""
        composed = region.composed
        if composed.plane >= len(self.planes):
            raise ValueError(f"{region.name} is in plane {composed.plane}: there are {len(self.planes)}")
        plane, heads = self.planes[composed.plane], composed.heads
        if not 0 <= region.tensor < plane.tensors:
            raise ValueError(f"{region.name} is in tensor {region.tensor}: its plane has {plane.tensors}")
        if region.offset < 0 or region.offset + composed.extent > plane.stride:
            end = region.offset + composed.extent
            raise ValueError(
                f"{region.name} ends {end} bytes behind its block's first byte: a block has {plane.stride}"
            )
        if not heads.first < heads.stop <= heads.of:
            raise ValueError(f"{region.name} has heads {heads}: must be some of them")
        for kind, size in (("tokens", composed.tokens), ("heads", heads.number)):
            sizes = [axis.size for axis in composed.axes if axis.kind == kind]
            if sizes not in ([], [size]):
                raise ValueError(f"{region.name} has axes of {sizes} {kind}: must have one of {size}, or none")


def names_of(template: str, numbers: str) -> Iterator[str]:
    """Yield the names that a template and its numbers stand for. Raises ValueError if there are more than the limit."""
    if not numbers:
        yield template
        return
    before, _, after = template.partition("*")
    left = MAX_NAMES
    for some in numbers.split(","):
        which = _range_of(some)
        left -= len(which)
        if left < 0:
            raise ValueError(f"{numbers} are more than {MAX_NAMES} numbers")
        for number in which:
            yield f"{before}{number}{after}"


def _range_of(text: str) -> range:
    """Return the range that ``3``, ``3-60`` or ``3-60/4`` stands for. Raises ValueError if it stands for none."""
    found = re.fullmatch(r"([0-9]+)(?:-([0-9]+)(?:/([0-9]+))?)?", text)
    if found is None:
        raise ValueError(f"{text!r} is no range of numbers, such as 3, 3-60 or 3-60/4")
    first, last, step = found.groups()
    return range(int(first), int(last or first) + 1, max(int(step or 1), 1))


def folded(regions: Iterable[Region]) -> tuple[Regions, ...]:
    """Return the same regions as JSON has them: together those that differ in a number and in evenly spaced places."""
    apart: dict[tuple[str, Composition], list[tuple[int | None, Region]]] = {}
    for region in regions:
        before, number, after = _split(region.name)
        template = region.name if number is None else f"{before}*{after}"
        apart.setdefault((template, region.composed), []).append((number, region))
    return tuple(
        _as_json(template, composed, run) for (template, composed), some in apart.items() for run in _runs_of(some)
    )


def _split(name: str) -> tuple[str, int | None, str]:
    """Return a name around the first number in it."""
    before, number, after = [*re.split(r"((?<![0-9])(?:0|[1-9][0-9]{0,5})(?![0-9]))", name, maxsplit=1), "", ""][:3]
    return (before, int(number), after) if number and "*" not in name else (name, None, "")


def _runs_of(some: Sequence[tuple[int | None, Region]]) -> Iterator[list[tuple[int | None, Region]]]:
    """Yield runs of regions whose places are evenly spaced, and whose numbers fit into one text."""
    run: list[tuple[int | None, Region]] = []
    for each in some:
        if run and not _continues(run, each):
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def _continues(run: Sequence[tuple[int | None, Region]], new: tuple[int | None, Region]) -> bool:
    number, region = new
    last = run[-1]
    if number is None or len(_text_of([each for each, _ in run] + [number])) > MAX_NUMBERS:
        return False
    steps = {
        (b.tensor - a.tensor, b.offset - a.offset) for (_, a), (_, b) in ([] if len(run) == 1 else [(run[0], run[1])])
    }
    return (region.tensor - last[1].tensor, region.offset - last[1].offset) in steps or not steps


def _as_json(template: str, composed: Composition, run: Sequence[tuple[int | None, Region]]) -> Regions:
    first, second = run[0][1], run[min(1, len(run) - 1)][1]
    return Regions(
        template=template,
        numbers=_text_of([number for number, _ in run]),
        tensor=first.tensor,
        tensor_step=second.tensor - first.tensor,
        offset=first.offset,
        offset_step=second.offset - first.offset,
        plane=composed.plane,
        tokens=composed.tokens,
        heads=composed.heads,
        axes=composed.axes,
        itemsize=composed.itemsize,
        dtype=composed.dtype,
        packing=composed.packing,
        is_optional=composed.is_optional,
    )


def _text_of(numbers: Sequence[int | None]) -> str:
    """Return numbers as a text: ``0-3,8-16/4``."""
    known = [number for number in numbers if number is not None]
    texts, at = [], 0
    while at < len(known):
        step = known[at + 1] - known[at] if at + 1 < len(known) else 1
        stop = at + 1
        while step > 0 and stop < len(known) and known[stop] - known[stop - 1] == step:
            stop += 1
        if stop - at < 3 and step != 1:  # two numbers are no progression
            stop = at + 1
        first, last = known[at], known[stop - 1]
        texts.append(str(first) if stop == at + 1 else f"{first}-{last}" + ("" if step == 1 else f"/{step}"))
        at = stop
    return ",".join(texts)


def heads_by_rank(shards: int, ranks: int, of: int) -> list[Heads]:
    """Return the heads of each worker, if ``of`` heads are in ``shards`` shards, of which neighbours have replicas.

    Raises ValueError if they cannot be.
    """
    if shards < 1 or ranks % shards or of % shards:
        raise ValueError(f"{of} heads cannot be in {shards} shards at {ranks} workers")
    each, replicas = of // shards, ranks // shards
    return [Heads(rank // replicas * each, (rank // replicas + 1) * each, of) for rank in range(ranks)]


def described(regions: Iterable[Region]) -> dict[str, str | int]:
    """Return regions in words, for ends that must have the same ones."""
    found = list(regions)
    made: dict[str, str | int] = {"regions": len(found)}
    for name, values in (
        ("block_size", [each.composed.tokens for each in found]),
        ("heads", [each.composed.heads for each in found]),
        ("dtype", [each.composed.dtype for each in found]),
        ("packing", [each.composed.packing for each in found]),
        ("block_shape", [_shape_of(each.composed) for each in found]),
    ):
        words = list(dict.fromkeys(str(value) for value, _ in groupby(values)))
        made[name] = int(words[0]) if len(words) == 1 and words[0].isdigit() else " | ".join(words)
    return made


def _shape_of(composed: Composition) -> str:
    """Return the axes of a block, outermost first."""
    ordered = sorted(composed.axes, key=lambda axis: -axis.stride)
    return "x".join(f"{axis.size}" if axis.kind == "part" else axis.kind for axis in ordered)
