"""Arrays and tensors in memory that peers reach without the kernel's help, before there is any cluster."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from aiodatadist._device.device import Device
from aiodatadist._native.runtime import open_runtime
from aiodatadist._values import checks
from aiodatadist._values.descriptors import Placement
from aiodatadist.errors import FeatureNotEnabled, ParamInvalid

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


def empty(
    shape: Sequence[int] | int, dtype: DTypeLike, *, placement: Placement = Placement.DEVICE, device_id: int = 0
) -> NDArray[Any]:
    """Return a numpy array whose memory the transport shares directly; contents are undefined.

    Registered as a cache it is as fast as a pool's memory. On softnpu, ordinary memory of the process can be
    registered, too, but a peer reaches it through the kernel, at a fraction of the speed (``docs/performance.md``). On
    an NPU, HOST memory is pinned.

    The memory is freed when the array, and every view of it, is collected. Slow: make arrays once.

    Args:
        shape: as numpy's.
        dtype: as numpy's.
        placement: that of the caches that it will be registered for. DEVICE only on softnpu.
        device_id: that of the cluster that will register it.

    Raises:
        TypeError, ParamInvalid: if an argument is wrong, or there is no such device.
        RuntimeUnavailable: if no runtime can be opened.
        FeatureNotEnabled: if numpy is missing, or DEVICE memory of an NPU is asked for: use ``torch_empty`` for that.
        OutOfMemory: if there is not enough.
    """
    numpy = _imported("numpy")
    kind = numpy.dtype(dtype)
    sizes = _sizes(shape)
    view = _shared(math.prod(sizes) * kind.itemsize, placement, device_id)
    return numpy.frombuffer(view, kind).reshape(sizes)  # type: ignore[no-any-return]


def torch_empty(
    shape: Sequence[int] | int, dtype: Any, *, placement: Placement = Placement.DEVICE, device_id: int = 0
) -> Any:
    """Return a ``torch.Tensor`` whose memory the transport shares directly; contents are undefined.

    It is on the CPU for HOST memory, and on softnpu. DEVICE memory of an NPU is made by torch_npu, whose memory HCCL
    registers directly; not yet run on hardware.

    Args:
        dtype: a ``torch.dtype``.

    For other arguments and errors see :func:`empty`.
    """
    torch = _imported("torch")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r} of type {type(dtype).__name__}: must be a torch.dtype")
    sizes = _sizes(shape)
    if placement is Placement.DEVICE and not open_runtime().is_soft:
        _imported("torch_npu")
        return torch.empty(sizes, dtype=dtype, device=f"npu:{device_id}")
    view = _shared(math.prod(sizes) * dtype.itemsize, placement, device_id)
    return torch.frombuffer(view, dtype=dtype).reshape(sizes)


def _sizes(shape: Sequence[int] | int) -> tuple[int, ...]:
    if not isinstance(shape, Iterable):
        shape = (shape,)
    sizes = tuple(checks.integer(size, "shape", checks.INT64) for size in shape)
    if any(size <= 0 for size in sizes):
        raise ParamInvalid(f"shape is {sizes}: every size must be above 0")
    return sizes


def _shared(nbytes: int, placement: Placement, device_id: int) -> memoryview:
    """Return new memory, which holds a reference to its device."""
    checks.instance(placement, "placement", Placement)
    device = Device(open_runtime(), checks.integer(device_id, "device_id", checks.INT32))
    try:
        view = device.allocate(nbytes, placement).view()
    except BaseException:
        device._release()
        raise
    weakref.finalize(view.obj, device._release).atexit = False  # _release frees the memory, too
    return view


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise FeatureNotEnabled(f"{name} cannot be imported: {error}", hint=f"pip install {name}") from error
