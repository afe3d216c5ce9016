"""The time for which calls have held the event loop.

Small transfers end inside the call that asks for them, and awaiting something that has ended suspends nothing. After a
millisecond of that, the next await lets the loop go round once.
"""

from __future__ import annotations

import asyncio
import weakref
from time import monotonic_ns
from typing import Final

HELD: Final = 1_000_000
"""Nanoseconds for which calls may hold the loop before the next await suspends: some 20 to 50 small transfers."""


class LoopTime:
    """The time that calls hold one event loop, from the first call of a round of the loop until the loop goes round.

    Attributes:
        limit: the time after which calls have held the loop too long; 0 if none has worked in this round. The clock is
            ``CLOCK_MONOTONIC`` in nanoseconds, that of C's completions.
        is_over: True if they have: the next await must suspend.
    """

    __slots__ = ("__weakref__", "_loop", "is_over", "limit")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # weak, because the table of all loops keeps this object, and must not keep its loop alive
        self._loop = weakref.ref(loop)
        self.limit: int = 0
        self.is_over: bool = False

    def passed(self, began: int, ended: int) -> None:
        """Note that a call worked from ``began`` to ``ended``, beyond the limit.

        It is the first call of a round, or one too many.
        """
        if self.limit:
            self.is_over = True
            return
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            self.limit = began + HELD
            self.is_over = ended > self.limit
            loop.call_soon(self._went_round)

    def look(self) -> bool:
        """Return True if the loop has been held too long by now."""
        now = monotonic_ns()
        if now > self.limit:
            self.passed(now, now)
        return self.is_over

    def _went_round(self) -> None:
        self.limit = 0
        self.is_over = False


_each: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopTime] = weakref.WeakKeyDictionary()


def loop_time(loop: asyncio.AbstractEventLoop) -> LoopTime:
    """Return the LoopTime of this loop."""
    found = _each.get(loop)
    if found is None:
        found = _each[loop] = LoopTime(loop)
    return found


async def give_way(rounds: int = 1) -> None:
    """Suspend for some rounds of the loop if calls have held it too long. For awaitables that may end without a wait.

    Raises CancelledError if the task was cancelled in the meantime. A call whose caller must learn of its effect, such
    as an allocation, gives way before that effect.
    """
    if loop_time(asyncio.get_running_loop()).look():
        for _ in range(rounds):
            await asyncio.sleep(0)
