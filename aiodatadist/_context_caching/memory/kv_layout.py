"""The registered KV cache: the memory of each token, tensor by tensor, and the part of its layout that must match."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import logging
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from aiodatadist._context_caching import checks as rules
from aiodatadist._context_caching.errors import EmsInvalidArgument
from aiodatadist._context_caching.identity.names import VERSION, Shape
from aiodatadist._context_caching.memory.slots import Users
from aiodatadist._values.descriptors import Placement

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a block table and the geometry of their chunks, by index. A layer is in one group."""

    layers: Sequence[int]
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Memory of one tensor: ``[num_blocks, block_size, ...]``, contiguous."""

    address: int
    shape: tuple[int, ...]
    element: str
    itemsize: int
    keep: object

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in this tensor."""
        return math.prod(self.shape[2:]) * self.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Alike:
    """Tensors of one group with tokens of equal size, in memory of one kind.

    Attributes:
        addresses: address of slot 0 of each, ``array('Q')``.
        before: for each, the bytes that one token has in the tensors of the group in front of it.
    """

    placement: Placement
    token_bytes: int
    addresses: array[int]
    before: tuple[int, ...]


class Group:
    """The tensors of a layer group, and the users of its slots."""

    def __init__(
        self, tensors: Sequence[Tensor], placements_of: Callable[[Iterable[int]], list[Placement | None]]
    ) -> None:
        num_blocks, self.block_size = tensors[0].shape[:2]
        self.slots: int = num_blocks * self.block_size
        self.token_bytes: int = sum(tensor.token_bytes for tensor in tensors)
        self.users: Users = Users(self.slots)
        self.alike: list[Alike] = _sorted_by_kind(tensors, placements_of)


def _sorted_by_kind(
    tensors: Sequence[Tensor], placements_of: Callable[[Iterable[int]], list[Placement | None]]
) -> list[Alike]:
    kinds: dict[tuple[Placement, int], list[tuple[int, int]]] = {}
    before = 0
    placements = placements_of(tensor.address for tensor in tensors)
    for tensor, placement in zip(tensors, placements, strict=True):
        kind = placement or Placement.HOST, tensor.token_bytes
        kinds.setdefault(kind, []).append((tensor.address, before))
        before += tensor.token_bytes
    return [
        Alike(placement, nbytes, array("Q", [a for a, _ in places]), tuple(b for _, b in places))
        for (placement, nbytes), places in kinds.items()
    ]


class Layout:
    """The tensors and groups that ``register_kvcache`` was given.

    Attributes:
        groups: in the order of the call; one group with all layers if none were given.
        shape: the part that is in the names of values.
    """

    def __init__(
        self, layers: Any, groups: Any, placements_of: Callable[[Iterable[int]], list[Placement | None]]
    ) -> None:
        """Check the tensors. Raises EmsInvalidArgument if they are no KV cache, or the groups do not fit."""
        if hasattr(layers, "dtype"):  # a bare array would be read number by number
            raise EmsInvalidArgument(
                f"layers is of type {type(layers).__name__}: must be a list with a list of tensors for each layer"
            )
        tensors = [_layer(layer, f"layers[{i}]") for i, layer in enumerate(rules.some(layers, "layers"))]
        _check_apart([tensor for layer in tensors for tensor in layer])
        self._tensors = tensors
        numbers = _group_numbers(groups, len(tensors))
        for g, group in enumerate(numbers):
            _check_alike(tensors, group, g)
        self.groups: list[Group] = [
            Group([t for layer in group for t in tensors[layer]], placements_of) for group in numbers
        ]
        for made, group in zip(self.groups, numbers, strict=True):
            blocks, size, nbytes = made.slots // made.block_size, made.block_size, made.token_bytes
            logger.info("KV cache: %d layers, %d blocks of %d tokens of %d bytes", len(group), blocks, size, nbytes)
            stacked = next((t.shape for layer in group for t in tensors[layer] if _is_stacked(t.shape)), None)
            if stacked is not None:
                logger.warning(
                    "a tensor of shape %s is treated as 2 blocks of %d tokens: if it is K followed by V, "
                    "register tensor[0] and tensor[1]",
                    stacked,
                    size,
                )
        self.shape: Shape = Shape(_fingerprint(tensors, numbers), len(numbers))


def _is_stacked(shape: Sequence[int]) -> bool:
    """Return True if a shape looks like ``[2, num_blocks, block_size, heads, head_size]``."""
    return len(shape) > 4 and shape[0] == 2


def _fingerprint(layers: Sequence[Sequence[Tensor]], groups: Sequence[Sequence[int]]) -> str:
    """Return a digest of all that determines the bytes of a token, but not of the number of tokens or their place."""
    described = [[[layer, [[t.element, t.shape[2:]] for t in layers[layer]]] for layer in group] for group in groups]
    return hashlib.blake2b(json.dumps([VERSION, described]).encode(), digest_size=16).hexdigest()


