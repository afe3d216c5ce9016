"""A communicator that one thread calls off while another one destroys it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from aiodatadist._device import Device
from aiodatadist._native.library import ffi
from aiodatadist._transport import registrations
from aiodatadist._transport.communicator import Communicator, communicator_config
from aiodatadist._transport.contract import DEFAULT_RDMA, Endpoint, Region
from aiodatadist._transport.hccl import HcclChannel, rank_table
from aiodatadist._transport.link_kind import LinkKind
from aiodatadist._values.descriptors import Placement
from aiodatadist.errors import StuckError

SIZE = 4096
END = Endpoint("hccl", "soft", "here", process=1, server_id="a", device_id="0", device_ip="127.0.0.1")


class Destroyed(Communicator):
    """A communicator whose handle another thread takes as soon as it was looked at."""

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


class Stuck(Communicator):
    """A communicator whose destruction does not end, while another thread unregisters memory that was bound to it."""

    meanwhile: Callable[[], object]

    def destroy(self) -> None:
        super().destroy()
        self.meanwhile()
        raise StuckError("HcclCommDestroy has not returned")


async def test_all_memory_is_kept_that_a_stuck_communicator_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region was unregistered meanwhile: the others are kept all the same."""
    monkeypatch.setattr(registrations, "_known", {})
    async with await Device.open(0) as device:
        kept: list[Region] = []
        monkeypatch.setattr(
            device, "mark_stuck", lambda address, nbytes: kept.append(Region(address, nbytes, Placement.DEVICE))
        )
        memory = bytearray(3 * SIZE)
        start = int(ffi.cast("uintptr_t", ffi.from_buffer(memory)))
        regions = [Region(start + i * SIZE, SIZE, Placement.DEVICE) for i in range(3)]
        comm = Stuck(device)
        ends = replace(END, device_id="0"), replace(END, device_id="1")
        with device.current():
            comm.make(rank_table(ends), 0, communicator_config("stuck", 1, DEFAULT_RDMA))
        channel = HcclChannel(device, comm, 1, LinkKind.FREE)
        handles = {region: registrations.register(device, region) for region in regions}
        with device.current():
            for region, handle in handles.items():
                channel.bind(region, handle)
        comm.meanwhile = partial(registrations.deregister, device, regions[0])
        with pytest.raises(StuckError):
            channel.close()
        assert kept == regions
        for region in regions[1:]:
            with pytest.raises(StuckError):
                registrations.deregister(device, region)
            with device.current():
                device.runtime.check_hccl(
                    "HcclDeregisterGlobalMem", device.runtime.hccl.HcclDeregisterGlobalMem(handles[region])
                )
