"""Back-pressure: a limited number of bytes may be in use together, and a task that wants more waits in a queue."""

from __future__ import annotations

import math

from aiodatadist._concurrency.fair_queue import FairQueue


class ByteBudget:
    """A number of bytes, granted in the order of the requests.

    Attributes:
        limit: bytes in use at a time; a task that wants more than that gets them once nothing else is in use.
        taken, most: bytes in use now, and the most that ever were.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken: int = 0
        self.most = 0
        self._line = FairQueue()

    @property
    def free(self) -> int:
        """Bytes that could be taken now, if no task were waiting."""
        return self.limit - self.taken

    async def take(self, nbytes: int, deadline: float = math.inf) -> None:
        """Take ``nbytes`` once they are free, all together. If cancelled, none are taken.

        If the deadline has passed already, they are taken now or not at all.

        Raises:
            TimeoutError: if the deadline has passed. Nothing was taken.
        """

        def attempt() -> bool | None:
            # If nothing else is in use, more than the limit is granted. Otherwise such a task would wait for ever.
            if self.taken and self.taken + nbytes > self.limit:
                return None
            self.taken += nbytes
            self.most = max(self.most, self.taken)
            return True

        await self._line.take(attempt, deadline)

    def take_now(self, nbytes: int) -> bool:
        """Take ``nbytes`` if they are free and no task waits for others. Return False if nothing was taken."""
        if len(self._line) or (self.taken and self.taken + nbytes > self.limit):
            return False
        self.taken += nbytes
        self.most = max(self.most, self.taken)
        return True

    def give(self, nbytes: int) -> None:
        """Release what was taken, all of it or a part."""
        self.taken -= nbytes
        self._line.call()
