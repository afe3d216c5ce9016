"""Memory of a cache, given as arrays, tensors, buffers or addresses, and shown as arrays or tensors.

Accepting them needs neither numpy nor torch: an object is recognised by what it can do. The functions that make arrays
or tensors import what they need when they are called, and raise ``FeatureNotEnabled`` with the package's name if it is
missing.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import reprlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from aiodatadist._values import checks
from aiodatadist._values.descriptors import CacheDesc, DataType, Placement
from aiodatadist.errors import DeviceError, FeatureNotEnabled, ParamInvalid

if TYPE_CHECKING:
    from numpy.typing import NDArray

ELEMENTS: Final = {
    DataType.DT_FLOAT: "float32", DataType.DT_FLOAT16: "float16", DataType.DT_INT8: "int8", DataType.DT_INT32: "int32",
    DataType.DT_UINT8: "uint8", DataType.DT_INT16: "int16", DataType.DT_UINT16: "uint16", DataType.DT_UINT32: "uint32",
    DataType.DT_INT64: "int64", DataType.DT_UINT64: "uint64", DataType.DT_DOUBLE: "float64", DataType.DT_BOOL: "bool",
    DataType.DT_BF16: "bfloat16",
}  # fmt: skip
"""The names of element types in numpy and torch. Neither has DT_STRING."""

_FORMATS: Final = {"e": "float16", "f": "float32", "d": "float64", "?": "bool"}
_TENSOR: Final = ("data_ptr", "is_contiguous", "element_size", "numel", "dtype", "device")
_WANTED: Final = "an address (int), a numpy array, a torch tensor or a writable buffer"


@dataclass(frozen=True, slots=True)
class Span:
    """The memory of one tensor.

    Attributes:
        address: its start; never 0.
        nbytes: its size, or None for a plain address, which has none.
        keep: an object to hold as long as the memory is used; None for a plain address.
    """

    address: int
    nbytes: int | None
    keep: object


def spans(values: Sequence[Any], name: str, desc: CacheDesc, *, host_as_device: bool = False) -> list[Span]:
    """Return the memory of each tensor of a cache. Reads and changes none of the bytes, and copies nothing.

    A tensor is an address, a numpy array, a torch tensor on ``cpu`` or ``npu``, or another buffer (bytearray,
    memoryview, array, ctypes array ...); one call may mix them. It must be contiguous, writable, ``desc.size`` bytes
    long, of ``desc.data_type``, and must not overlap the others. DT_BF16 may come as ``uint16``; a buffer of plain
    bytes fits every type.

    Args:
        values: a list or tuple of ``desc.num_tensors`` tensors.
        name: the name of the argument in messages.
        host_as_device: True to accept arrays, buffers and ``cpu`` tensors for ``Placement.DEVICE``, as softnpu can.

    Raises:
        TypeError: if ``values`` or an element is none of these.
        ValueError: if an address does not fit uint64.
        ParamInvalid: if any other rule is broken, or an address is 0 or leaves the address space.
    """
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name} is of type {type(values).__name__}: must be a list or tuple of tensors or addresses")
    readers = [_reader(value, f"{name}[{i}]") for i, value in enumerate(values)]
    if not values or len(values) != desc.num_tensors:
        raise ParamInvalid(
            f"{name} has {len(values)} entries for {desc.num_tensors} tensors: must have one for each, and at least 1"
        )
    rules = _Rules(desc, desc.size, host_as_device)
    found = [read(value, f"{name}[{i}]", rules) for i, (read, value) in enumerate(zip(readers, values, strict=True))]
    for i, span in enumerate(found):
        _check_address(span.address, f"{name}[{i}]", rules.size)
    _check_apart(found, name, rules.size)
    return found


@dataclass(frozen=True, slots=True)
class _Rules:
    """The rules of a cache for each of its tensors."""

    desc: CacheDesc
    size: int
    host_as_device: bool

    def check_device(self, where: str, device: str) -> None:
        placement = self.desc.placement
        if device not in {"cpu", "npu"}:
            raise ParamInvalid(f"{where} is on {device}: must be on cpu or npu")
        if device == "npu" and placement is Placement.HOST:
            raise ParamInvalid(f"{where} is on npu: a cache of {placement} needs memory of the host")
        if device == "cpu" and placement is Placement.DEVICE and not self.host_as_device:
            raise ParamInvalid(
                f"{where} is on cpu: a cache of {placement} needs memory of the NPU",
                hint="register it with Placement.HOST, and swap_blocks between it and a DEVICE cache",
            )

    def check_contents(self, where: str, element: str | None, nbytes: int) -> None:
        data_type = self.desc.data_type
        allowed = {None, ELEMENTS.get(data_type, "")} | ({"uint16"} if data_type is DataType.DT_BF16 else set())
        if element not in allowed:
            raise ParamInvalid(f"{where} has elements of {element}: the cache has {data_type.name}")
        if nbytes != self.size:
            raise ParamInvalid(f"{where} has {nbytes} bytes: each tensor of {self.desc} has {self.size}")


def _reader(value: Any, where: str) -> Callable[[Any, str, _Rules], Span]:
    """Return the function that reads a value. Raises ``TypeError`` if there is none.

    A class is not a tensor, and neither is a scalar of numpy's.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return _of_address
    if not isinstance(value, (bool, type, getattr(sys.modules.get("numpy"), "generic", ()))):
        if all(hasattr(value, part) for part in _TENSOR):
            return _of_tensor
        if hasattr(value, "__array_interface__") and hasattr(value, "dtype"):
            return _of_array
        if _is_buffer(value):
            return _of_buffer
    raise TypeError(f"{where} is {reprlib.repr(value)} of type {type(value).__name__}: must be {_WANTED}")


