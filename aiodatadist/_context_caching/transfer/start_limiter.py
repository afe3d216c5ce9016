"""Fairness to the event loop: if very many calls start at once, a few start in each round of the loop."""

from __future__ import annotations

import asyncio
import math
from collections import deque

PER_ROUND = 16
"""Calls that start in one round. Each takes about 100 us before it first waits."""


class StartLimiter:
    """A gate that lets the first few calls in a round of the loop pass at once, and the others in later rounds."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._left = PER_ROUND
        self._is_counting = False
        self._waiting: deque[tuple[float, asyncio.Future[bool]]] = deque()  # each with its deadline
        self._earliest = math.inf  # at most the earliest deadline that waits

    async def wait(self, seconds: float = 0.0) -> float | None:
        """Wait for a turn; return the seconds that are left, or None if the turn does not come in time.

        With 0 seconds there is no limit, and 0 is returned.
        """
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
        """Let the next few calls start.

        This runs in every round while calls wait. It replaces a timer for each, of which a thousand could fire in one
        round.
        """
        now = self._loop.time()
        if self._earliest <= now:
            self._give_up(now)
        self._left = PER_ROUND
        while self._waiting and self._left:
            _, turn = self._waiting.popleft()
            if not turn.done():  # a done turn's caller was cancelled, or has run out of time
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
