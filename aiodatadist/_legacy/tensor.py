"""The Tensor: elements in host memory. numpy is needed only to make one from an array, or to see one as an array."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._device import Memory
from aiodatadist._device.tensors import ELEMENTS
from aiodatadist._values import checks
from aiodatadist._values.descriptors import DataType
from aiodatadist.errors import FeatureNotEnabled, ParamInvalid

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TYPES: Final = {name: data_type for data_type, name in ELEMENTS.items() if name != "bfloat16"}


class TensorDesc:
    """Element type and shape of a :class:`Tensor`."""

    __slots__ = ("_dtype", "_shape")

    def __init__(self, dtype: DataType, shape: list[int] | tuple[int, ...]) -> None:
        self._dtype = checks.instance(dtype, "dtype", DataType)
        self._shape = [checks.integer(dim, "shape", checks.INT64) for dim in checks.sequence(shape, "shape", int)]
        if any(dim < 0 for dim in self._shape):
            raise ParamInvalid(f"shape is {self._shape}: no dimension may be below 0")

    @property
    def dtype(self) -> DataType:
        """The element type."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """The shape, as a new list."""
        return list(self._shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self._shape) * self._dtype.itemsize

    def __repr__(self) -> str:
        return f"TensorDesc({self._dtype.name}, {self._shape})"


class Tensor:
    """Elements in host memory, with their type and shape. The memory is freed with it, unless an address was given.

    Args:
        data: a numpy array or another tensor, which is copied; or the address of ``tensor_desc``'s bytes, which must
            stay in place. An array must be C-contiguous, and match ``tensor_desc`` if that is given; ``DT_BF16`` is
            passed as uint16.
        tensor_desc: needed with an address; an array describes itself.

    Raises:
        TypeError, ValueError: if an argument is none of these.
        RuntimeError: if the array's shape, element type or order is wrong.
    """

    def __init__(self, data: NDArray[Any] | Tensor | int, tensor_desc: TensorDesc | None = None) -> None:
        if tensor_desc is not None:
            checks.instance(tensor_desc, "tensor_desc", TensorDesc)
        self._bytes: Any = None
        self._words: Any = None
        if isinstance(data, Tensor):
            self._take_tensor(data, tensor_desc)
        elif isinstance(data, int) and not isinstance(data, bool):
            self._take_address(data, tensor_desc)
        else:
            self._take_array(data, tensor_desc)

    @classmethod
    async def copied(cls, memory: Memory, tensor_desc: TensorDesc) -> Tensor:
        """Return a tensor with a copy of this host memory. If cancelled, the copy ends first."""
        made = cls.__new__(cls)
        made._desc, made._words = tensor_desc, None
        made._bytes = await in_thread(_copy_of, memory.address, tensor_desc.nbytes)
        return made

    @staticmethod
    def from_tensor_tuple(tensor_tuple: tuple[int, int, list[int]]) -> Tensor:
        """Return a tensor over memory at an address: ``(address, number of the data type, shape)``."""
        address, dtype, shape = checks.instance(tensor_tuple, "tensor_tuple", tuple)
        return Tensor(address, TensorDesc(DataType(dtype), shape))

    @property
    def tensor_desc(self) -> TensorDesc:
        """Element type and shape."""
        return self._desc

    def numpy(self, copy: bool = False) -> NDArray[Any]:
        """Return an array over the elements, or a copy if ``copy``. ``DT_BF16`` is always copied, to float32.

        Raises:
            RuntimeError: if it is of strings, which must be copied.
            FeatureNotEnabled: if numpy is not installed.
        """
        np, desc = _numpy(), self._desc
        if desc.dtype is DataType.DT_STRING:
            if not copy:
                raise RuntimeError("a tensor of strings has no elements to look at: numpy(copy=True)")
            return self._words.copy()  # type: ignore[no-any-return]
        count = math.prod(desc.shape)
        if desc.dtype is DataType.DT_BF16:
            bits = np.frombuffer(self._bytes, np.uint16, count).astype(np.uint32) << 16
            return bits.view(np.float32).reshape(desc.shape)  # type: ignore[no-any-return]
        found = np.frombuffer(self._bytes, ELEMENTS[desc.dtype], count).reshape(desc.shape)
        return found.copy() if copy else found  # type: ignore[no-any-return]

    def _take_tensor(self, other: Tensor, desc: TensorDesc | None) -> None:
        self._check(other._desc.dtype, other._desc.shape, desc)
        self._words = None if other._words is None else other._words.copy()
        self._bytes = None if other._bytes is None else bytearray(other._bytes)

    def _take_address(self, address: int, desc: TensorDesc | None) -> None:
        if desc is None:
            raise TypeError("tensor_desc is None: with an address it must say what is there")
        if checks.integer(address, "data", checks.UINT64) == 0:
            raise ParamInvalid("data is 0: no tensor starts there")
        if desc.dtype is DataType.DT_STRING:
            raise RuntimeError("tensor_desc is of DT_STRING: strings come as an array")
        self._desc = desc
        self._bytes = memoryview((ctypes.c_char * desc.nbytes).from_address(address)).cast("B")

    def _take_array(self, data: Any, desc: TensorDesc | None) -> None:
        np = _numpy()
        if not isinstance(data, np.ndarray):
            raise TypeError(f"data is of type {type(data).__name__}: must be a numpy array, a Tensor or an address")
        if not data.flags.c_contiguous:
            raise RuntimeError(f"data has strides {data.strides}: must be C-contiguous")
        if data.dtype.kind in "SU":
            self._check(DataType.DT_STRING, list(data.shape), desc)
            self._words = data.copy()
            return
        found = _TYPES.get(data.dtype.name)
        if found is DataType.DT_UINT16 and desc is not None and desc.dtype is DataType.DT_BF16:
            found = DataType.DT_BF16
        if found is None or not data.dtype.isnative:
            raise RuntimeError(f"data has elements of {data.dtype}: no data type stands for them")
        self._check(found, list(data.shape), desc)
        self._bytes = bytearray(data.tobytes())

    def _check(self, dtype: DataType, shape: Sequence[int], desc: TensorDesc | None) -> None:
        if desc is not None and (desc.dtype is not dtype or desc.shape != list(shape)):
            raise RuntimeError(f"tensor_desc is {desc}: data has {dtype.name} of shape {list(shape)}")
        self._desc = TensorDesc(dtype, list(shape))

    def __repr__(self) -> str:
        return f"<Tensor {self._desc.dtype.name} {self._desc.shape}>"


def _copy_of(address: int, nbytes: int) -> mmap.mmap:
    """Return new memory with a copy of these bytes, made without the GIL and without clearing the memory first."""
    fresh = mmap.mmap(-1, nbytes)
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(fresh)), address, nbytes)
    return fresh


def _numpy() -> Any:
    try:
        import numpy as np  # noqa: PLC0415 - only who wants arrays needs it
    except ImportError as problem:
        raise FeatureNotEnabled("arrays need numpy", hint="pip install numpy") from problem
    return np
