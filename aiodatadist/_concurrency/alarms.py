"""Alarms: times at which something is due on one event loop, any number of them with one timer.

Who owns what
    The owner sets an alarm, and drops it when it is no longer wanted; from then on the alarm keeps nothing alive. If no
    alarm is set, there is no timer.

What happens when alarms are due
    All alarms that are due are marked first, without interruption. Then ``tell`` is called for each, for ``SLICE``
    seconds at a time, with a round of the event loop in between: a thousand that are due together do not hold up the
    loop. If a callback raises, the event loop reports it, as with any other callback, and the other alarms still go
    off.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Generic, TypeVar

T = TypeVar("T")

SLICE = 0.004
"""Seconds for which the event loop is held at most."""
_FEW = 64
"""The number of dropped alarms up to which a clean-up is not worth its time."""


class Alarms(Generic[T]):
    """The alarms of one owner. ``len()`` is the number that is set.

    Args:
        mark: called with each alarm that is due, before ``tell`` is called for any.
        tell: called with each alarm that is still set when its turn comes.
    """

    def __init__(self, tell: Callable[[T], object], mark: Callable[[T], object] | None = None) -> None:
        self._mark = mark
        self._tell = tell
        self._heap: list[tuple[float, int]] = []  # nothing that the garbage collector would look at
        self._what: dict[int, T] = {}
        self._due: deque[int] = deque()
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def __len__(self) -> int:
        return len(self._what)

    def set(self, when: float, what: T) -> int:
        """Set an alarm and return its number. ``when`` is by the event loop's clock."""
        number = next(self._numbers)
        heapq.heappush(self._heap, (when, number))
        self._what[number] = what
        if when < self._timer_at:
            self._set_timer()
        return number

    def drop(self, number: int) -> None:
        """Drop an alarm, so that it does not go off. No effect if it was dropped before, or has gone off."""
        if self._what.pop(number, None) is None:
            return
        if not self._what:
            self._heap.clear()
            self._set_timer()
        # Dropped alarms stay in the heap until their time: in large numbers they would fill it.
        elif len(self._heap) > 2 * len(self._what) + _FEW:
            self._heap = [item for item in self._heap if item[1] in self._what]
            heapq.heapify(self._heap)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, math.inf
        if self._heap:
            self._timer_at = self._heap[0][0]
            self._timer = asyncio.get_running_loop().call_at(self._timer_at, self._strike)

    def _strike(self) -> None:
        self._timer = None
        now, was_idle = asyncio.get_running_loop().time(), not self._due
        try:
            while self._heap and self._heap[0][0] <= now:
                number = heapq.heappop(self._heap)[1]
                if (what := self._what.get(number)) is not None:
                    self._due.append(number)
                    if self._mark is not None:
                        self._mark(what)
        finally:
            self._set_timer()
            if was_idle:
                self._tell_some()

    def _tell_some(self) -> None:
        until = perf_counter() + SLICE
        try:
            while self._due:
                number = self._due.popleft()
                if (what := self._what.get(number)) is not None:
                    self.drop(number)
                    self._tell(what)
                if perf_counter() >= until:
                    break
        finally:
            # Also if a callback has raised: the alarms behind it would otherwise never go off.
            if self._due:
                asyncio.get_running_loop().call_soon(self._tell_some)
