"""Threads whose start ends in bounded time, also where there is no memory for them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import Any

BEGIN_TIMEOUT = 5.0
"""Seconds that a new thread has for its first step, which takes less than a millisecond on a machine that is not busy."""

LAST_LOOK = 0.2
"""Seconds after that until it is given up."""


class _NotBegunError(RuntimeError):
    def __init__(self) -> None:
        super().__init__(f"a new thread did not begin within {BEGIN_TIMEOUT:g} s: out of memory, or of addresses")


_limbo: dict[threading.Thread, threading.Thread] = getattr(threading, "_limbo", {})
"""Threads that were started and have not begun: each takes itself out, and fails if it is not there."""


class _Begun(threading.Event):
    """What ``Thread.start`` waits for."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__()
        self.is_awaited = True
        self._thread = weakref.ref(thread)
        self._one_at_a_time = threading.Lock()

    def set(self) -> None:
        """The thread says so, and then takes itself out of those that have not begun."""
        with self._one_at_a_time:
            if (thread := self._thread()) is not None:
                _limbo.setdefault(thread, thread)
            super().set()

    def give_up(self) -> None:
        """It may never begin, and is forgotten."""
        with self._one_at_a_time:
            if not self.is_set() and (thread := self._thread()) is not None:
                _limbo.pop(thread, None)

    def wait(self, timeout: float | None = None) -> bool:
        if self.is_awaited and not super().wait(BEGIN_TIMEOUT if timeout is None else timeout):
            raise _NotBegunError
        return True


class DaemonThread(threading.Thread):
    """A daemon thread. Where the system starts a thread that finds no memory for its first step, ``Thread.start`` would wait
    for ever for it."""

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._started = self._begun = _Begun(self)
        self._is_decided = threading.Lock()

    def start(self) -> None:
        """Raises RuntimeError: no thread can be started, or it did not begin; the target is not called, not even later."""
        try:
            super().start()
        except _NotBegunError:
            if self.give_up():
                raise

    def start_soon(
        self, loop: asyncio.AbstractEventLoop, not_begun: Callable[[RuntimeError], object]
    ) -> asyncio.TimerHandle:
        """As :meth:`start`, without waiting for its first step, which takes the event loop's time where many are started.

        Args:
            not_begun: told on the loop, after ``BEGIN_TIMEOUT``, that it did not begin and never calls the target. The timer
                is returned.

        Raises RuntimeError: no thread can be started."""
        self._begun.is_awaited = False
        self.start()
        return loop.call_later(BEGIN_TIMEOUT, self._look, loop, not_begun)

    def _look(self, loop: asyncio.AbstractEventLoop, not_begun: Callable[[RuntimeError], object]) -> None:
        """A process that was stopped for that long has not run its threads either: look once more."""

        def look_again() -> None:
            if self.give_up():
                not_begun(_NotBegunError())

        loop.call_later(LAST_LOOK, look_again)

    def give_up(self) -> bool:
        """If it has not begun it never calls the target; False: it has, perhaps just now."""
        if not self._is_decided.acquire(blocking=False):
            return False
        self._begun.give_up()
        return True

    def run(self) -> None:
        if self._is_decided.acquire(blocking=False):
            super().run()
