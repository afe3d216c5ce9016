"""Lines of tasks that want something of which there may not be enough. First come, first served: no large wish starves.

Who owns what
    The owner of the scarce thing owns a :class:`FairQueue`, and calls :meth:`FairQueue.call` whenever there may be more of
    it. A task brings an *attempt*: a plain function that takes what the task wants and returns it, or returns None and takes
    nothing. Only the first in the line attempts, in its own task, so what it takes is never on its way to a task that does
    not want it any more.

Who has a line
    Without a name there is one line for all. Where tasks work for several peers, each peer has its own line, and the lines
    take turns: a peer that has a thousand tasks waiting delays another one's by one turn.

What cancellation means
    A task that is cancelled, or out of time, leaves the line with nothing, and the next one attempts: it may have stood in
    the way of a smaller wish. An attempt that raises ends its own wait only.

Why not trio's ``ParkingLot``
    It parks tasks in order and lets so many go. What they wait for, whether it is there after all, what happens to the permit
    of a task that was cancelled between its release and its turn, and the rule that a newcomer must not pass the line: all
    that is the caller's, and it was written four times. ``anyio.Semaphore`` has those rules, for single permits.

Where it is not used
    ``context_caching.transfer.start_limiter`` releases tasks by rounds of the loop, a thousand at once, and spares each a
    timer. ``context_caching.pools.worker_threads`` waits for single permits, for which a semaphore is enough.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Hashable
from typing import TypeVar

import anyio

T = TypeVar("T")


class _Turn:
    """The place of a task. ``called`` is done when its task may attempt."""

    __slots__ = ("called",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.called: asyncio.Future[None] = loop.create_future()


class FairQueue:
    """The lines. ``len()`` is how many tasks wait, in all of them."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[_Turn]] = {}  # the first one's first turn is the next
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    async def take(self, attempt: Callable[[], T | None], deadline: float = math.inf, line: Hashable = None) -> T:
        """What ``attempt`` returns, as soon as it returns something. Does not wait, nor yield, if it does so at once.

        Args:
            deadline: by the loop's clock. One that has passed means: now or never.
            line: in which the task waits, for instance its peer's.

        Raises:
            TimeoutError: the deadline has passed, and nothing was taken.
            Whatever the attempt raises.
        """
        if not self._waiting and (taken := attempt()) is not None:
            return taken
        loop = asyncio.get_running_loop()
        turn = _Turn(loop)
        self._lines.setdefault(line, deque()).append(turn)
        self._waiting += 1
        has_taken = False
        try:
            with anyio.CancelScope(deadline=deadline):
                while True:
                    await turn.called
                    if (taken := attempt()) is not None:
                        has_taken = True
                        return taken
                    turn.called = loop.create_future()
            if self._next() is turn and (taken := attempt()) is not None:  # it came with the deadline
                has_taken = True
                return taken
            raise TimeoutError("the deadline has passed")
        finally:
            self._leave(line, turn, has_taken)
            self.call()

    def _next(self) -> _Turn:
        return next(iter(self._lines.values()))[0]

    def _leave(self, line: Hashable, turn: _Turn, has_taken: bool) -> None:
        """A line whose first task got what it wanted goes behind the others."""
        self._waiting -= 1
        turns = self._lines[line]
        turns.remove(turn)
        if has_taken or not turns:
            del self._lines[line]
        if has_taken and turns:
            self._lines[line] = turns

    def call(self) -> None:
        """There may be more than before: the next task attempts again. Nothing happens where none waits."""
        if self._waiting and not (turn := self._next()).called.done():
            turn.called.set_result(None)
