"""Gates between streams: one for each layer, which may be waited for before anybody said when it opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiodatadist._native.library import Handle, ffi
from aiodatadist.device.program import Program
from aiodatadist.device.stream import Stream

if TYPE_CHECKING:
    from aiodatadist.device.device import Device

OPENING = 86400.0
"""Seconds for opening a gate: it waits for the compute in front of it."""


class Gate:
    """As many notifies as there are layers. Each is waited for once."""

    def __init__(self, device: Device, layers: int) -> None:
        self._device = device
        self._notifies: list[Handle] = []
        runtime, made = device.runtime, ffi.new("aclrtNotify *")
        try:
            with device.current():
                for _ in range(layers):
                    runtime.check("aclrtCreateNotify", runtime.acl.aclrtCreateNotify(made, 0))
                    self._notifies.append(made[0])
        except BaseException:
            self.close(len(self._notifies))
            raise

    def notify(self, layer: int) -> Handle:
        """What a program waits for."""
        return self._notifies[layer]

    def open(self, layer: int, stream: Stream | int) -> None:
        """When everything submitted to the stream so far is done."""
        if not self._notifies:
            return
        notify = self._notifies[layer]
        if isinstance(stream, Stream):
            stream.submit(Program().open(notify), OPENING)
            return
        runtime = self._device.runtime
        with self._device.current():
            runtime.check("aclrtRecordNotify", runtime.acl.aclrtRecordNotify(notify, ffi.cast("void *", stream)))

    def close(self, passed: int = 0) -> None:
        """Nobody waits any more. The first ``passed`` gates have been; the others may be opened yet, by work that is queued
        behind compute: those stay until the device is closed."""
        notifies, self._notifies = self._notifies, []
        self._device.keep_notifies(notifies[passed:])
        with self._device.current():
            for notify in notifies[:passed]:
                self._device.runtime.acl.aclrtDestroyNotify(notify)
