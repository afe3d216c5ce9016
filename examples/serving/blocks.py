"""Blocks of the KV cache for requests, and what a client is told that finds none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aiodatadist import BlockPool, OutOfMemory, TakenBlocks

from .answer import Refused

RETRY_AFTER = 1
"""Seconds after which a client that found no room may come again."""


class Blocks:
    """Blocks of a pool, for requests in the order in which they came.

    Args:
        longest_line: requests that may wait at once; further ones are refused.
        seconds: time for which a request may wait.
    """

    def __init__(self, pool: BlockPool, longest_line: int, seconds: float) -> None:
        self.pool = pool
        self._longest_line = longest_line
        self._seconds = seconds

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[TakenBlocks]:
        """Take ``count`` blocks for the time of an ``async with``, or until the end of their lease.

        Raises:
            Refused: 400 if the cache has fewer blocks; 503 if the line is too long, or if the wait took too long.
        """
        pool = self.pool
        if count > pool.count:
            raise Refused(400, f"the request needs {count} blocks, and the cache has {pool.count}")
        if pool.waiting >= self._longest_line and (pool.waiting or pool.free < count):
            raise Refused(503, f"{pool.waiting} requests wait for blocks already", RETRY_AFTER)
        async with AsyncExitStack() as stack:
            try:
                taken = await stack.enter_async_context(pool.take(count, timeout=self._seconds))
            except OutOfMemory:
                raise Refused(503, f"{count} blocks were not free within {self._seconds:g} s", RETRY_AFTER) from None
            yield taken
