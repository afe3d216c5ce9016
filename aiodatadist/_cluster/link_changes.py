"""Changes of links, reported to all readers: linked, lost, relinking, given up, unlinked."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from aiodatadist._concurrency.loop_time import give_way
from aiodatadist._concurrency.signal import Signal
from aiodatadist._counting import Totals
from aiodatadist.errors import LLMException

MAX_UNREAD = 1024
"""Changes that wait for one reader; beyond that the oldest are dropped, and counted."""


class LinkPhase(StrEnum):
    """The phases of a link.

    ``LINKED``: it is ready, whichever end made it. ``LOST``: it broke. ``RELINKING``: another attempt to make it again
    comes after ``next_delay``. ``GIVEN_UP``: there are no further attempts, because the time for them is over or the
    peer has proved that it does not fit. ``UNLINKED``: a call of either end's ended it.
    """

    LINKED = "linked"
    LOST = "lost"
    RELINKING = "relinking"
    GIVEN_UP = "given up"
    UNLINKED = "unlinked"


@dataclass(frozen=True, slots=True)
class LinkChange:
    """A change of one link.

    Attributes:
        cluster_id: the peer.
        state: the new phase of the link.
        generation: the number of times that the link to this peer was made, from 1. It is that of the link that is
            ready, or of the last one. A link that the peer did not come to have is counted, but not reported.
        reason: why the link ended, or, for a later attempt, why the one before failed; None if it is linked.
        attempt: the number of the next attempt, from 1; for ``LINKED`` and ``GIVEN_UP``, the number of attempts made.
        next_delay: seconds until that attempt; None if none comes.
    """

    cluster_id: int
    state: LinkPhase
    generation: int
    reason: LLMException | None = None
    attempt: int = 0
    next_delay: float | None = None


class Unread:
    """The changes that one reader has not read yet.

    Attributes:
        changes: the oldest first.
        came: woken when one comes, and set once no more can come.
        dropped: the number of changes for which there was no room.
    """

    def __init__(self, totals: Totals) -> None:
        self.changes: deque[LinkChange] = deque()
        self.came: Signal = Signal()
        self.dropped: int = 0
        self._totals = totals

    def put(self, change: LinkChange) -> None:
        """Add a change. Has no effect once the reader is closed."""
        if self.came.is_set():
            return
        if len(self.changes) == MAX_UNREAD:
            self.changes.popleft()
            self.dropped += 1
            self._totals.link_changes_dropped += 1
        self.changes.append(change)
        self.came.wake()


class LinkChanges(AsyncIterator[LinkChange]):
    """The changes for one reader, from when it was made. See :meth:`aiodatadist.LLMDataDist.link_changes`."""

    def __init__(self, unread: Unread, check_here: Callable[[], None]) -> None:
        """Make a reader. ``check_here`` raises if the caller is not on the cluster's event loop."""
        self._unread = unread
        self._check_here = check_here

    @property
    def dropped(self) -> int:
        """The number of changes for which this reader was too slow: the oldest of more than 1024 that it had not read."""
        return self._unread.dropped

    def close(self) -> None:
        """Accept no further changes. Those that have come can still be read."""
        self._unread.came.set()

    async def aclose(self) -> None:
        """Stop reading. May be called twice."""
        self._unread.changes.clear()
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LinkChange:
        """Return the next change. If cancelled, none is taken."""
        self._check_here()
        # before a change is taken: a cancellation here must lose none
        await give_way()
        unread = self._unread
        while not unread.changes:
            if unread.came.is_set():
                raise StopAsyncIteration
            await unread.came.wait()
        return unread.changes.popleft()


class ChangeFeed:
    """The source of changes for all readers. A reader that its owner dropped is forgotten."""

    def __init__(self, totals: Totals, check_here: Callable[[], None]) -> None:
        self._totals = totals
        self._check_here = check_here
        self._readers: weakref.WeakKeyDictionary[LinkChanges, Unread] = weakref.WeakKeyDictionary()
        self._is_closed = False

    def open(self) -> LinkChanges:
        """Return a reader of changes from now on."""
        unread = Unread(self._totals)
        reader = LinkChanges(unread, self._check_here)
        if self._is_closed:
            reader.close()
        else:
            self._readers[reader] = unread
        return reader

    def tell(self, change: LinkChange) -> None:
        for unread in list(self._readers.values()):
            unread.put(change)

    def close(self) -> None:
        self._is_closed = True
        for reader in list(self._readers):
            reader.close()
