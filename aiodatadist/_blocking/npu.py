"""A stand-in for ``torch_npu`` on machines without one: names and calls of torch's npu, on the CPU.

The memory of a tensor "on the npu" is a CPU tensor's, which softnpu accepts as device memory. Moving a tensor between
the two copies it, as on an NPU. Work is done when a call returns, so streams and events have nothing to wait for. A
tensor made with ``device="npu"`` reports the CPU as its device. If torch does not accept a backend written in Python
(2.13 does), ``"npu"`` is understood only in the thread that imported torch.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from time import perf_counter
from types import ModuleType
from typing import Any

from aiodatadist.errors import ParamInvalid

torch: Any = import_module("torch")  # optional, and installed if this module is imported
TorchFunctionMode: Any = import_module("torch.overrides").TorchFunctionMode

DEVICES = 8
"""Number of devices, the same as softnpu has."""


class Event:
    """An event: everything submitted before it has happened when :meth:`record` returns."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds between the two records."""
        return (end_event._at - self._at) * 1000


class Stream:
    """A stream, whose work is done when the call returns."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = device

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class _Devices:
    """The current device, which only matters to those who ask for it."""

    current = 0


def set_device(device: Any) -> None:
    """Make a device current. Raises ParamInvalid if there is no such device."""
    number = torch.device("npu", device).index if isinstance(device, int) else torch.device(device).index or 0
    if not 0 <= number < DEVICES:
        raise ParamInvalid(f"device {device!r}: its number must be below {DEVICES}")
    _Devices.current = number


def current_device() -> int:
    return _Devices.current


def device_count() -> int:
    return DEVICES


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Do nothing: it is initialised."""


def get_device_name(device: Any = None) -> str:
    return "softnpu"


def get_device_capability(device: Any = None) -> None:
    """Return None, as torch_npu does: an NPU has no capability."""


@dataclass(frozen=True)
class _Properties:
    """The properties of a device that torch_npu has, too."""

    name: str
    total_memory: int
    multi_processor_count: int = 0


def get_device_properties(device: Any = None) -> _Properties:
    return _Properties(get_device_name(device), mem_get_info(device)[1])


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and the total bytes of the host's memory, which these tensors use."""
    page, name = os.sysconf("SC_PAGE_SIZE"), "SC_AVPHYS_PAGES"
    return os.sysconf(name) * page, os.sysconf("SC_PHYS_PAGES") * page


def _no_bytes(device: Any = None) -> int:
    """Return 0: there is no allocator."""
    return 0


def _no_statistics(device: Any = None) -> None:
    """Do nothing: there are no statistics to reset."""


def synchronize(device: Any = None) -> None:
    """Do nothing: all work is done."""


def empty_cache() -> None:
    """Do nothing: nothing is cached."""


def current_stream(device: Any = None) -> Stream:
    return Stream(device)


def default_stream(device: Any = None) -> Stream:
    return Stream(device)


def set_stream(stream: Stream) -> None:
    """Do nothing: all streams are alike."""


