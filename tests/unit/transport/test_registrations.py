"""Limits of the memory that may be registered with HCCL on one device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aiodatadist._device import Device
from aiodatadist._native.library import ffi
from aiodatadist._transport import registrations
from aiodatadist._transport.contract import Region
from aiodatadist._values.descriptors import Placement
from aiodatadist.errors import ParamInvalid

SIZE = 4096


@contextmanager
def registered(device: Device, regions: list[Region]) -> Iterator[None]:
    done: list[Region] = []
    try:
        for region in regions:
            registrations.register(device, region)
            done.append(region)
        yield
    finally:
        for region in done:
            registrations.deregister(device, region)


def limit(monkeypatch: pytest.MonkeyPatch, device: Device, device_bytes: int, addresses: int) -> None:
    limits = registrations.Limits(device_bytes, addresses)
    monkeypatch.setitem(registrations.LIMITS, device.runtime.name, limits)


def test_the_limits_of_the_vendor() -> None:
    assert {"ascend": registrations.Limits(50 * 1024**3, 240)} == registrations.LIMITS


@pytest.mark.parametrize(
    ("device_bytes", "addresses", "refused"),
    [
        (10 * SIZE, 10**6, f"{11 * SIZE} registered bytes of device memory on device 0: at most {10 * SIZE} "),
        (1 << 40, 10, "11 registered addresses on device 0: at most 10 "),
    ],
)
async def test_more_than_the_limit_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device_bytes: int,
    addresses: int,
    refused: str,
) -> None:
    async with await Device.open(0) as device:
        limit(monkeypatch, device, device_bytes, addresses)
        memory = bytearray(12 * SIZE)
        start = ffi.cast("uintptr_t", ffi.from_buffer(memory))
        regions = [Region(int(start) + i * SIZE, SIZE, Placement.DEVICE) for i in range(11)]
        with caplog.at_level(logging.WARNING), registered(device, regions[:8]):
            assert "registered" not in caplog.text, "80 % is not too much"
            with registered(device, regions[8:10]):
                assert caplog.text.count("can be registered") == 1
                with pytest.raises(ParamInvalid, match=refused):
                    registrations.register(device, regions[10])
                with registered(device, regions[:1]):
                    pass
            with registered(device, regions[10:]):
                """The room of a range that was unregistered is there again."""
