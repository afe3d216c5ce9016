"""The time limit of each test, kept by one thread for all of them: pytest-timeout starts and joins one for each."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest


class Watchdog:
    """A thread that makes a call once a time has come, unless the time is put off before.

    Each process starts the thread when it first needs it. The thread sleeps until the earliest time that was set, and looks
    whether that time still counts. So it sleeps on when a later time is set, as most tests do.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._call: Callable[[], object] | None = None
        self._due = self._wakes = 0.0
        self._process = 0

    def set(self, seconds: float, call: Callable[[], object]) -> None:
        """Call ``call`` after ``seconds``, in place of an earlier one."""
        with self._changed:
            self._call, self._due = call, time.monotonic() + seconds
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
