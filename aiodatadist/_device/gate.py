"""Gates between streams: one for each layer. A stream can wait for a gate before it is known when the gate opens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from aiodatadist._device.program import Program
from aiodatadist._device.stream import Stream, StreamTransfer
from aiodatadist._native.library import Handle, ffi
from aiodatadist._native.runtime import OUTSIDE_CAPTURE
from aiodatadist.errors import ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._device.device import Device

OPENING_TIMEOUT = 86400.0
"""Seconds for opening a gate: it waits for the compute in front of it."""


class Gate:
    """A notify for each layer. Each is recorded at most once, and waited for once.

    Args:
        layers: the layers that have gates.
        forget: called when nothing waits any longer.
    """

    def __init__(self, device: Device, layers: range, forget: Callable[[Gate], object] = lambda _: None) -> None:
        self._device = device
        self._layers = layers
        self._forget = forget
        self._shut = set(layers)
        self._records: dict[int, StreamTransfer] = {}
        self.notifies: list[Handle] = device.take_notifies(len(layers))

    @property
    def is_shut(self) -> bool:
        """True if some gate has not been opened yet."""
        return bool(self._shut)

    def is_shut_at(self, layer: int) -> bool:
        return layer in self._shut

    def notify(self, layer: int) -> Handle:
        return self.notifies[layer - self._layers.start]

    def opened(self, layer: int, record: StreamTransfer | None) -> None:
        """Note that a layer's notify is being recorded, or has been; ``record`` is None on the caller's stream."""
        self._shut.discard(layer)
        if record is not None:
            self._records[layer] = record

    def close(self, passed: int, is_stuck: bool = False) -> None:
        """Release the notifies, because nothing waits any longer.

        The first ``passed`` gates have been waited for, and are used again. The others are destroyed once nothing is
        queued that records them; if that cannot be known, with the device.
        """
        # emptied first, so that a second call releases nothing twice
        notifies, self.notifies = self.notifies, []
        self._device.give_notifies(notifies[:passed])
        for layer, notify in list(zip(self._layers, notifies, strict=False))[passed:]:
            record = self._records.get(layer)
            if is_stuck or (record is None and layer not in self._shut):
                self._device.keep_notify(notify)
            elif record is None:
                self._device.destroy_notify(notify)
            else:
                record.add_done_callback(partial(self._destroy, notify))
        if notifies:
            self._forget(self)
        self._shut.clear()
        self._records.clear()

    def _destroy(self, notify: Handle, _: StreamTransfer) -> None:
        self._device.destroy_notify(notify)


def refuse_captured(device: Device, stream: int) -> None:
    """Check that a record on the caller's stream would be made now, not when a graph is replayed.

    Raises:
        ParamInvalid: if the stream is being captured: the record would become part of the graph.
    """
    with device.current():
        is_captured = device.runtime.is_captured(ffi.cast("void *", stream))
    if is_captured:
        raise ParamInvalid(
            f"the stream {stream:#x} is being captured into a graph: a record on it is made when the graph is replayed, or "
            "never",
            hint=OUTSIDE_CAPTURE,
        )


def open_gates(device: Device, gates: Sequence[Gate], layer: int, stream: Stream | int) -> None:
    """Open the gates of a layer that are shut, once everything submitted to the stream so far is done."""
    shut = [gate for gate in gates if gate.is_shut_at(layer)]
    if shut and isinstance(stream, Stream):
        program = Program()
        for gate in shut:
            program.open(gate.notify(layer))
        record = stream.submit(program, OPENING_TIMEOUT)
        for gate in shut:
            gate.opened(layer, record)
    elif shut and not isinstance(stream, Stream):
        runtime, handle = device.runtime, ffi.cast("void *", stream)
        refuse_captured(device, stream)
        with device.current():
            for gate in shut:
                runtime.check("aclrtRecordNotify", runtime.acl.aclrtRecordNotify(gate.notify(layer), handle))
                gate.opened(layer, None)
