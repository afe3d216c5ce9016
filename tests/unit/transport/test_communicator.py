"""A communicator that one thread calls off while another one destroys it."""

from __future__ import annotations

from typing import Any

from aiodatadist._native.library import ffi
from aiodatadist.device import Device
from aiodatadist.transport.communicator import Communicator


class Destroyed(Communicator):
    """Whose handle another thread takes as soon as it was looked at."""

    handles: list[Any]

    @property
    def handle(self) -> Any:
        return self.handles.pop() if self.handles else None

    @handle.setter
    def handle(self, _: Any) -> None:
        self.handles = [ffi.cast("void *", 1)]


async def test_one_that_is_destroyed_meanwhile_can_be_called_off() -> None:
    async with await Device.open(0) as device:
        Destroyed(device).call_off()