def _group_numbers(groups: Any, layers: int) -> list[list[int]]:
    if groups is None:
        return [list(range(layers))]
    numbers = []
    for g, group in enumerate(rules.some(groups, "groups")):
        name = f"groups[{g}]"
        given = rules.some(group.layers if isinstance(group, LayerGroup) else group, name)
        numbers.append(sorted(rules.integer(layer, f"{name}[{i}]", 0, layers - 1) for i, layer in enumerate(given)))
    used = sorted(layer for group in numbers for layer in group)
    if used != list(range(layers)):
        raise EmsInvalidArgument(f"groups have the layers {used}: each of the {layers} layers must be in one group")
    return numbers


def _check_alike(layers: Sequence[Sequence[Tensor]], group: Sequence[int], g: int) -> None:
    first = layers[group[0]][0]
    for layer in group:
        for i, tensor in enumerate(layers[layer]):
            if tensor.shape[:2] != first.shape[:2]:
                raise EmsInvalidArgument(
                    f"layers[{layer}][{i}] has {tensor.shape[0]} blocks of {tensor.shape[1]} tokens, but group {g} has "
                    f"{first.shape[0]} of {first.shape[1]}: layers of one group must agree"
                )


def _check_apart(tensors: Sequence[Tensor]) -> None:
    for left, right in pairwise(sorted(tensors, key=lambda tensor: tensor.address)):
        if right.address < left.address + left.nbytes:
            raise EmsInvalidArgument(
                f"tensors at {left.address:#x} and {right.address:#x} overlap: each must have its own {left.nbytes} bytes"
            )


# ---- tensors as they come ----


def _layer(layer: Any, name: str) -> list[Tensor]:
    given = rules.some(layer, name) if isinstance(layer, (list, tuple)) else None
    if given is None:
        raise EmsInvalidArgument(f"{name} is of type {type(layer).__name__}: must be a list of tensors")
    return [_tensor(value, f"{name}[{i}]") for i, value in enumerate(given)]


def _tensor(value: Any, name: str) -> Tensor:
    if all(hasattr(value, part) for part in ("data_ptr", "is_contiguous", "element_size", "shape", "dtype")):
        found, contiguous, readonly = _of_torch(value), value.is_contiguous(), False
    elif hasattr(value, "__array_interface__"):
        found, contiguous, readonly = _of_array(value, name)
    else:
        found, contiguous, readonly = _of_buffer(value, name)
    if len(found.shape) < 2:
        raise EmsInvalidArgument(f"{name} has the shape {found.shape}: must be [num_blocks, block_size, ...]")
    if found.nbytes == 0:
        raise EmsInvalidArgument(f"{name} has the shape {found.shape}: it has no bytes")
    if not contiguous:
        raise EmsInvalidArgument(f"{name} is not contiguous: consecutive slots must be contiguous memory")
    if readonly:
        raise EmsInvalidArgument(f"{name} is read-only: loads write into it")
    return found


def _of_torch(value: Any) -> Tensor:
    return Tensor(
        value.data_ptr(), tuple(value.shape), str(value.dtype).removeprefix("torch."), value.element_size(), value
    )


def _of_array(value: Any, name: str) -> tuple[Tensor, bool, bool]:
    rules.plain(value, name)
    interface = value.__array_interface__
    found = Tensor(interface["data"][0], tuple(value.shape), str(value.dtype), value.itemsize, value)
    return found, interface.get("strides") is None, interface["data"][1]


def _of_dlpack(value: Any, name: str) -> tuple[Tensor, bool, bool]:
    """Read a DLPack object through numpy: host memory, writable if the provider's DLPack is new enough to say so."""
    try:
        numpy = importlib.import_module("numpy")
    except ImportError as problem:
        raise EmsInvalidArgument(f"{name} is of type {type(value).__name__}, for which numpy is needed") from problem
    try:
        array = numpy.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as problem:
        raise EmsInvalidArgument(
            f"{name} is of type {type(value).__name__}, without host memory: {problem}"
        ) from problem
    return _of_array(array, name)


def _of_buffer(value: Any, name: str) -> tuple[Tensor, bool, bool]:
    try:
        view = memoryview(value)
    except TypeError:
        if hasattr(value, "__dlpack__"):
            return _of_dlpack(value, name)
        raise EmsInvalidArgument(
            f"{name} is of type {type(value).__name__}: must be a torch tensor, a numpy array, another buffer or "
            "something with __dlpack__"
        ) from None
    rules.plain(view, name)
    shape = view.shape or ()
    if view.readonly or not view.c_contiguous or not view.nbytes:
        return Tensor(0, shape, view.format, view.itemsize, view), view.c_contiguous, view.readonly
    address = ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B")))
    return Tensor(address, shape, view.format, view.itemsize, view), True, False
