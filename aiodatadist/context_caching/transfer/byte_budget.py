"""Back-pressure: so many bytes of host memory may be in flight together, and who wants more waits in line."""

from __future__ import annotations

from collections import deque

import anyio

from aiodatadist.context_caching.pools.contract import PoolTimeout


class ByteBudget:
    """Bytes, given out in the order in which they were asked for.

    Attributes:
        limit: bytes out at a time; who wants more than that gets it, alone.
        taken, most: bytes out now, and the most there ever were.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self.most = 0
        self._waiting: deque[tuple[int, anyio.Event]] = deque()

    async def take(self, nbytes: int, deadline: float) -> None:
        """Wait for so many. A deadline that has passed means: now or never.

        Raises:
            PoolTimeout: the deadline has passed. Nothing was taken.
        """
        if not self._waiting and self._has_room(nbytes):
            self._grant(nbytes)
            return
        ticket = nbytes, anyio.Event()
        self._waiting.append(ticket)
        try:
            with anyio.CancelScope(deadline=deadline):
                await ticket[1].wait()
        except BaseException:
            self._give_up(ticket)
            raise
        if not ticket[1].is_set():
            self._give_up(ticket)
            raise PoolTimeout(f"{self.taken} of {self.limit} bytes were in flight until the deadline")

    def give(self, nbytes: int) -> None:
        self.taken -= nbytes
        self._serve()

    def _give_up(self, ticket: tuple[int, anyio.Event]) -> None:
        if ticket[1].is_set():
            self.give(ticket[0])
        else:
            self._waiting.remove(ticket)
            self._serve()  # it may have stood in the way of a smaller one

    def _serve(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            nbytes, granted = self._waiting.popleft()
            self._grant(nbytes)
            granted.set()

    def _has_room(self, nbytes: int) -> bool:
        return not self.taken or self.taken + nbytes <= self.limit

    def _grant(self, nbytes: int) -> None:
        self.taken += nbytes
        self.most = max(self.most, self.taken)