def _is_buffer(value: Any) -> bool:
    try:
        memoryview(value).release()
    except TypeError:
        return False
    except (ValueError, BufferError):  # it is a buffer, but cannot be read now; _of_buffer says why
        return True
    return True


def _of_address(value: int, where: str, _rules: _Rules) -> Span:
    return Span(checks.integer(value, where, checks.UINT64), None, None)


def _of_tensor(value: Any, where: str, rules: _Rules) -> Span:
    rules.check_device(where, value.device.type)
    layout = str(getattr(value, "layout", "torch.strided"))
    if layout != "torch.strided":
        raise ParamInvalid(f"{where} has the layout {layout}: must be torch.strided")
    try:
        contiguous, nbytes = value.is_contiguous(), value.numel() * value.element_size()
        address = value.data_ptr()
    except RuntimeError as problem:
        raise ParamInvalid(f"{where} is a {type(value).__name__} without its own memory: {problem}") from problem
    if not contiguous:
        raise ParamInvalid(f"{where} is not contiguous: pass its contiguous(), which is a copy")
    rules.check_contents(where, str(value.dtype).removeprefix("torch."), nbytes)
    return Span(address, nbytes, value)


def _of_array(value: Any, where: str, rules: _Rules) -> Span:
    interface = value.__array_interface__
    address, readonly = interface["data"]
    rules.check_device(where, "cpu")
    if interface.get("strides") is not None:
        raise ParamInvalid(f"{where} has strides {interface['strides']}: must be C-contiguous")
    if readonly:
        raise ParamInvalid(f"{where} is a read-only {type(value).__name__}: must be writable")
    rules.check_contents(where, str(value.dtype), value.nbytes)
    return Span(address, value.nbytes, value)


def _of_buffer(value: Any, where: str, rules: _Rules) -> Span:
    """Return the span of a buffer. It keeps a memoryview, not the object, so that a bytearray cannot be resized."""
    try:
        view = memoryview(value)
    except (ValueError, BufferError) as problem:
        raise ParamInvalid(f"{where} is a {type(value).__name__} that shows no memory: {problem}") from problem
    rules.check_device(where, "cpu")
    if not view.c_contiguous:
        raise ParamInvalid(f"{where} has strides {view.strides}: must be C-contiguous")
    if view.readonly:
        raise ParamInvalid(f"{where} is a read-only {type(value).__name__}: must be writable")
    rules.check_contents(where, _element_of(view), view.nbytes)
    return Span(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes, view)


def _element_of(view: memoryview) -> str | None:
    """Return a buffer's element type by numpy's name, None for plain bytes, or the format if it is not a DataType."""
    letter = view.format.lstrip("@=" + ("<" if sys.byteorder == "little" else ">!"))
    if letter in {"B", "c"}:
        return None
    if letter in {"b", "h", "i", "l", "q", "n"}:
        return f"int{8 * view.itemsize}"
    if letter in {"H", "I", "L", "Q", "N"}:
        return f"uint{8 * view.itemsize}"
    return _FORMATS.get(letter, view.format)


def _check_address(address: int, where: str, size: int) -> None:
    if address == 0:
        raise ParamInvalid(f"{where} is 0: no tensor starts there")
    if address + size > 2**64:
        raise ParamInvalid(f"{where} is {address:#x}: {size} bytes from there leave the address space")


def _check_apart(found: list[Span], name: str, size: int) -> None:
    for (start, first), (address, i) in pairwise(sorted((span.address, i) for i, span in enumerate(found))):
        if address < start + size:
            raise ParamInvalid(
                f"{name}[{i}] at {address:#x} overlaps {name}[{first}] at {start:#x}: "
                f"tensors of {size} bytes must not overlap"
            )


# ---- views ----


