"""Fairness to the event loop: when very many calls begin at once, they begin a few at a time, and it breathes in between."""

from __future__ import annotations

import asyncio
import math
from collections import deque

PER_ROUND = 16
"""Each takes about 100 us before it waits for something."""


class StartLimiter:
    """``await start_limiter.wait()`` goes on at once for the first few in a round of the loop, for others in a later one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._left = PER_ROUND
        self._is_counting = False
        self._waiting: deque[tuple[float, asyncio.Future[bool]]] = deque()  # with a deadline
        self._earliest = math.inf  # or earlier than any

    async def wait(self, seconds: float = 0.0) -> float | None:
        """What is left of the seconds when the turn comes; None: it does not come within them. 0: no limit, and 0 is left."""
        if not self._is_counting:
            self._is_counting = True
            self._loop.call_soon(self._begin_round)
        if self._left:
            self._left -= 1
            return seconds
        deadline = self._loop.time() + seconds if seconds else math.inf
        turn = self._loop.create_future()
        self._waiting.append((deadline, turn))
        self._earliest = min(self._earliest, deadline)
        has_come = await turn
        if not seconds:
            return seconds
        left = deadline - self._loop.time()
        return left if has_come and left > 0 else None

    def _begin_round(self) -> None:
        """Every round while callers wait: that saves them timers, of which a thousand may begin in one."""
        now = self._loop.time()
        if self._earliest <= now:
            self._give_up(now)
        self._left = PER_ROUND
        while self._waiting and self._left:
            _, turn = self._waiting.popleft()
            if not turn.done():  # else its caller was cancelled, or has no more time
                turn.set_result(True)
                self._left -= 1
        self._is_counting = bool(self._waiting) or self._left < PER_ROUND
        if self._is_counting:
            self._loop.call_soon(self._begin_round)

    def _give_up(self, now: float) -> None:
        self._earliest = math.inf
        for deadline, turn in self._waiting:
            if deadline > now:
                self._earliest = min(self._earliest, deadline)
            elif not turn.done():
                turn.set_result(False)
