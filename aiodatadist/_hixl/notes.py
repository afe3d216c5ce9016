"""Notifications that came and were not read: enough of each peer's that it need not wait for a reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final

from aiodatadist._hixl.values import NotifyDesc, is_note, note_of
from aiodatadist._link import Notification, NotificationInbox

MOST_UNREAD: Final = 4096
"""The most notifications of one peer that wait for a reader. Further ones wait at the peer, whose calls run out of time."""
MOST_BYTES: Final = 64 << 20
"""The most bytes of all peers' notifications that wait for a reader. Further ones wait at their peers, too.

A peer may come under one name after the other, so a limit for each name alone would limit nothing.
"""
NOTE_BYTES: Final = 512
"""The bytes that a notification takes besides its name and its message."""


class Notes(NotificationInbox):
    """The notifications of all peers, until they are read. A peer may send on before that, up to the limits above."""

    def __init__(self, check_here: Callable[[], None]) -> None:
        super().__init__(check_here)
        self._unread: Counter[int] = Counter()
        self._nbytes = 0

    def put(self, note: Notification, taken: Callable[[], None]) -> None:
        if not is_note(note.payload):  # no reader could use it
            taken()
            return
        peer, nbytes = note.cluster_id, len(note.payload) + NOTE_BYTES
        if self._unread[peer] >= MOST_UNREAD or self._nbytes + nbytes > MOST_BYTES:
            super().put(note, taken)
            return
        self._unread[peer] += 1
        self._nbytes += nbytes
        taken()
        super().put(note, partial(self._read, peer, nbytes))

    def _read(self, peer: int, nbytes: int) -> None:
        self._nbytes -= nbytes
        self._unread[peer] -= 1
        if not self._unread[peer]:
            del self._unread[peer]

    def take_all(self) -> list[NotifyDesc]:
        """Return what has come, in the order of each peer's calls, without waiting."""
        self._check_here()
        notes = []
        while self._notes:
            note, taken = self._notes.popleft()
            taken()
            notes.append(note_of(note.payload))
        return notes

    async def read(self) -> AsyncIterator[NotifyDesc]:
        """Yield what comes, one after the other, until no more can come."""
        async for note in self.take():
            yield note_of(note.payload)
