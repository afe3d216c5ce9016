"""Notifications: on their way out, in the order in which they were asked for; and those that came in."""

from __future__ import annotations

import base64
import binascii
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from aiodatadist.concurrency.signal import Signal
from aiodatadist.device import give_way
from aiodatadist.errors import ParamInvalid, ProtocolError
from aiodatadist.values import checks
from aiodatadist.wire.messages import MAX_NOTE, Message, Note

WINDOW = 64
"""Notifications that the peer's user has not taken yet; further ones wait here."""


def check_payload(payload: bytes) -> bytes:
    """Raises TypeError, ParamInvalid: it is no notification's payload."""
    checks.instance(payload, "notify", bytes)
    if len(payload) > MAX_NOTE:
        raise ParamInvalid(f"a notification of {len(payload)} bytes: the limit is {MAX_NOTE}")
    return payload


class PendingNotification:
    """One notification's place in the queue. It goes out when it is ready and everything before it is out or dropped."""

    __slots__ = ("_queue", "is_dropped", "is_ready", "payload", "sent")

    def __init__(self, notification_queue: NotificationQueue, payload: bytes) -> None:
        self._queue = notification_queue
        self.payload = payload
        self.is_ready = False
        self.is_dropped = False
        self.sent = Signal()

    def ready(self) -> None:
        """What it speaks of is in place."""
        self.is_ready = True
        self._queue.advance()

    def drop(self) -> None:
        """What it speaks of will not be. Nothing happens if it is out already."""
        self.is_dropped = True
        self._queue.advance()


class NotificationQueue:
    """What a link's peer is to be notified of."""

    def __init__(self, post: Callable[[Message], None]) -> None:
        self._post = post
        self._pending: deque[PendingNotification] = deque()
        self._window = WINDOW
        self._emptied = Signal()

    async def wait_empty(self) -> None:
        """Until all that were reserved are out, or dropped."""
        while self._pending:
            await self._emptied.wait()

    def reserve(self, payload: bytes) -> PendingNotification:
        """A place behind all that were reserved before."""
        pending = PendingNotification(self, payload)
        self._pending.append(pending)
        return pending

    def taken(self) -> None:
        """The peer's user took one."""
        if self._window >= WINDOW:
            raise ProtocolError("the peer says that it took a notification that it was never sent")
        self._window += 1
        self.advance()

    def advance(self) -> None:
        """Send what can be sent."""
        while self._pending:
            head = self._pending[0]
            if not head.is_dropped:
                if not head.is_ready or not self._window:
                    return
                self._window -= 1
                self._post(Note(payload=base64.b64encode(head.payload).decode()))
                head.sent.set()
            self._pending.popleft()
        self._emptied.wake()


@dataclass(frozen=True, slots=True)
class Notification:
    """What a peer had to say, with ``notify=`` of a transfer or with ``notify()``.

    Attributes:
        cluster_id: whose.
        payload: its bytes, at most 64 KiB.
        generation: of the link over which it came: how many times the link to that cluster was made, from 1.
    """

    cluster_id: int
    payload: bytes
    generation: int = field(default=0, compare=False)


class NotificationInbox:
    """What all peers sent, until it is taken."""

    def __init__(self, check_here: Callable[[], None] = lambda: None) -> None:
        """``check_here`` raises where a taker is not on the cluster's event loop."""
        self._check_here = check_here
        self._notes: deque[tuple[Notification, Callable[[], None]]] = deque()
        self._came = Signal()
        self._is_closed = False

    def put(self, note: Notification, taken: Callable[[], None]) -> None:
        self._notes.append((note, taken))
        self._wake()

    def close(self) -> None:
        """Nothing comes any more. What is there can still be taken."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        self._came.wake()

    async def take(self) -> AsyncIterator[Notification]:
        """One after the other; ends when nothing can come any more. Several takers share them."""
        while True:
            self._check_here()
            while not self._notes:
                if self._is_closed:
                    return
                await self._came.wait()
            note, taken = self._notes.popleft()
            taken()
            yield note
            await give_way()


def decode(note: Note) -> bytes:
    """Raises ProtocolError: it is not base64."""
    try:
        return base64.b64decode(note.payload, validate=True)
    except binascii.Error as error:
        raise ProtocolError(f"a notification's payload is not base64: {error}") from None
