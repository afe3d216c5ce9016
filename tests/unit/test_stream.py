"""The ends of transfers are told in the order in which they were submitted, and small ones end in the submitting call."""

from __future__ import annotations

import ctypes
from array import array

from aiodatadist._concurrency.completion import TransferState
from aiodatadist._device import CopyKind, Device, Program, StreamLimits, StreamTransfer
from aiodatadist._values.grid import Grid

LARGE, SMALL = 16 << 20, 64
"""Bytes: for the worker, and for the submitting call."""


def copy(to: bytearray, source: bytearray, nbytes: int, numbers: array[int] | None = None) -> Program:
    ends = [array("Q", [ctypes.addressof(ctypes.c_char.from_buffer(memory))]) for memory in (to, source)]
    numbers = array("Q", [0]) if numbers is None else numbers
    program = Program()
    program.copy(CopyKind.HOST_TO_HOST, Grid(ends[0], ends[1], numbers, numbers, nbytes, nbytes, nbytes, nbytes))
    return program


async def test_what_a_callback_submits_ends_after_what_was_submitted_before() -> None:
    source = bytearray(b"x" * LARGE)
    targets = [bytearray(LARGE) for _ in range(3)]
    told: list[int] = []
    async with await Device.open(0) as device:
        stream = device.open_stream("order")
        small: list[StreamTransfer] = []

        def first_ended(_: StreamTransfer) -> None:
            told.append(1)
            small.append(stream.submit(copy(targets[2], source, SMALL), 10))
            small[0].add_done_callback(lambda _: told.append(3))

        first = stream.submit(copy(targets[0], source, LARGE), 10)
        second = stream.submit(copy(targets[1], source, LARGE), 10)
        first.add_done_callback(first_ended)
        second.add_done_callback(lambda _: told.append(2))
        while not targets[1][-1]:  # keeps the loop: it hears of both at the same time
            pass
        await second.wait()
        await small[0].wait()
        assert told == [1, 2, 3]
        await stream.aclose()


def scattered(device: Device, ranges: int, nbytes: int) -> tuple[Program, memoryview]:
    """Return a copy of every other block of one allocation to another one, and the bytes of the latter."""
    source, target = (device.allocate(2 * ranges * nbytes) for _ in range(2))
    source.view()[:] = b"x" * source.nbytes
    target.view()[:] = bytes(target.nbytes)
    numbers = array("Q", range(0, 2 * ranges, 2))
    program = Program()
    ends = [array("Q", [memory.address]) for memory in (target, source)]
    program.copy(CopyKind.DEVICE_TO_DEVICE, Grid(ends[0], ends[1], numbers, numbers, nbytes, nbytes, nbytes, nbytes))
    return program, target.view()


async def test_many_ranges_end_in_the_submitting_call() -> None:
    async with await Device.open(0, StreamLimits(inline_seconds=60)) as device:
        stream = device.open_stream("many")
        program, target = scattered(device, 2000, 16)
        transfer = stream.submit(program, 10)
        assert (transfer.state, transfer.nbytes, transfer.ranges) == (TransferState.DONE, 32000, 2000)
        assert target == (b"x" * 16 + bytes(16)) * 2000
        del target
        await stream.aclose()


async def test_a_call_looks_at_the_clock_before_a_window_is_full() -> None:
    """384 ranges of the host's memory are less than a window. They are copied by the thread that issues them."""
    async with await Device.open(0, StreamLimits(inline_seconds=1e-6)) as device:
        stream = device.open_stream("rest")
        ranges, nbytes = 384, 640
        source, target = bytearray(b"x" * (2 * ranges * nbytes)), bytearray(2 * ranges * nbytes)
        transfer = stream.submit(copy(target, source, nbytes, array("Q", range(0, 2 * ranges, 2))), 10)
        assert not transfer.is_done
        await transfer.wait()
        assert (transfer.state, transfer.nbytes, transfer.ranges) == (TransferState.DONE, ranges * nbytes, ranges)
        assert target == (b"x" * nbytes + bytes(nbytes)) * ranges
        await stream.aclose()


async def test_a_call_that_takes_longer_than_expected_leaves_the_rest_to_the_worker() -> None:
    async with await Device.open(0, StreamLimits(inline_seconds=1e-6)) as device:
        stream = device.open_stream("rest")
        program, target = scattered(device, 384, 16)
        transfer = stream.submit(program, 10)
        assert not transfer.is_done
        await transfer.wait()
        assert (transfer.state, transfer.nbytes, transfer.ranges) == (TransferState.DONE, 6144, 384)
        assert target == (b"x" * 16 + bytes(16)) * 384
        del target
        await stream.aclose()
