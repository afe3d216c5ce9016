"""Threads whose start ends in bounded time, also where there is no memory for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

BEGIN_TIMEOUT = 5.0
"""Seconds that a new thread has for its first step, which takes less than a millisecond on a machine that is not busy."""


class _NotBegunError(RuntimeError):
    pass


class _Begun(threading.Event):
    """What ``Thread.start`` waits for."""

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(BEGIN_TIMEOUT if timeout is None else timeout):
            raise _NotBegunError(
                f"a new thread did not begin within {BEGIN_TIMEOUT:g} s: out of memory, or of addresses"
            )
        return True


class DaemonThread(threading.Thread):
    """A daemon thread. Where the system starts a thread that finds no memory for its first step, ``Thread.start`` would wait
    for ever for it."""

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._started = _Begun()
        self._is_decided = threading.Lock()

    def start(self) -> None:
        """Raises RuntimeError: no thread can be started, or it did not begin; the target is not called, not even later."""
        try:
            super().start()
        except _NotBegunError:
            if self._is_decided.acquire(blocking=False):  # else it has begun just now
                getattr(threading, "_limbo", {}).pop(self, None)
                raise

    def run(self) -> None:
        if self._is_decided.acquire(blocking=False):
            super().run()
