"""What becomes of links, told to all who listen: made, lost, being made again, given up, unlinked."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from aiodatadist.concurrency.loop_time import give_way
from aiodatadist.concurrency.signal import Signal
from aiodatadist.counting import Totals
from aiodatadist.errors import LLMException

MAX_UNREAD = 1024
"""Changes that wait for one reader; behind that the oldest are dropped, and counted."""


class LinkPhase(StrEnum):
    """What has become of a link.

    ``LINKED``: it is ready, whichever end made it. ``LOST``: it broke. ``RELINKING``: it will be tried to make it again after
    ``next_delay``. ``GIVEN_UP``: it is not tried any more, because its time is over or the peer proved that it does not fit.
    ``UNLINKED``: a call of either end's ended it.
    """

    LINKED = "linked"
    LOST = "lost"
    RELINKING = "relinking"
    GIVEN_UP = "given up"
    UNLINKED = "unlinked"


@dataclass(frozen=True, slots=True)
class LinkChange:
    """One link has changed.

    Attributes:
        cluster_id: the peer.
        state: what has become of it.
        generation: how many times the link to this peer was made, from 1: of the link that is ready, or that was the last.
            One that the peer did not come to have is counted, and not told of.
        reason: why it ended, or, of a later attempt, why the one before failed; None where it is linked.
        attempt: the number of the attempt that comes next, from 1; of ``LINKED`` and ``GIVEN_UP``, how many there were.
        next_delay: seconds until that attempt; None where none comes.
    """

    cluster_id: int
    state: LinkPhase
    generation: int
    reason: LLMException | None = None
    attempt: int = 0
    next_delay: float | None = None


class LinkChanges(AsyncIterator[LinkChange]):
    """One reader's changes, from when it was made. See :meth:`aiodatadist.LLMDataDist.link_changes`.

    Attributes:
        dropped: changes that this reader was too slow for: the oldest of more than 1024 that it had not read.
    """

    def __init__(self, totals: Totals, check_here: Callable[[], None]) -> None:
        """``check_here`` raises where the caller is not on the cluster's event loop."""
        self._unread: deque[LinkChange] = deque()
        self._came = Signal()
        self._totals = totals
        self._check_here = check_here
        self.dropped = 0

    def put(self, change: LinkChange) -> None:
        """Of no effect on one that is closed."""
        if self._came.is_set():
            return
        if len(self._unread) == MAX_UNREAD:
            self._unread.popleft()
            self.dropped += 1
            self._totals.link_changes_dropped += 1
        self._unread.append(change)
        self._came.wake()

    def close(self) -> None:
        """Nothing comes any more. What is there can still be read."""
        self._came.set()

    async def aclose(self) -> None:
        """Read no more. May be called twice."""
        self._unread.clear()
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LinkChange:
        """The next one. Cancelled, it takes none."""
        self._check_here()
        await give_way()
        while not self._unread:
            if self._came.is_set():
                raise StopAsyncIteration
            await self._came.wait()
        return self._unread.popleft()


class ChangeFeed:
    """Tells all readers. A reader that its owner dropped is forgotten."""

    def __init__(self, totals: Totals, check_here: Callable[[], None]) -> None:
        self._totals = totals
        self._check_here = check_here
        self._readers: weakref.WeakSet[LinkChanges] = weakref.WeakSet()
        self._is_closed = False

    def open(self) -> LinkChanges:
        """A reader of what changes from now on."""
        reader = LinkChanges(self._totals, self._check_here)
        if self._is_closed:
            reader.close()
        else:
            self._readers.add(reader)
        return reader

    def tell(self, change: LinkChange) -> None:
        for reader in list(self._readers):
            reader.put(change)

    def close(self) -> None:
        self._is_closed = True
        for reader in list(self._readers):
            reader.close()