@contextmanager
def device(device: Any) -> Iterator[None]:
    """Make another device current inside the context."""
    before = _Devices.current
    set_device(device)
    try:
        yield
    finally:
        _Devices.current = before


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Do nothing: all streams are alike."""
    yield


def manual_seed(seed: int) -> None:
    """Seed the CPU's generator, which makes these tensors' numbers. ``torch.manual_seed`` calls this in turn."""
    torch.default_generator.manual_seed(seed)


def get_rng_state(device: Any = None) -> Any:
    return torch.default_generator.get_state()


def set_rng_state(new_state: Any, device: Any = None) -> None:
    torch.default_generator.set_state(new_state)


def get_amp_supported_dtype() -> list[Any]:
    return [torch.float16, torch.bfloat16, torch.float32]


def set_compile_mode(jit_compile: bool = False) -> None:
    """Do nothing: nothing is compiled."""


# ---- torch's own idea of an accelerator ----


def _register() -> None:
    """Teach torch ``device="npu"`` and that there is such an accelerator.

    Barriers of torch.distributed ask for it, and so do pinned memory and ``torch.accelerator``. A real torch_npu brings
    an implementation in C++. Newer versions of torch accept one in Python; tensors need only two of its calls, which
    make CPU tensors. The parts of ``torch.accelerator`` that are C++ are replaced.
    """
    backend = getattr(torch._C, "_acc", None)
    if hasattr(backend, "register_python_privateuseone_hook"):
        _register_backend(backend)
    else:
        _OnCpu().__enter__()
    npu = torch.device("npu")
    replaced: dict[str, Any] = {
        "_get_accelerator": lambda _check=None: npu,
        "_accelerator_getAccelerator": lambda: npu,
        "_accelerator_getDeviceIndex": current_device,
        "_accelerator_setDeviceIndex": set_device,
        "_accelerator_getStream": current_stream,
        "_accelerator_setStream": set_stream,
        "_accelerator_synchronizeDevice": synchronize,
        "_accelerator_exchangeDevice": _exchange,
        "_accelerator_maybeExchangeDevice": _exchange,
        "_accelerator_getDeviceCapability": lambda _device=None: {"supported_dtypes": set()},
        "_accelerator_isAllocatorInitialized": lambda: False,
        "_accelerator_getMemoryInfo": mem_get_info,
    }
    for name, function in replaced.items():
        if hasattr(torch._C, name):
            setattr(torch._C, name, function)


_kept: list[Any] = []
"""Objects that torch holds without owning a reference."""


def _register_backend(backend: Any) -> None:
    class Hooks(backend.PrivateUse1Hooks):  # type: ignore[misc]
        is_available = is_built = lambda self: True
        has_primary_context = lambda self, _device: True  # noqa: E731

    class Guard(backend.DeviceGuard):  # type: ignore[misc]
        type_ = lambda self: torch._C._autograd.DeviceType.PrivateUse1  # noqa: E731

    kernels = torch.library.Library("aten", "IMPL", "PrivateUse1")
    kernels.impl("empty.memory_format", _empty)
    kernels.impl("empty_strided", _empty_strided)
    _kept.extend([Hooks(), Guard(), kernels])
    backend.register_python_privateuseone_hook(_kept[0])
    backend.register_python_privateuseone_device_guard(_kept[1])


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Any:
    layout = {} if memory_format is None else {"memory_format": memory_format}
    return torch.empty(size, dtype=dtype, device="cpu", **layout)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Any:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def _exchange(index: int) -> int:
    """Make a device current; return the one before. A negative number changes nothing."""
    before = _Devices.current
    if index >= 0:
        set_device(index)
    return before


# ---- pinned memory: ordinary, and marked ----

_MAKERS = ("arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones", "ones_like",
           "rand", "rand_like", "randint", "randn", "randn_like", "tensor", "zeros", "zeros_like")  # fmt: skip


def _let_pin() -> None:
    """Accept ``pin_memory`` everywhere, because torch would ask the accelerator for an allocator."""
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: _pinned(self.clone())
    torch.Tensor.is_pinned = lambda self, *_args, **_kwargs: getattr(self, "_is_marked_pinned", False)
    for name in _MAKERS:
        setattr(torch, name, _pinning(getattr(torch, name)))


def _pinned(tensor: Any) -> Any:
    tensor._is_marked_pinned = True
    return tensor


def _pinning(make: Any) -> Any:
    @wraps(make)
    def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        return _pinned(made) if pin_memory else made

    return call


# ---- the module ----


class _OnCpu(TorchFunctionMode):  # type: ignore[misc]
    """A mode in which ``device="npu"`` means the CPU in every call, and moving is copying."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:  # left alone: scripts compare devices and ask for their type
            return func(*args, **(kwargs or {}))
        args = tuple(_on_cpu(value) for value in args)
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    is_npu = isinstance(value, torch.device) and value.type == "npu"
    if is_npu or (isinstance(value, str) and (value == "npu" or value.startswith("npu:"))):
        return torch.device("cpu")
    return value


_NAMES = (
    "Event", "Stream", "current_device", "current_stream", "default_stream", "device", "device_count", "empty_cache",
    "get_amp_supported_dtype", "get_device_capability", "get_device_name", "get_device_properties", "get_rng_state", "init",
    "is_available", "is_initialized", "manual_seed", "mem_get_info", "set_compile_mode", "set_device", "set_rng_state",
    "set_stream", "stream", "synchronize",
)  # fmt: skip
_COUNTS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_RESETS = ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats")


def create_npu_tensors(shape: Sequence[int], dtype: Any, addresses: Sequence[int]) -> list[Any]:
    """Return a tensor at each address, as torchair does. The caller keeps the memory allocated."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = [(ctypes.c_char * nbytes).from_address(address) for address in addresses]
    return [torch.frombuffer(each, dtype=dtype).reshape(tuple(shape)) for each in memory]


def stand_in() -> dict[str, ModuleType]:
    """Return the modules ``torch_npu`` and ``torchair`` by name. From now on torch knows ``npu``."""
    npu = ModuleType("torch.npu", __doc__)
    given = {name: globals()[name] for name in _NAMES}
    given |= dict.fromkeys(_COUNTS, _no_bytes) | dict.fromkeys(_RESETS, _no_statistics)
    given |= {"manual_seed_all": manual_seed, "_is_in_bad_fork": lambda: False}
    for name, value in given.items():
        setattr(npu, name, value)
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", npu)
    _register()
    _let_pin()
    torch.Tensor.npu = lambda self, *_args, **_kwargs: self.clone()
    torch.Tensor.cpu = lambda self, *_args, **_kwargs: self.clone()
    torch.Tensor.is_npu = False
    torch.nn.Module.npu = lambda self, *_args, **_kwargs: self
    module = ModuleType("torch_npu", __doc__)
    module.npu = npu  # type: ignore[attr-defined]
    module.__version__ = "0+softnpu"  # type: ignore[attr-defined]
    module.npu_format_cast = lambda tensor, *_args, **_kwargs: tensor  # type: ignore[attr-defined]
    torchair, datadist = ModuleType("torchair"), ModuleType("torchair.llm_datadist")
    torchair.llm_datadist = datadist  # type: ignore[attr-defined]
    datadist.create_npu_tensors = create_npu_tensors  # type: ignore[attr-defined]
    found = [module, torchair, datadist]
    for each in (npu, *found):
        each.__getattr__ = partial(_lacks, each.__name__)  # type: ignore[method-assign]
    return {each.__name__: each for each in found}


def _lacks(module: str, name: str) -> Any:
    """Raise AttributeError with the reason, so that ``hasattr`` is False and a call explains itself."""
    raise AttributeError(
        f"module {module!r} has no attribute {name!r}: it is a stand-in, for machines without torch_npu"
    )
