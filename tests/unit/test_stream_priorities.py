"""Programs that a stream hands to C, their order, and what becomes of what C gives back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aiodatadist._device import Device, Stream, TransferState
from aiodatadist._native.library import ring
from aiodatadist._values.transfer_priority import TransferPriority
from tests.unit.test_stream import LARGE, copy

CRITICAL, NORMAL, BACKGROUND = TransferPriority


class GivingBack:
    """The ring of a stream; the first ends that it tells are those of programs that are given back."""

    def __init__(self, times: int) -> None:
        self._times = times
        self.submitted_ns: list[int] = []
        self.started_ns: list[int] = []

    def of(self, stream: Stream) -> None:
        """Take the place of the ring's own calls."""
        stream.calls = replace(stream.calls, reap=self.reap)

    def reap(self, handle: Any, completion: Any, room: int) -> int:
        got = int(ring.ring_reap(handle, completion, room))
        if got:
            self.submitted_ns.append(completion.submitted_ns)
            self.started_ns.append(completion.started_ns)
        if got and self._times:
            self._times -= 1
            completion.state = ring.RING_GIVEN_BACK
        return got


async def test_what_is_given_back_is_carried_out_again() -> None:
    source, target = bytearray(b"x" * LARGE), bytearray(LARGE)
    async with await Device.open(0) as device:
        stream = device.open_stream("given back")
        library = GivingBack(2)
        library.of(stream)
        transfer = stream.submit(copy(target, source, LARGE), 10)
        await transfer.wait()
        assert target == source
        assert transfer.nbytes == LARGE
        waited = (library.started_ns[2] - library.submitted_ns[0]) / 1e9
        assert transfer.queue_seconds == pytest.approx(waited), "the first two times it ran count as waiting"
        assert stream.is_idle
        await stream.aclose()


async def test_what_is_given_back_while_its_stream_is_closed_is_cancelled() -> None:
    source, target = bytearray(LARGE), bytearray(LARGE)
    async with await Device.open(0) as device:
        stream = device.open_stream("closed")
        GivingBack(1).of(stream)
        transfer = stream.submit(copy(target, source, LARGE), 10)
        await stream.aclose()
        assert transfer.state is TransferState.CANCELLED


async def test_a_serial_stream_hands_over_what_is_more_urgent_than_all_before_it() -> None:
    source, targets = bytearray(b"x" * LARGE), [bytearray(LARGE) for _ in range(5)]
    async with await Device.open(0) as device:
        stream = device.open_stream("serial", is_serial=True)
        order = (BACKGROUND, BACKGROUND, NORMAL, NORMAL, CRITICAL)
        transfers = [
            stream.submit(copy(target, source, LARGE), 10, priority=priority)
            for target, priority in zip(targets, order, strict=True)
        ]
        assert [transfer.is_waiting for transfer in transfers] == [False, True, False, True, False]
        for transfer in transfers:
            await transfer.wait()
        assert all(target == source for target in targets)
        await stream.aclose()


async def test_the_line_of_a_stream_that_is_held_is_by_priority() -> None:
    source, targets = bytearray(b"x" * LARGE), [bytearray(LARGE) for _ in range(6)]
    order = (BACKGROUND, NORMAL, CRITICAL) * 2
    told: list[int] = []
    async with await Device.open(0) as device:
        stream = device.open_stream("held")
        stream.hold()
        transfers = [
            stream.submit(copy(target, source, LARGE), 10, priority=priority)
            for target, priority in zip(targets, order, strict=True)
        ]
        for number, transfer in enumerate(transfers):
            transfer.add_done_callback(lambda _, number=number: told.append(number))  # type: ignore[misc]
        stream.go_on()
        for transfer in transfers:
            await transfer.wait()
        assert told[:2] == [2, 5]
        assert told[2:] == [1, 4, 0, 3]
        await stream.aclose()


async def test_what_is_late_is_told_by_its_deadline_and_not_all_at_once_by_its_stream() -> None:
    """Thousands may be: its deadlines tell as many at a time as the event loop has time for."""
    source, target = bytearray(b"x" * LARGE), bytearray(LARGE)
    async with await Device.open(0) as device:
        stream = device.open_stream("late")
        stream.hold()
        late = [stream.submit(copy(target, source, LARGE), 10) for _ in range(3)]
        for transfer in late:
            transfer.late_after = 0.5
        stream.go_on()
        assert not any(transfer.is_done for transfer in late)
        assert stream.is_idle
        for transfer in late:
            transfer.expire()
            assert transfer.state is TransferState.FAILED
            assert "0.5 s from the call" in str(transfer.error)
        assert target == bytearray(LARGE)
        await stream.aclose()
