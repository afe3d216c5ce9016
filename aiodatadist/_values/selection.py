"""The bytes that a transfer moves, as its caller named them: layers, and of these blocks or a slot. A printable value."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aiodatadist._values import checks
from aiodatadist._values.grid import indexes, tensor_range
from aiodatadist.errors import ParamInvalid


class Geometry(Protocol):
    """The properties of a cache, ours or a peer's, that a plan needs.

    ``addresses`` are those of its tensors, each cut into ``pieces`` of ``stride`` bytes: blocks if ``blocks``,
    otherwise batch slots.
    """

    @property
    def cache_id(self) -> int: ...
    @property
    def blocks(self) -> bool: ...
    @property
    def pieces(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def addresses(self) -> array[int]: ...


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers at either end; None means all of them."""

    src: range | None = None
    dst: range | None = None
    tensors_per_layer: int = 2

    def __str__(self) -> str:
        layers = self.src if self.src is not None else self.dst
        return "all layers" if layers is None else f"layers {layers.start} to {layers.stop - 1}"

    def of_source(self, source: Geometry) -> range:
        """Return the tensors of the source in these layers."""
        if self.src is None:
            return range(len(source.addresses))
        return tensor_range(len(source.addresses), self.src, self.tensors_per_layer, "src_layer_range")

    def of_target(self, target: Geometry) -> range:
        """Return the tensors of the destination in these layers."""
        if self.dst is None:
            return range(len(target.addresses))
        return tensor_range(len(target.addresses), self.dst, self.tensors_per_layer, "dst_layer_range")


_ALL = Layers()
"""The default of most callers."""


def _no_blocks() -> array[int]:
    return array("Q")


@dataclass(frozen=True, slots=True)
class BlockParts:
    """Parts of blocks, for a pull between caches whose blocks differ in size.

    Each block is cut into parts of ``nbytes``. They are numbered across the blocks that the call names, in order: if a
    block has ``k`` parts, part ``p`` is part ``p % k`` of the block at position ``p // k``. Part ``src[i]`` goes to
    part ``dst[i]``, in every tensor.

    Args:
        nbytes: bytes of a part; both block sizes must be multiples of it.
        src, dst: part numbers, the same number of them.

    Raises:
        TypeError, ValueError, ParamInvalid: if they are not such numbers.
    """

    nbytes: int
    src: Sequence[int]
    dst: Sequence[int]

    def __post_init__(self) -> None:
        if checks.integer(self.nbytes, "nbytes", checks.INT64) < 1:
            raise ParamInvalid(f"nbytes is {self.nbytes}: must be at least 1")
        for name in ("src", "dst"):
            object.__setattr__(self, name, indexes(getattr(self, name), name))
        if not self.src or len(self.src) != len(self.dst):
            raise ParamInvalid(
                f"src has {len(self.src)} entries, dst has {len(self.dst)}: they must have the same length, at least 1"
            )


@dataclass(frozen=True, slots=True)
class Selection:
    """The data that goes from a source to a destination, in every tensor of the layers.

    It is one of three:

    - ``src_blocks`` and ``dst_blocks``: block ``src_blocks[i]`` goes to block ``dst_blocks[i]``, or with ``parts``,
      parts of the source's blocks go to parts of the destination's;
    - only ``dst_blocks``: the slot ``src_slot`` is cut into chunks that go to these blocks;
    - neither: ``nbytes`` bytes of the slot ``src_slot`` go to the slot ``dst_slot``, from an offset in either.

    The slot at the peer is the one that its cache's key names, and is given to the plan instead.

    Attributes:
        offsets: bytes to skip in the source's slot and in the destination's; None is 0 in both. A pull with offsets,
            even 0, consumes no key.
        parts: None for whole blocks.
    """

    layers: Layers = field(default_factory=Layers)
    src_blocks: array[int] = field(default_factory=_no_blocks)
    dst_blocks: array[int] = field(default_factory=_no_blocks)
    src_slot: int = 0
    dst_slot: int = 0
    nbytes: int = 0
    offsets: tuple[int, int] | None = None
    parts: BlockParts | None = None

    def count_blocks(self) -> int:
        """Return the number of block and part numbers that the selection holds."""
        parts = 0 if self.parts is None else 2 * len(self.parts.src)
        return len(self.src_blocks) + len(self.dst_blocks) + parts

    def __str__(self) -> str:
        if self.parts is not None:
            what = f"{len(self.parts.src)} parts of {len(self.src_blocks)} blocks"
        elif self.src_blocks:
            what = f"{len(self.src_blocks)} blocks"
        elif self.dst_blocks:
            what = f"a slot to {len(self.dst_blocks)} blocks"
        else:
            what = f"{self.nbytes} bytes of a slot"
        return f"{what}, {self.layers}"


def layers_of(src: range | None, dst: range | None, tensors_per_layer: int) -> Layers:
    """Return layers as a caller gave them.

    Raises TypeError, ValueError or ParamInvalid if a range or ``tensors_per_layer`` is wrong.
    """
    for value, name in ((src, "src_layer_range"), (dst, "dst_layer_range")):
        if value is not None:
            checks.instance(value, name, range)
            if value.step != 1 or value.start < 0 or value.stop <= value.start:
                raise ParamInvalid(f"{name} is {value}: must have step 1 and 0 <= start < stop")
    if checks.integer(tensors_per_layer, "tensor_num_per_layer", checks.UINT32) == 0:
        raise ParamInvalid("tensor_num_per_layer is 0: must be at least 1")
    return _ALL if (src, dst, tensors_per_layer) == (None, None, 2) else Layers(src, dst, tensors_per_layer)


def whole_layers(source: Geometry, src: range | None, dst: range | None, tensors_per_layer: int) -> Layers:
    """Return layers for a push: whole layers of the source, the same number at either end. Raises as :func:`layers_of`."""
    layers = layers_of(src, dst, tensors_per_layer)
    count = len(source.addresses)
    if count % tensors_per_layer:
        raise ParamInvalid(f"{count} tensors are not a whole number of layers of {tensors_per_layer}")
    layers.of_source(source)
    if src is not None and dst is not None and len(src) != len(dst):
        raise ParamInvalid(f"src_layer_range {src} and dst_layer_range {dst}: they must have the same length")
    return layers
