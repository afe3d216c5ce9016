"""Lateness of the event loop: a kernel timer ticks every millisecond, and the loop records when it noticed.

``asyncio.sleep`` is too coarse: whenever something else wakes the loop, it rounds the time until its next timer up to
whole milliseconds, so such a ticker is up to 1 ms late even on an idle machine.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiodatadist._cli.kit.numbers import percentile

_libc = ctypes.CDLL(None, use_errno=True)
PERIOD = 1_000_000  # ns
IDLE = 0.3
"""Seconds for which the loop is measured before anything moves."""


@contextmanager
def ticking() -> Iterator[list[float]]:
    """Collect the seconds by which the running loop noticed each tick late."""
    loop = asyncio.get_running_loop()
    fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
    first = time.monotonic_ns() + PERIOD
    times = struct.pack("4l", 0, PERIOD, *divmod(first, 1_000_000_000))  # a struct itimerspec
    if fd < 0 or _libc.timerfd_settime(fd, 1, times, None) < 0:
        raise OSError(ctypes.get_errno(), "cannot create a kernel timer")
    late: list[float] = []
    due = first

    def noticed() -> None:
        nonlocal due
        (ticks,) = struct.unpack("Q", os.read(fd, 8))
        late.extend((time.monotonic_ns() - due - i * PERIOD) / 1e9 for i in range(ticks))
        due += ticks * PERIOD

    loop.add_reader(fd, noticed)
    try:
        yield late
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def idle_late_us() -> float:
    """Return the 99th percentile of the running loop's lateness while nothing moves, in microseconds."""
    with ticking() as late:
        await asyncio.sleep(IDLE)
    return 1e6 * percentile(late, 99) if late else 0.0
