"""Free blocks of the KV cache, and the line of requests that wait for them."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from .answer import Refused

RETRY_AFTER = 1
"""Seconds after which a client that found no room may come again."""


class Blocks:
    """Numbers of blocks, for requests in the order in which they came.

    Args:
        count: number of blocks in the cache.
        longest_line: requests that may wait at once; further ones are refused.
        seconds: time for which a request may wait.
    """

    def __init__(self, count: int, longest_line: int, seconds: float) -> None:
        self.count = count
        self._longest_line = longest_line
        self._seconds = seconds
        self._free = list(range(count))
        self._turn = anyio.Lock()  # first come, first served: a large request is not overtaken for ever by small ones
        self._given_back = anyio.Event()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def waiting(self) -> int:
        return self._turn.statistics().tasks_waiting + self._turn.locked()

    async def take(self, count: int) -> list[int]:
        """Take ``count`` blocks. They belong to the caller until :meth:`give`.

        Raises:
            Refused: 400 if the cache has fewer blocks; 503 if the line is too long, or if the wait took too long.
        """
        if count > self.count:
            raise Refused(400, f"the request needs {count} blocks, and the cache has {self.count}")
        if self.waiting >= self._longest_line and (self.waiting or self.free < count):
            raise Refused(503, f"{self.waiting} requests wait for blocks already", RETRY_AFTER)
        with anyio.move_on_after(self._seconds):
            async with self._turn:
                await self._wait_free(count)
                return [self._free.pop() for _ in range(count)]
        raise Refused(503, f"{count} blocks were not free within {self._seconds:g} s", RETRY_AFTER)

    def give(self, blocks: Sequence[int]) -> None:
        """Give blocks back, from the loop. Nothing may land in them any longer."""
        self._free.extend(blocks)
        self._given_back.set()

    async def wait_all_free(self) -> None:
        async with self._turn:
            await self._wait_free(self.count)

    async def _wait_free(self, count: int) -> None:
        while self.free < count:
            self._given_back = anyio.Event()
            await self._given_back.wait()
