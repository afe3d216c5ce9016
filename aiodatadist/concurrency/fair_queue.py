"""A line of tasks that want something of which there may not be enough. First come, first served: no large wish starves.

Who owns what
    The owner of the scarce thing owns a :class:`FairQueue`, and calls :meth:`FairQueue.call` whenever there may be more of
    it. A task brings an *attempt*: a plain function that takes what the task wants and returns it, or returns None and takes
    nothing. Only the first in the line attempts, in its own task, so what it takes is never on its way to a task that does
    not want it any more.

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
from collections.abc import Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


class _Turn:
    """The place of a task. ``called`` is done when its task may attempt."""

    __slots__ = ("called",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.called: asyncio.Future[None] = loop.create_future()


class FairQueue:
    """The line. ``len()`` is how many wait."""

    def __init__(self) -> None:
        self._waiting: deque[_Turn] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def take(self, attempt: Callable[[], T | None], deadline: float = math.inf) -> T:
        """What ``attempt`` returns, as soon as it returns something. Does not wait, nor yield, if it does so at once.

        Args:
            deadline: by the loop's clock. One that has passed means: now or never.

        Raises:
            TimeoutError: the deadline has passed, and nothing was taken.
            Whatever the attempt raises.
        """
        if not self._waiting and (taken := attempt()) is not None:
            return taken
        loop = asyncio.get_running_loop()
        turn = _Turn(loop)
        self._waiting.append(turn)
        try:
            with anyio.CancelScope(deadline=deadline):
                while True:
                    await turn.called
                    if (taken := attempt()) is not None:
                        return taken
                    turn.called = loop.create_future()
            if self._waiting[0] is turn and (taken := attempt()) is not None:  # it came with the deadline
                return taken
            raise TimeoutError("the deadline has passed")
        finally:
            self._waiting.remove(turn)
            self.call()

    def call(self) -> None:
        """There may be more than before: the first in the line attempts again. Nothing happens where none waits."""
        if self._waiting and not self._waiting[0].called.done():
            self._waiting[0].called.set_result(None)
