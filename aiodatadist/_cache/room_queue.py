"""The queue for room in a memory pool. First come, first served: a small allocation behind a large one waits, too.

The registry owns one queue for each of its pools, and calls it when pages are freed. A caller brings an *attempt*,
which makes the whole cache, or returns None and takes nothing. It runs in the caller's own task when that task is first
in line. So room that a cancelled or late caller would have got is free for the next one.

A caller that does not wait gets what fits at once if no other waits. Otherwise it gets nothing: free room belongs to
the first in line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from aiodatadist._cache.pool import PagePool
from aiodatadist._concurrency.fair_queue import FairQueue
from aiodatadist.errors import OutOfMemory

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Wish:
    """The allocation that a task waits for, and since when by the loop's clock."""

    nbytes: int
    count: int
    since: float
    task: str

    def told(self, now: float) -> str:
        """Return a description for a message."""
        what = f"{self.nbytes} bytes" if self.count == 1 else f"{self.count} x {self.nbytes} bytes"
        return f"{what} for task {self.task!r}, which has waited for {now - self.since:.3g} s"


class RoomQueue:
    """The line in front of one pool. ``len()`` is the number of waiting calls."""

    def __init__(self, pages: PagePool) -> None:
        self._pages = pages
        self._line = FairQueue()
        self._wishes: list[_Wish] = []  # in the order of the line

    def __len__(self) -> int:
        return len(self._wishes)

    def at_once(self, nbytes: int, count: int, attempt: Callable[[], T | None]) -> T:
        """Return what the attempt makes, now or never. Raises what the attempt raises.

        Raises:
            OutOfMemory: if there is no room for ``count`` pieces of ``nbytes`` each, or other calls wait for it.
        """
        # Nothing passes those that wait, even if it would fit: otherwise a large allocation might never get its room.
        made = attempt() if not self._wishes else None
        if made is None:
            raise self._pages.no_room(nbytes, count, self._in_front(self._wishes))
        return made

    async def in_turn(self, nbytes: int, count: int, attempt: Callable[[], T | None], seconds: float) -> T:
        """Return what the attempt makes, once it is this caller's turn and there is room. If cancelled, nothing was taken.

        Raises what the attempt raises.

        Raises:
            OutOfMemory: if there is no room within ``seconds``, or never, because the whole pool is smaller.
        """
        if not self._pages.could_hold(nbytes, count):
            raise self._pages.no_room(nbytes, count, "; it would not fit into the empty pool")
        now = asyncio.get_running_loop().time
        wish = _Wish(nbytes, count, now(), _task_name())
        self._wishes.append(wish)
        try:
            return await self._line.take(attempt, wish.since + seconds)
        except TimeoutError as error:
            raise self._too_late(wish, now()) from error
        finally:
            self._wishes.remove(wish)

    def _too_late(self, wish: _Wish, now: float) -> OutOfMemory:
        ahead = self._wishes[: self._wishes.index(wish)]
        waited = f"; it waited for {now - wish.since:.3g} s"
        return self._pages.no_room(wish.nbytes, wish.count, waited + self._in_front(ahead))

    @staticmethod
    def _in_front(ahead: list[_Wish]) -> str:
        if not ahead:
            return ""
        return f", behind {len(ahead)} in line: first {ahead[0].told(asyncio.get_running_loop().time())}"

    def call(self) -> None:
        """Let the first in line try again: pages were freed, or no more are handed out."""
        self._line.call()


def _task_name() -> str:
    task = asyncio.current_task()
    return "" if task is None else task.get_name()
