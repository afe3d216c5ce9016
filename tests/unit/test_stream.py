"""The ends of transfers are told in the order in which they were submitted."""

from __future__ import annotations

import ctypes
from array import array

from aiodatadist._device import CopyKind, Device, Program, StreamTransfer
from aiodatadist._values.grid import Grid

LARGE, SMALL = 8 << 20, 64
"""Bytes: for the worker, and for the submitting call."""


def copy(to: bytearray, source: bytearray, nbytes: int) -> Program:
    ends = [array("Q", [ctypes.addressof(ctypes.c_char.from_buffer(memory))]) for memory in (to, source)]
    zero = array("Q", [0])
    program = Program()
    program.copy(CopyKind.HOST_TO_HOST, Grid(ends[0], ends[1], zero, zero, nbytes, nbytes, nbytes, nbytes))
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
