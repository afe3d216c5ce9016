"""Gates between streams: one for each layer, which may be waited for before anybody said when it opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiodatadist._native.library import Handle, ffi
from aiodatadist.device.program import Program
from aiodatadist.device.stream import Stream

if TYPE_CHECKING:
    from aiodatadist.device.device import Device

OPENING = 86400.0
"""Seconds for opening a gate: it waits for the compute in front of it."""


class Gate:
    """As many notifies as there are layers. Each is recorded at most once, and waited for once."""

    def __init__(self, device: Device, layers: range) -> None:
        self._device = device
        self._layers = layers
        self._shut = set(layers)
        self.notifies: list[Handle] = device.take_notifies(len(layers))

    def shut(self, layer: int) -> Handle | None:
        """What opens the gate of a layer, for once; None: there is no such gate, or it is open."""
        if layer not in self._shut:
            return None
        self._shut.discard(layer)
        return self.notifies[layer - self._layers.start]

    def close(self, passed: int) -> None:
        """Nobody waits any more. The first ``passed`` gates have been waited for."""
        notifies, self.notifies = self.notifies, []
        self._shut.clear()
        self._device.give_notifies(notifies[:passed], notifies[passed:])


def open_gates(device: Device, notifies: Sequence[Handle], stream: Stream | int) -> None:
    """Record them when everything submitted to the stream so far is done."""
    if isinstance(stream, Stream):
        program = Program()
        for notify in notifies:
            program.open(notify)
        stream.submit(program, OPENING)
        return
    runtime, handle = device.runtime, ffi.cast("void *", stream)
    with device.current():
        for notify in notifies:
            runtime.check("aclrtRecordNotify", runtime.acl.aclrtRecordNotify(notify, handle))
