"""Back-pressure: so many bytes may be in use together, and a task that wants more waits in line."""

from __future__ import annotations

import math

from aiodatadist.concurrency.fair_queue import FairQueue


class ByteBudget:
    """Bytes, given out in the order in which they were asked for.

    Attributes:
        limit: bytes out at a time; a task that wants more than that gets it, alone.
        taken, most: bytes out now, and the most there ever were.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self.most = 0
        self._line = FairQueue()

    @property
    def free(self) -> int:
        """Bytes that could be taken now, were there no line."""
        return self.limit - self.taken

    async def take(self, nbytes: int, deadline: float = math.inf) -> None:
        """All of them at once, when that many are free. Cancelled: none. A deadline that has passed means: now or never.

        Raises:
            TimeoutError: the deadline has passed. Nothing was taken.
        """

        def attempt() -> bool | None:
            if self.taken and self.taken + nbytes > self.limit:
                return None
            self.taken += nbytes
            self.most = max(self.most, self.taken)
            return True

        await self._line.take(attempt, deadline)

    def give(self, nbytes: int) -> None:
        """Give back what was taken, all of it or a part."""
        self.taken -= nbytes
        self._line.call()
