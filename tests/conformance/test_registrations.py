"""HCCL does not count registrations: the clusters of a process that have the same memory do."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiodatadist import ParamInvalid
from aiodatadist._device import Device, Program
from aiodatadist._native.library import ffi
from aiodatadist._testing.contracts import SIZE, End, grid, offers
from aiodatadist._transport import Region, open_transport
from aiodatadist._values.descriptors import Placement

names = (f"registrations-{os.getpid()}-{number}" for number in itertools.count())


class Uncounted:
    """HCCL as it is: a second registration of a range gives the first one's handle, and one deregistration ends both."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        self.handles: dict[tuple[int, int], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)

    def HcclRegisterGlobalMem(self, memory: Any, handle: Any) -> int:  # noqa: N802 - HCCL's name
        place = (int(ffi.cast("uintptr_t", memory.addr)), memory.size)
        if place in self.handles:
            handle[0] = self.handles[place]
            return 0
        code: int = self._functions.HcclRegisterGlobalMem(memory, handle)
        if code == 0:
            self.handles[place] = handle[0]
        return code

    def HcclDeregisterGlobalMem(self, handle: Any) -> int:  # noqa: N802
        for place, known in self.handles.items():
            if known == handle:
                code: int = self._functions.HcclDeregisterGlobalMem(handle)
                if code == 0:
                    del self.handles[place]
                return code
        return 1


@pytest.fixture
async def uncounted(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Uncounted]:
    async with await Device.open(0) as device:
        fake = Uncounted(device.runtime.hccl)
        with monkeypatch.context() as patch:
            patch.setattr(device.runtime, "hccl", fake)
            yield fake
    assert fake.handles == {}


@asynccontextmanager
async def three_ends() -> AsyncIterator[tuple[End, End, End]]:
    """Open two ends of one device that have the same memory, and a peer."""
    async with await Device.open(0) as device, await Device.open(1) as other:
        first, second, peer = (End(each, open_transport("hccl", each)) for each in (device, device, other))
        second.memory, second.region = first.memory, first.region
        first.fill(1)
        peer.fill(2)
        for end in (first, second, peer):
            await end.transport.register([end.region])
        yield first, second, peer
        for end in (first, second, peer):
            await end.transport.aclose()


async def get(end: End, peer: End) -> bytes:
    """Transfer the first bytes of ``peer`` to ``end`` over a new channel and return them."""
    mine, theirs = offers(next(names), (end, peer))
    channels = await asyncio.gather(end.transport.open_channel(mine, 20), peer.transport.open_channel(theirs, 20))
    stream = end.device.open_stream("test")
    try:
        program = Program()
        channels[0].add_get(program, grid(end, peer, [(0, 0)], 64))
        await stream.submit(program, 10).wait()
    finally:
        await stream.aclose()
        for channel in channels:
            await channel.aclose()
    return bytes(end.memory.view()[:64])


@pytest.mark.usefixtures("no_leaks", "uncounted")
async def test_who_closes_first_takes_nothing_from_the_other(caplog: pytest.LogCaptureFixture) -> None:
    async with three_ends() as (first, second, peer):
        await first.transport.aclose()
        assert await get(second, peer) == b"\2" * 64
    assert caplog.messages == []


@pytest.mark.usefixtures("no_leaks")
async def test_the_last_one_ends_it(uncounted: Uncounted) -> None:
    async with three_ends() as (first, second, _):
        place = (first.memory.address, SIZE)
        await first.transport.unregister([first.region])
        assert place in uncounted.handles
        await second.transport.unregister([second.region])
        assert place not in uncounted.handles


@pytest.mark.usefixtures("no_leaks")
async def test_other_ranges_of_the_same_memory_are_refused_with_the_reason() -> None:
    async with three_ends() as (first, second, _):
        part = Region(first.memory.address, SIZE // 2, Placement.DEVICE)
        third = open_transport("hccl", first.device)
        with pytest.raises(
            ParamInvalid, match=r"overlaps .* another cluster of this process .* device 0: .*equal or apart"
        ):
            await third.register([part])
        await first.transport.unregister([first.region])
        await second.transport.unregister([second.region])
        await third.register([part])
        await third.aclose()


@pytest.mark.usefixtures("no_leaks")
async def test_what_other_code_has_registered_is_named_as_the_likely_cause() -> None:
    async with await Device.open(0) as device:
        transport = open_transport("hccl", device)
        end = End(device, transport)
        foreign, handle = ffi.new("CommMem *"), ffi.new("void **")
        foreign.type, foreign.size = 0, SIZE // 2
        foreign.addr = ffi.cast("void *", end.memory.address)
        with device.current():
            assert device.runtime.hccl.HcclRegisterGlobalMem(foreign, handle) == 0
        with pytest.raises(ParamInvalid, match=r"HCCL_E_PARA.*has other code of this process registered"):
            await transport.register([end.region])
        with device.current():
            assert device.runtime.hccl.HcclDeregisterGlobalMem(handle[0]) == 0
        await transport.register([end.region])
        await transport.aclose()
