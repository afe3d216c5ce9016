"""Notifications that came and were not read: enough of each peer's that it need not wait for a reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Final

from aiodatadist._hixl.values import NotifyDesc, note_of
from aiodatadist._link import Notification, NotificationInbox

MOST_UNREAD: Final = 4096
"""The most notifications of one peer that wait for a reader. Further ones wait at the peer, whose calls run out of time."""


class Notes(NotificationInbox):
    """The notifications of all peers, until they are read. The peer may send on before that, up to ``MOST_UNREAD``."""

    def __init__(self, check_here: Callable[[], None]) -> None:
        super().__init__(check_here)
        self._unread: Counter[int] = Counter()

    def put(self, note: Notification, taken: Callable[[], None]) -> None:
        peer = note.cluster_id
        self._unread[peer] += 1
        if self._unread[peer] <= MOST_UNREAD:
            taken()
            super().put(note, lambda: self._read(peer))
            return

        def both() -> None:
            taken()
            self._read(peer)

        super().put(note, both)

    def _read(self, peer: int) -> None:
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
        return [note for note in notes if note is not None]

    async def read(self) -> AsyncIterator[NotifyDesc]:
        """Yield what comes, one after the other, until no more can come."""
        async for note in self.take():
            told = note_of(note.payload)
            if told is not None:
                yield told