def as_arrays(view: memoryview, desc: CacheDesc, offsets: Sequence[int]) -> list[NDArray[Any]]:
    """Return arrays over ``view``: one of ``desc.shape`` for each offset, without a copy. They keep its memory alive.

    numpy has no bfloat16: with DT_BF16 they are ``uint16``, the bits of the elements.

    Args:
        view: writable and contiguous; its own element type does not matter.
        offsets: bytes from the start of ``view``.

    Raises:
        FeatureNotEnabled: if numpy is missing.
        ParamInvalid: for DT_STRING, or if a tensor is not within a writable, contiguous view.
    """
    _check_view(view, desc, offsets)
    numpy = _load("numpy", "numpy", "arrays()")
    bits = desc.data_type is DataType.DT_BF16
    dtype = numpy.dtype("uint16" if bits else _element_name(desc))
    count = math.prod(desc.shape)
    return [numpy.frombuffer(view, dtype, count, offset).reshape(desc.shape) for offset in offsets]


def as_tensors(view: memoryview, desc: CacheDesc, offsets: Sequence[int]) -> list[Any]:
    """Return ``torch.Tensor`` objects on ``cpu`` over ``view``. DT_BF16 becomes ``torch.bfloat16``.

    For arguments and other errors see :func:`as_arrays`.

    Raises:
        FeatureNotEnabled: if torch is missing, or too old for uint16, uint32 or uint64.
    """
    _check_view(view, desc, offsets)
    torch = _load("torch", "torch", "tensors()")
    dtype, count, shape = _torch_type(torch, desc), math.prod(desc.shape), tuple(desc.shape)
    # a separate view: torch keeps the object, but exports nothing from it, so the caller could release a shared one
    own = memoryview(view)
    return [torch.frombuffer(own, dtype=dtype, count=count, offset=offset).reshape(shape) for offset in offsets]


def npu_tensors(desc: CacheDesc, addresses: Sequence[int]) -> list[Any]:
    """Return a ``torch.Tensor`` on ``npu`` of ``desc.shape`` at each address, made by torchair. Not yet run on hardware.

    The tensors own nothing: the memory must stay allocated as long as one of them is used. torchair has no uint16,
    uint32 and uint64.

    Raises:
        TypeError, ValueError: if an address is not an int, or does not fit uint64.
        FeatureNotEnabled: if torch, torch_npu or torchair, which comes with it, is missing.
        ParamInvalid: if the placement is not ``Placement.DEVICE``, torch or torchair lacks the element type, or an
            address is 0 or leaves the address space.
        DeviceError: if torchair failed.
    """
    if desc.placement is not Placement.DEVICE:
        raise ParamInvalid(f"tensors on npu need Placement.DEVICE, not {desc.placement}")
    for i, address in enumerate(checks.sequence(addresses, "addresses", int)):
        _check_address(checks.integer(address, f"addresses[{i}]", checks.UINT64), f"addresses[{i}]", desc.size)
    _element_name(desc)
    torch = _load("torch", "torch", "tensors()")
    _load("torch_npu", "torch-npu", "tensors()")  # before torchair, which comes with it
    torchair = _load("torchair", "torch-npu", "tensors()")
    if not hasattr(torchair, "llm_datadist"):
        raise FeatureNotEnabled("this torchair has no llm_datadist", hint="pip install --upgrade torch-npu")
    dtype = _torch_type(torch, desc)
    try:
        return list(torchair.llm_datadist.create_npu_tensors(list(desc.shape), dtype, list(addresses)))
    except ValueError as problem:
        raise ParamInvalid(f"torchair makes no tensors of {desc}: {problem}") from problem
    except RuntimeError as problem:
        raise DeviceError(f"torchair could not make tensors of {desc}: {problem}") from problem


def _check_view(view: memoryview, desc: CacheDesc, offsets: Sequence[int]) -> None:
    checks.instance(view, "view", memoryview)
    if view.readonly or not view.c_contiguous:
        raise ParamInvalid("view is read-only or not C-contiguous: must be writable and in one piece")
    _element_name(desc)
    size = desc.size
    for i, offset in enumerate(checks.sequence(offsets, "offsets", int)):
        if not 0 <= offset <= view.nbytes - size:
            raise ParamInvalid(
                f"offsets[{i}] is {offset}: {size} bytes from there are not within the view's {view.nbytes}"
            )


def _element_name(desc: CacheDesc) -> str:
    if desc.data_type not in ELEMENTS:
        raise ParamInvalid(f"data_type is {desc.data_type.name}: no array and no tensor has such elements")
    return ELEMENTS[desc.data_type]


def _torch_type(torch: Any, desc: CacheDesc) -> Any:
    name = _element_name(desc)
    if not hasattr(torch, name):
        raise FeatureNotEnabled(f"torch {torch.__version__} has no {name}", hint="pip install --upgrade torch")
    return getattr(torch, name)


def _load(module: str, package: str, user: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise FeatureNotEnabled(
            f"{user} needs {module}, which cannot be imported: {problem}", hint=f"pip install {package}"
        ) from problem
