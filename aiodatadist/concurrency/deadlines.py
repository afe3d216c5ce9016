"""Deadlines of transfers, any number of them with one timer.

Who owns what
    A cluster owns its :class:`Deadlines`. A transfer is in it until it ends, and no longer; when none is left there is no
    timer.

What happens at a deadline
    All that are due are marked at one go, from which on none of them starts any more, and are then told to end, for
    ``SLICE`` seconds at a time, with a round of the event loop in between: a thousand that are due together do not hold up
    the loop. Which of them are under way, and how those end, is their own affair (:meth:`TransferCompletion.expire`).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from time import perf_counter

from aiodatadist.concurrency.completion import TransferCompletion

SLICE = 0.004
"""Seconds for which the event loop is held."""
_FEW = 64
"""Dead entries that are not worth a clean-up."""


class _Entry:
    """A transfer and how long it has. ``transfer`` is None when it has ended."""

    __slots__ = ("seconds", "transfer")

    def __init__(self, seconds: float, transfer: TransferCompletion) -> None:
        self.seconds = seconds
        self.transfer: TransferCompletion | None = transfer


class Deadlines:
    """Those of one event loop. ``len()`` is how many transfers have one, and have not ended."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _Entry]] = []  # by time and order, which C compares
        self._due: deque[_Entry] = deque()
        self._orders = itertools.count()
        self._alive = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def __len__(self) -> int:
        return self._alive

    def add(self, transfer: TransferCompletion, seconds: float) -> None:
        """It has so many seconds from now. One that has ended is left alone."""
        if transfer.is_done:
            return
        when = asyncio.get_running_loop().time() + seconds
        entry = _Entry(seconds, transfer)
        heapq.heappush(self._heap, (when, next(self._orders), entry))
        self._alive += 1
        if when < self._timer_at:
            self._set_timer()

        def ended(_: TransferCompletion) -> None:
            entry.transfer = None
            self._alive -= 1
            self._forget()

        transfer.add_done_callback(ended)

    def _forget(self) -> None:
        """Transfers that have ended are not kept for their deadlines."""
        if not self._alive:
            self._heap.clear()
            self._set_timer()
        elif len(self._heap) > 2 * self._alive + _FEW:
            self._heap = [item for item in self._heap if item[2].transfer is not None]
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
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)[2]
            if entry.transfer is not None:
                entry.transfer.late_after = entry.seconds
                self._due.append(entry)
        self._set_timer()
        if was_idle:
            self._expire_some()

    def _expire_some(self) -> None:
        until = perf_counter() + SLICE
        while self._due:
            entry = self._due.popleft()
            if entry.transfer is not None:
                entry.transfer.expire()
            if self._due and perf_counter() >= until:
                asyncio.get_running_loop().call_soon(self._expire_some)
                return
