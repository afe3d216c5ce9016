"""Queues of tasks that want something scarce. First come, first served: no large request starves.

Who owns what
    The owner of the scarce thing owns a :class:`FairQueue`, and calls :meth:`FairQueue.call` whenever there may be more
    of it. A task brings an *attempt*: a plain function that takes what the task wants and returns it, or returns None
    and takes nothing. Only the first task in the line attempts, and it does so itself, so what it takes is never on its
    way to a task that no longer wants it.

Who has a line
    Without a name there is one line for all. If tasks work for several peers, each peer has its own line, and the lines
    take turns: a peer with a thousand waiting tasks delays another peer's by one turn.

What cancellation means
    A task that is cancelled, or out of time, leaves the line with nothing, and the next one attempts, because the first
    may have stood in the way of a smaller request. An attempt that raises ends only its own wait.

Why not trio's ``ParkingLot``
    It parks tasks in order and releases a number of them. It leaves the rest to its caller: what they wait for, whether
    that is really there, what happens to the permit of a task that was cancelled between its release and its turn, and
    the rule that a newcomer must not pass the line. That was written four times before it was here. ``anyio.Semaphore``
    has those rules, for single permits.

Where it is not used
    ``context_caching.transfer.start_limiter`` releases tasks by rounds of the loop, a thousand at once, and spares each
    a timer. ``context_caching.pools.worker_threads`` waits for single permits, for which a semaphore is enough.
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
    """A task's place in a line. ``called`` is done when the task may attempt."""

    __slots__ = ("called",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.called: asyncio.Future[None] = loop.create_future()


class FairQueue:
    """The lines. ``len()`` is the number of waiting tasks in all of them."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[_Turn]] = {}  # the next turn is the first turn of the first line
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    async def take(self, attempt: Callable[[], T | None], deadline: float = math.inf, line: Hashable = None) -> T:
        """Return the first result of ``attempt`` that is not None. If that is the first call's, neither wait nor yield.

        Args:
            deadline: by the loop's clock. If it has passed already, there is only one attempt, at once.
            line: the line in which the task waits, for instance its peer's.

        Raises:
            TimeoutError: if the deadline has passed. Nothing was taken.

        It also raises whatever the attempt raises.
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
            if self._next() is turn and (taken := attempt()) is not None:  # the call came together with the deadline
                has_taken = True
                return taken
            raise TimeoutError("the deadline has passed")
        finally:
            # in any case: the next task may want less than this one, which stood in its way
            self._leave(line, turn, has_taken)
            self.call()

    def _next(self) -> _Turn:
        return next(iter(self._lines.values()))[0]

    def _leave(self, line: Hashable, turn: _Turn, has_taken: bool) -> None:
        """Remove a task. If it got what it wanted, move its line behind the others."""
        self._waiting -= 1
        turns = self._lines[line]
        turns.remove(turn)
        if has_taken or not turns:
            del self._lines[line]
        if has_taken and turns:
            self._lines[line] = turns

    def call(self) -> None:
        """Let the next task attempt again, because there may be more than before. Has no effect if none waits."""
        if self._waiting and not (turn := self._next()).called.done():
            turn.called.set_result(None)
