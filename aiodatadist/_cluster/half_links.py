"""Links that are being made: how many there may be at a time, and which one gives way to the next. No I/O.

A link costs a thread and files from the moment its channel is opened, and a peer that stops half-way keeps them for as
long as a handshake may take. So there are few such links at a time. If there is no room, the oldest one of the place
with the most of them gives way, once it has had ``UNDISTURBED_SECONDS``. So peers that stop half-way keep no others
out, whatever their number.

Who owns what
    A task that makes a link has a place in :class:`HalfLinks` from before it has cost anything until the link is made,
    or nothing is left of it. An engine has one table for the links that it asks for and one for those that peers ask
    for. If they shared one, two engines could wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import anyio

from aiodatadist._cluster.client_slots import open_files, place_of
from aiodatadist._concurrency.fair_queue import FairQueue

MAX_HALF_LINKS: Final = 128
"""Links that are being made at a time, in one table; at most a sixteenth of the files that the process may open.

A link needs a connection, three files of the channel and one for heartbeats, so two tables take at most five eighths of
the files. Data connections count as well: of links that have any, fewer are made at a time.
"""
_FILES: Final = 5
"""Files of a link that is being made, without data connections."""
UNDISTURBED_SECONDS: Final = 2.0
"""Seconds that a link has before it gives way.

This is a hundred times what one link takes, or the time for all that may be made at once on two busy cores.
"""


@dataclass(eq=False)
class _HalfLink:
    """A link that is being made. ``give_way`` is called at most once: ``is_leaving`` is then True."""

    place: str
    began: float
    give_way: Callable[[], object]
    is_leaving: bool = False


class HalfLinks:
    """The half-made links of an engine that one end asked for, on its event loop. ``len()`` is their number.

    Attributes:
        limit: the largest number of them.
        displaced: the number that had to give way.
    """

    def __init__(self) -> None:
        self.limit: int = 0
        self.allow_for(0)
        self.displaced: int = 0
        self._all: dict[_HalfLink, None] = {}  # in the order of their start
        self._line = FairQueue()
        self._alarm: asyncio.TimerHandle | None = None  # set while a link waits until the oldest has had its time

    def __len__(self) -> int:
        return len(self._all)

    def allow_for(self, streams: int) -> None:
        """Set the limit for links that have ``streams`` data connections each."""
        self.limit = min(MAX_HALF_LINKS, max(open_files() * _FILES // (16 * (_FILES + streams)), 1))

    @property
    def words(self) -> str:
        """The limit, for errors."""
        return f"at most {self.limit} links are made at a time"

    @asynccontextmanager
    async def room_for(self, host: str, give_way: Callable[[], object]) -> AsyncIterator[None]:
        """Wait until there is room for a link, and keep it inside this context.

        Places take turns; a place with many links waits for its own.

        Args:
            host: the address of the other end.
            give_way: called from a callback of the event loop if another link needs the room. It must end the body.
        """
        place = place_of(host)
        half = _HalfLink(place, 0.0, give_way)
        if len(self._line):  # the first in the line makes room for this one, too
            asyncio.get_running_loop().call_soon(self._line.call)
        try:
            await self._line.take(lambda: self._enter(half), line=place)
        finally:
            if not len(self._line):
                self._silence()
        try:
            yield
        finally:
            del self._all[half]
            self._line.call()

    def _enter(self, half: _HalfLink) -> bool | None:
        now = anyio.current_time()
        if len(self._all) < self.limit:
            half.began = now
            self._all[half] = None
            return True
        # One for each that waits, because ending one may take long; one per round: a hundred would hold up the loop.
        leaving = sum(each.is_leaving for each in self._all)
        if leaving < max(len(self._line), 1) and (oldest := self._oldest_of_most()) is not None:
            undisturbed = oldest.began + UNDISTURBED_SECONDS - now
            if undisturbed > 0:
                self._silence()
                self._alarm = asyncio.get_running_loop().call_later(undisturbed, self._line.call)
                return None
            oldest.is_leaving = True
            self.displaced += 1
            # In a callback of the loop: inside a task, anyio would describe that task in words, which costs most here.
            asyncio.get_running_loop().call_soon(self._tell, oldest)
            asyncio.get_running_loop().call_soon(self._line.call)
        return None

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None

    def _tell(self, half: _HalfLink) -> None:
        if half in self._all:
            half.give_way()

    def _oldest_of_most(self) -> _HalfLink | None:
        """Return the oldest link of the place with the most of them; None if all are leaving."""
        staying = [each for each in self._all if not each.is_leaving]
        if not staying:
            return None
        most, _ = Counter(each.place for each in staying).most_common(1)[0]
        return next(each for each in staying if each.place == most)
