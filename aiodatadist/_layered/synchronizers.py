"""Synchronizers, which know when a layer's KV is final: the contract, and three implementations."""

from __future__ import annotations

import asyncio
import inspect
import sys
from abc import ABC, abstractmethod
from asyncio import _get_running_loop  # get_running_loop() raises where there is none, which is fine here
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import anyio

from aiodatadist._counting.callbacks import shown
from aiodatadist._device import OUTSIDE_CAPTURE, Device, Gate, Stream, open_gates, refuse_captured
from aiodatadist._values import checks
from aiodatadist._values.durations import check_seconds
from aiodatadist.errors import ParamInvalid


class LayerSynchronizer(ABC):
    """The interface by which a layered transfer learns when a layer may be sent.

    Any object with this method will do. The method may be a plain function, which is then called in a thread, because
    it may block.
    """

    @abstractmethod
    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Wait until the layer is final, and return True; return False or None to give the layer up.

        numpy's booleans count as Python's. Any other answer fails the transfer.

        It is called with source layers in ascending order, those that some destination wants, one at a time.
        ``timeout_in_millis`` is always None, because only the computing code knows how long that may take.
        """


def check_synchronizer(value: Any) -> None:
    """Raise TypeError if the object cannot report when a layer is final."""
    method = getattr(value, "synchronize_layer", None)
    if not callable(method):
        raise TypeError(f"layer_synchronizer is {shown(value)}: must have synchronize_layer()")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise TypeError(
            f"layer_synchronizer is {shown(value)}: its synchronize_layer() is a generator function: must return True or"
            " False, or be async def and return one of them"
        )


@runtime_checkable
class GatedByEvent(Protocol):
    """A synchronizer whose layers the device can wait for, so that the host need not."""

    def device_event(self, layer_index: int) -> int:
        """Return the handle of an event that was recorded behind the layer before ``synchronize_layer`` returned True.

        It must not be destroyed or recorded again before the transfer has ended.
        """


class LayerMarks:
    """The layers that were marked as ready or failed, in any thread, and who waits for them on an event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._said: dict[int, bool] = {}
        self._listeners: list[Callable[[], None]] = []
        self._events: dict[int, anyio.Event] = {}

    def say(self, layer_index: int, what: bool) -> None:
        """Mark a layer, once: later marks have no effect."""
        # Set before the loop is read: a transfer that listens sets the loop first, and then looks for what was said.
        self._said.setdefault(layer_index, what)
        loop = self._loop
        if loop is None or loop is _get_running_loop():
            self._tell(layer_index)
        else:
            with suppress(RuntimeError):  # the loop is closed: no transfer waits any longer
                loop.call_soon_threadsafe(self._tell, layer_index)

    def _tell(self, layer_index: int) -> None:
        if layer_index in self._events:
            self._events.pop(layer_index).set()
        for listener in list(self._listeners):
            listener()

    def said(self, layer_index: int) -> bool | None:
        """Return True if the layer is final, False if it will not come, None if neither was said so far."""
        return self._said.get(layer_index)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` on this loop whenever a layer is marked. Look for earlier marks after this call."""
        self._loop = asyncio.get_running_loop()
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Stop calling ``listener``, if it was listening."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def wait(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Wait until the layer is marked; return False also if it was not marked in time."""
        self._loop = asyncio.get_running_loop()
        if layer_index not in self._said:
            event = self._events.setdefault(layer_index, anyio.Event())
            with anyio.move_on_after(None if timeout_in_millis is None else timeout_in_millis / 1000):
                await event.wait()
        return self._said.get(layer_index, False)


class AwaitableLayerSynchronizer(LayerSynchronizer):
    """A synchronizer that model code tells which layer is ready, on the event loop or in any thread.

    Args:
        num_layers: layers of the source cache.
    """

    def __init__(self, num_layers: int) -> None:
        self._marks = LayerMarks()
        self.num_layers: int = checks.integer(num_layers, "num_layers", checks.UINT32)

    def ready(self, layer_index: int) -> None:
        """Mark the layer as final. In a thread this returns at once; the event loop is notified in its next round.

        Raises ParamInvalid if there is no such layer.
        """
        self._check(layer_index)
        self._marks.say(layer_index, True)

    def fail(self, layer_index: int) -> None:
        """Mark the layer as one that will not come. For threads and errors see :meth:`ready`."""
        self._check(layer_index)
        self._marks.say(layer_index, False)

    def _check(self, layer_index: int) -> None:
        if not 0 <= layer_index < self.num_layers:
            raise ParamInvalid(f"layer_index is {layer_index}: there are {self.num_layers} layers")

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None = None) -> bool:
        self._check(layer_index)
        return await self._marks.wait(layer_index, timeout_in_millis)


def marks_of(synchronizer: object) -> LayerMarks | None:
    """Return the marks of a synchronizer, which can be read without waiting; None if its answers must be awaited.

    They must be awaited if it is of another kind, and if a subclass replaces ``synchronize_layer``.
    """
    if not isinstance(synchronizer, AwaitableLayerSynchronizer) or "synchronize_layer" in vars(synchronizer):
        return None
    is_ours = type(synchronizer).synchronize_layer is AwaitableLayerSynchronizer.synchronize_layer
    return synchronizer._marks if is_ours else None


def _torch_captures() -> bool:
    """Return True if torch_npu is imported, and captures this thread's current stream."""
    npu = getattr(sys.modules.get("torch"), "npu", None)
    is_capturing = getattr(npu, "is_current_stream_capturing", None)
    return bool(is_capturing is not None and is_capturing())


class TorchNpuLayerSynchronizer(AwaitableLayerSynchronizer):
    """A synchronizer over ``torch.npu.Event`` objects, one per layer: the device waits for them, the host does not.

    Record the event on the compute stream, then mark the layer::

        events[layer].record()
        synchronizer.ready(layer)

    Both must be outside a captured region: a record inside becomes part of the graph. :meth:`ready` raises ParamInvalid
    if torch_npu reports that the current stream is being captured, and a transfer fails if the event's record was.

    Not run on hardware so far.
    """

    def __init__(self, events: Sequence[Any]) -> None:
        super().__init__(len(events))
        self._torch_events = list(events)

    def ready(self, layer_index: int) -> None:
        if _torch_captures():
            raise ParamInvalid(
                "torch.npu's current stream is being captured into a graph: the event is recorded when that is "
                "replayed, or never",
                hint=OUTSIDE_CAPTURE,
            )
        super().ready(layer_index)

    def device_event(self, layer_index: int) -> int:
        """Return the handle of the event of a layer that is ready."""
        return int(self._torch_events[layer_index].npu_event)


class EventLayerSynchronizer(LayerSynchronizer):
    """A gate per layer on the device itself: the whole transfer is one program, without any Python per layer.

    One synchronizer serves one transfer.

    Args:
        device: ``LLMDataDist.device``.
        num_layers: layers of the source cache.
        timeout: seconds for each layer to be computed, from the layer before; by default ten minutes.

    Raises:
        FeatureNotEnabled: if the runtime has no notifies (CANN before 8.5).
    """

    def __init__(self, device: Device, num_layers: int, timeout: float = 600.0) -> None:
        self.num_layers: int = checks.integer(num_layers, "num_layers", checks.UINT32)
        self.seconds: float = check_seconds(timeout, "timeout")
        self._device = device
        self._loop = _get_running_loop()
        self._gates: list[Gate] = []
        self._streams: dict[int, Stream | int] = {}
        device.want_gates()

    def record(self, layer_index: int, stream: Stream | int) -> None:
        """Mark the layer as final once everything submitted to ``stream`` so far is done.

        The stream is one of ``device.open_stream``, or an ``aclrtStream`` as ``torch.npu.current_stream().npu_stream``
        returns it. It must stay open until the transfer has ended, because a destination that waits for its link opens
        its gates there when it begins.

        Raises ParamInvalid if there is no such layer, if the stream is closed or is being captured into a graph, or if
        this thread is not the event loop's.
        """
        if not 0 <= layer_index < self.num_layers:
            raise ParamInvalid(f"layer_index is {layer_index}: there are {self.num_layers} layers")
        if self._loop is not None and _get_running_loop() is not self._loop:
            raise ParamInvalid(
                "an EventLayerSynchronizer belongs to its event loop, and record was called in another thread",
                hint="loop.call_soon_threadsafe(synchronizer.record, layer_index, stream)",
            )
        if not isinstance(stream, Stream):
            refuse_captured(self._device, stream)
        open_gates(self._device, self._gates, layer_index, stream)
        self._streams[layer_index] = stream

    def gate(self, layers: range) -> Gate:
        """Return another set of gates, for a destination. Layers recorded already open once their streams' work is done."""
        self._loop = asyncio.get_running_loop()
        gate = Gate(self._device, layers, self._gates.remove)
        self._gates.append(gate)
        try:
            for layer_index, stream in self._streams.items():
                open_gates(self._device, [gate], layer_index, stream)
        except BaseException:
            gate.close(0)
            raise
        return gate

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None = None) -> bool:
        raise ParamInvalid("the device waits for an EventLayerSynchronizer, so the host must not")
