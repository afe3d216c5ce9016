"""The time limit of each test, kept by one thread for all of them: pytest-timeout starts and joins one for each.

The limit is there for tests that hang, and counts the processor's time, not the clock's: where ten processes want a core, a
test gets a tenth of it, and may take ten times as long.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest


def crowding() -> float:
    """Return how many processes, over the last minute, wanted each core that this one may use; at least 1."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


class Watchdog:
    """A thread that makes a call once a time has come, unless the time is put off before.

    Each process starts the thread when it first needs it. The thread sleeps until the earliest time that was set, and looks
    whether that time still counts. So it sleeps on when a later time is set, as most tests do.

    Args:
        crowding: returns by how much the machine makes everything take longer. Asked only when a time has come.
    """

    def __init__(self, crowding: Callable[[], float] = crowding) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._call: Callable[[], object] | None = None
        self._crowding = crowding
        self._set = self._seconds = self._due = self._wakes = 0.0
        self._process = 0

    def set(self, seconds: float, call: Callable[[], object]) -> None:
        """Call ``call`` after ``seconds`` of a machine that nothing else uses, in place of an earlier one."""
        with self._changed:
            self._call, self._set, self._seconds = call, time.monotonic(), seconds
            self._due = self._set + seconds
            if self._process != os.getpid():  # a forked process has no threads but its first one
                self._process = os.getpid()
                self._wakes = self._due
                threading.Thread(target=self._watch, name="time limits of tests", daemon=True).start()
            elif self._due < self._wakes:
                self._changed.notify()

    def clear(self) -> None:
        """Make no call."""
        self._call = None

    def held(self) -> AbstractContextManager[bool]:
        """Return a context in which no call is made."""
        return self._changed

    def _watch(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                if self._call is not None and self._due <= now:
                    self._due = self._set + self._seconds * self._crowding()
                if self._call is not None and self._due <= now:
                    call, self._call = self._call, None
                    call()
                self._wakes = self._due if self._call is not None else now + IDLE
                self._changed.wait(self._wakes - now)


IDLE = 60.0
"""Seconds that the thread sleeps if no test runs. A test that starts meanwhile wakes it if its limit is shorter."""

_watchdog = Watchdog()


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Do what pytest-timeout does when the time of a test is over: show where each thread is, and end the process."""
    if settings.method != "thread":
        return None
    import pytest_timeout  # type: ignore[import-untyped]  # noqa: PLC0415 - absent where plugins are not loaded

    _watchdog.set(settings.timeout, lambda: pytest_timeout.timeout_timer(item, settings))
    return True


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_cancel_timer() -> None:
    """Let the time of the test that has ended run out."""
    _watchdog.clear()
