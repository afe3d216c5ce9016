"""An event loop whose clock stands still while anything works, and jumps to the next timer when nothing does.

The library has one clock: its event loop's. ``anyio.current_time``, scopes, sleeps and ``call_later`` all ask that, so a test
that runs on this loop waits for no deadline, delay or lease, whatever its length, and meets each of them exactly.

Nothing works if no descriptor is ready, each other thread of the process has slept for ``WINDOW`` seconds without using the
processor, and no bytes are on their way. That covers softnpu's streams, calls in threads and native code alike, also on a
machine that is busy: a thread that has not been given its turn is runnable, not asleep, and what was sent is in flight until
the kernel has delivered it. A task that stands at a hold sleeps, so deadlines strike it.

A machine that is late itself is trusted less: a processor that its host has stopped wakes no sleeper and delivers nothing
meanwhile. So a jump that is far, or follows a late wake-up of this thread, needs a longer sleep of all else. The last jumps
are in the report of a test that failed.

What this clock is not: that of other processes, and of C (heartbeats, gates, ``delay=`` of softnpu). Tests of those keep to
real time.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import selectors
import socket
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import pytest

WINDOW = 0.002
"""Seconds for which all else must sleep."""
FAR_WINDOW = 0.01
"""The same for a jump that is ``FAR``, because most limits are: a jump too early would fail the test."""
FAR = 0.1
"""Seconds of a jump that is far."""
FLIGHT = 0.25
"""The same while bytes have been sent and not taken, which a peer that does not read can make last for ever."""
PATIENCE = 5.0
"""Seconds after which the clock goes on although something works: a thread may never stop."""
_INTERNET = {socket.AF_INET, socket.AF_INET6}
_CONNECTING = {2, 3}
"""States of a TCP socket (SYN_SENT, SYN_RECV) whose handshake is on its way; the kernel counts no bytes for it."""
JUMPS: deque[str] = deque(maxlen=8)
"""The last far jumps of the last loop, for the report of a test that failed."""


class AutojumpLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop with this clock.

    Attributes:
        jumped: seconds by which the clock has jumped so far.
        stopped: seconds by which the clock jumps as soon as something is ready.
    """

    def __init__(self) -> None:
        self.jumped = self.stopped = 0.0
        JUMPS.clear()
        self._started_at = time.monotonic()
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._started_at + self.jumped


class _Selector(selectors.EpollSelector):
    def __init__(self, loop: AutojumpLoop) -> None:
        super().__init__()
        self._loop = loop
        self._seen: tuple[Mapping[str, tuple[str, str]], int] = ({}, 0)
        self._since = 0.0
        self._late = 0.0  # seconds by which the machine woke this thread too late, which fade

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        began, window, far = time.monotonic(), 0.0, FAR_WINDOW if timeout > FAR else WINDOW
        while True:
            asked = time.monotonic()
            if ready := super().select(window):
                self._loop.jumped, self._loop.stopped = self._loop.jumped + self._loop.stopped, 0.0
                return ready
            self._late = max(time.monotonic() - asked - window, self._late * 0.9)
            now, flying = time.monotonic(), self._look()
            slept = now - (max(began, self._since) if flying else self._since)
            if slept >= (FLIGHT if flying else far + 2 * self._late) or now - began > PATIENCE:
                break
            # What has worked for long is looked at less often, and twice, because it may sleep between two works.
            window = WINDOW if window > WINDOW else max(WINDOW, (now - began) / 4)
        if timeout > FAR:
            words = f"{timeout:g} s, when all else had slept for {slept:.4f} s, after {now - began:.4f} s here"
            JUMPS.append(f"{words}; on their way: {flying}; others: {self._seen[0]}")
        self._loop.jumped += timeout
        return []

    def _look(self) -> int:
        """Note since when all else has slept, also before this wait; return how many bytes are on their way."""
        now, seen = time.monotonic(), (_others(), _in_flight())
        if seen != self._seen or any(state != "S" for state, _ in seen[0].values()):
            self._seen, self._since = seen, now
        return seen[1]


def _others() -> Mapping[str, tuple[str, str]]:
    """Return the state of each other thread, and how long it has run."""
    own, found = str(threading.get_native_id()), {}
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - ten times as fast, and thousands of jumps ask
        if task != own:
            try:
                state = _read(f"/proc/self/task/{task}/stat").rpartition(b")")[2].split(None, 1)[0]
                found[task] = state.decode(), _read(f"/proc/self/task/{task}/schedstat").split(None, 1)[0].decode()
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                found[task] = "", ""
    return found


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def _in_flight() -> int:
    """Return how many bytes and connections no kernel has acknowledged yet: a busy machine delivers late to itself, too."""
    found = 0
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):
            sock = socket.SocketType(fileno=int(entry))
            try:
                if sock.family in _INTERNET:
                    if sock.type == socket.SOCK_STREAM:
                        found += sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _CONNECTING
                    found += int.from_bytes(fcntl.ioctl(int(entry), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
            finally:
                sock.detach()
    return found


def jumped() -> float:
    """Return the seconds that the running loop's clock has jumped so far."""
    return _loop().jumped


def stop_for(seconds: float) -> None:
    """Let it look as if the process had been stopped: when the loop next waits, it hears of what came that much later."""
    _loop().stopped = seconds


def _loop() -> AutojumpLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, AutojumpLoop), "this test is not marked `autojump`"
    return loop


@contextmanager
def took(seconds: float) -> Iterator[None]:
    """Assert that the body waits exactly that long, by the loop's clock."""
    before = jumped()
    yield
    assert (waited := jumped() - before) == pytest.approx(seconds, abs=1e-6), f"it waited for {waited:g} s"
