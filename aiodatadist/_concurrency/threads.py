"""Threads whose start ends in bounded time, even if there is no memory for them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import Any

BEGIN_TIMEOUT = 5.0
"""Seconds that a new thread has for its first step, which takes less than a millisecond unless the machine is busy."""

LAST_LOOK = 0.2
"""Further seconds until the thread is given up."""


class _NotBegunError(RuntimeError):
    def __init__(self) -> None:
        super().__init__(f"a new thread did not begin within {BEGIN_TIMEOUT:g} s: out of memory, or of addresses")


_limbo: dict[threading.Thread, threading.Thread] = getattr(threading, "_limbo", {})
"""Threads that were started and have not begun. Each removes itself, and fails if it is not there."""


class _Begun(threading.Event):
    """The event for which ``Thread.start`` waits."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__()
        self.is_awaited = True
        self._thread = weakref.ref(thread)
        self._one_at_a_time = threading.Lock()

    def set(self) -> None:
        """Note that the thread has begun. The thread calls this, and then removes itself from those that have not begun."""
        with self._one_at_a_time:
            if (thread := self._thread()) is not None:
                # The thread may have been given up. It removes itself from this table next, and would fail if it were not
                # there.
                _limbo.setdefault(thread, thread)
            super().set()

    def give_up(self) -> None:
        """Forget the thread, because it may never begin."""
        with self._one_at_a_time:
            if not self.is_set() and (thread := self._thread()) is not None:
                _limbo.pop(thread, None)

    def wait(self, timeout: float | None = None) -> bool:
        if self.is_awaited and not super().wait(BEGIN_TIMEOUT if timeout is None else timeout):
            raise _NotBegunError
        return True


class DaemonThread(threading.Thread):
    """A daemon thread whose start does not hang.

    If the system starts a thread that finds no memory for its first step, ``Thread.start`` would wait for it for ever.
    """

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._started = self._begun = _Begun(self)
        self._is_decided = threading.Lock()

    def start(self) -> None:
        """Start the thread.

        Raises RuntimeError if no thread can be started, or if it did not begin; the target is then never called.
        """
        try:
            super().start()
        except _NotBegunError:
            if self.give_up():
                raise

    def start_soon(
        self, loop: asyncio.AbstractEventLoop, not_begun: Callable[[RuntimeError], object]
    ) -> asyncio.TimerHandle:
        """Start the thread without waiting for its first step, which would take the event loop's time if many are started.

        Args:
            not_begun: called on the loop, after ``BEGIN_TIMEOUT``, if the thread did not begin; it then never calls the
                target.

        Returns:
            The timer after which ``not_begun`` is called.

        Raises RuntimeError if no thread can be started.
        """
        self._begun.is_awaited = False
        self.start()
        return loop.call_later(BEGIN_TIMEOUT, self._look, loop, not_begun)

    def _look(self, loop: asyncio.AbstractEventLoop, not_begun: Callable[[RuntimeError], object]) -> None:
        """Look once more before giving up: a process that was stopped for that long has not run its threads either."""

        def look_again() -> None:
            if self.give_up():
                not_begun(_NotBegunError())

        loop.call_later(LAST_LOOK, look_again)

    def give_up(self) -> bool:
        """Keep the thread from calling its target; return False if it has begun, perhaps only just."""
        if not self._is_decided.acquire(blocking=False):
            return False
        self._begun.give_up()
        return True

    def run(self) -> None:
        # The first to take this lock decides if the thread calls its target, or was given up before.
        if self._is_decided.acquire(blocking=False):
            super().run()
