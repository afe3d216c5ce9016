"""Fairness to the event loop: when very many calls begin at once, they begin a few at a time, and it breathes in between."""

from __future__ import annotations

import asyncio
from collections import deque

PER_ROUND = 16
"""Each takes about 100 us before it waits for something."""


class Turns:
    """``await turns.wait()`` goes on at once for the first few in a round of the loop, and for the others in a later one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._left = PER_ROUND
        self._is_counting = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            self._loop.call_soon(self._begin_round)
        if self._left:
            self._left -= 1
            return
        turn = self._loop.create_future()
        self._waiting.append(turn)
        await turn

    def _begin_round(self) -> None:
        self._left = PER_ROUND
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # else whoever waited was cancelled
                turn.set_result(None)
                self._left -= 1
        self._is_counting = self._left < PER_ROUND
        if self._is_counting:
            self._loop.call_soon(self._begin_round)
