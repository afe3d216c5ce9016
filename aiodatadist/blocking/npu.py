"""``torch_npu`` for machines without one: names and calls of torch's npu, on the CPU.

Memory of a tensor "on the npu" is a CPU tensor's, which softnpu takes for device memory. Moving between the two copies, as it
would. Work is done when a call returns, so that streams and events have nothing to wait for. ``device="npu"`` is understood
in the thread that imported torch, and in no other, because torch keeps such things per thread; ``.npu()`` everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from time import perf_counter
from types import ModuleType
from typing import Any

from aiodatadist.errors import ParamInvalid

torch: Any = import_module("torch")  # optional, and installed if this module is imported
TorchFunctionMode: Any = import_module("torch.overrides").TorchFunctionMode

DEVICES = 8
"""As many as softnpu shows."""


class Event:
    """What was submitted before it has happened when :meth:`record` returns."""

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
        """Milliseconds between the two records."""
        return (end_event._at - self._at) * 1000


class Stream:
    """Work on it is done when the call returns."""

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
    """Which one is current: of no consequence but for being told so."""

    current = 0


def set_device(device: Any) -> None:
    """Raises ParamInvalid: there is no such device."""
    number = torch.device("npu", device).index if isinstance(device, int) else torch.device(device).index or 0
    if not 0 <= number < DEVICES:
        raise ParamInvalid(f"device {device!r}: there are {DEVICES}")
    _Devices.current = number


def current_device() -> int:
    return _Devices.current


def device_count() -> int:
    return DEVICES


def is_available() -> bool:
    return True


def synchronize(device: Any = None) -> None:
    """All work is done already."""


def empty_cache() -> None:
    """Nothing is kept."""


def current_stream(device: Any = None) -> Stream:
    return Stream(device)


def default_stream(device: Any = None) -> Stream:
    return Stream(device)


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Nothing changes within."""
    yield


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


class _OnCpu(TorchFunctionMode):  # type: ignore[misc]
    """``device="npu"`` means the CPU, whatever function is called with it; and moving is copying."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:  # it may be asked about, and compared
            return func(*args, **(kwargs or {}))
        args = tuple(_on_cpu(value) for value in args)
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    is_npu = isinstance(value, torch.device) and value.type == "npu"
    if is_npu or (isinstance(value, str) and (value == "npu" or value.startswith("npu:"))):
        return torch.device("cpu")
    return value


_NAMES = ("Event", "Stream", "current_device", "current_stream", "default_stream", "device_count", "empty_cache",
          "is_available", "manual_seed", "set_device", "stream", "synchronize")  # fmt: skip


def stand_in() -> ModuleType:
    """The module ``torch_npu``; torch knows ``npu`` from now on."""
    npu = ModuleType("torch.npu", __doc__)
    for name in _NAMES:
        setattr(npu, name, globals()[name])
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", npu)
    torch.Tensor.npu = lambda self, *_args, **_kwargs: self.clone()
    torch.Tensor.cpu = lambda self, *_args, **_kwargs: self.clone()
    _OnCpu().__enter__()
    module = ModuleType("torch_npu", __doc__)
    module.npu = npu  # type: ignore[attr-defined]
    module.__version__ = "0+softnpu"  # type: ignore[attr-defined]
    return module
