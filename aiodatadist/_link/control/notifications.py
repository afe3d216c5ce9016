"""Notifications: those on their way to the peer, in the order of their calls, and those that came from it."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial

from aiodatadist._concurrency.signal import Signal
from aiodatadist._device import TransferCompletion, TransferState, give_way
from aiodatadist._link.control.peer_share import NoteRoom
from aiodatadist._link.control.questions import AGAIN_SECONDS, MOST_AGAIN_SECONDS
from aiodatadist._values import checks
from aiodatadist._wire.messages import MAX_NOTE, Message, Note, Taken
from aiodatadist.errors import ParamInvalid, ProtocolError

WINDOW = 64
"""The most notifications that the peer's user has not taken yet. Further ones wait here."""


def check_payload(payload: bytes) -> bytes:
    """Return the payload of a notification. Raises TypeError if it is not bytes, and ParamInvalid if it is too long."""
    checks.instance(payload, "notify", bytes)
    if len(payload) > MAX_NOTE:
        raise ParamInvalid(f"a notification of {len(payload)} bytes: the limit is {MAX_NOTE}")
    return payload


class PendingNotification:
    """A notification's place in the queue.

    The notification is sent when it is ready and everything before it has been sent or dropped.
    """

    __slots__ = ("_queue", "is_dropped", "is_ready", "payload", "sent")

    def __init__(self, notification_queue: NotificationQueue, payload: bytes) -> None:
        self._queue = notification_queue
        self.payload: bytes = payload
        self.is_ready: bool = False
        self.is_dropped: bool = False
        self.sent: Signal = Signal()

    def ready(self) -> None:
        """Let the notification go: the data it announces is in place."""
        self.is_ready = True
        self._queue.advance()

    def drop(self) -> None:
        """Discard the notification: the data it announces will not arrive. No effect if it has been sent."""
        self.is_dropped = True
        self._queue.advance()


class NotificationQueue:
    """The notifications that a link's peer is to receive.

    Args:
        post: sends a message to the peer.
        is_numbered: returns True if the peer numbers notifications, and says which it has received.
        post_again: repeats a message that the peer may have missed; ``post`` if it is None.
    """

    def __init__(
        self,
        post: Callable[[Message], None],
        is_numbered: Callable[[], bool] = lambda: False,
        post_again: Callable[[Message], None] | None = None,
    ) -> None:
        self._post = post
        self._post_again = post_again or post
        self._is_numbered = is_numbered
        self._pending: deque[PendingNotification] = deque()
        self._sent = self._taken = 0
        self._unheard: deque[Note] = deque()
        self._repeated = 0
        self._pause = AGAIN_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._emptied = Signal()

    async def wait_empty(self) -> None:
        """Wait until every notification has been sent or dropped."""
        while self._pending:
            await self._emptied.wait()

    def send_now(self, payload: bytes) -> None:
        """Send a notification behind all earlier ones. The data that it announces is in place."""
        if self._pending or not self._window:
            self.reserve(payload).ready()
        else:
            self._say(payload)

    def send_after(self, transfer: TransferCompletion, payload: bytes) -> None:
        """Send a notification, in its place in the order of the calls, once a transfer has succeeded."""
        if transfer.state is TransferState.DONE:
            self.send_now(payload)
            return
        pending = self.reserve(payload)
        transfer.add_done_callback(lambda done: pending.drop() if done.error or done.is_cancelled else pending.ready())

    def reserve(self, payload: bytes) -> PendingNotification:
        """Return a place in the queue, behind all that were reserved before."""
        pending = PendingNotification(self, payload)
        self._pending.append(pending)
        return pending

    def on_taken(self, message: Taken) -> None:
        """Note how many notifications the peer has received, and how many its user has taken.

        An older peer only says that its user took another one. Messages may come out of order.
        """
        if not self._is_numbered():
            message = Taken(count=self._taken + 1, heard=self._sent)
        if not message.count <= message.heard <= self._sent:
            raise ProtocolError("the peer says that it took a notification that it was never sent")
        self._taken = max(self._taken, message.count)
        while self._unheard and self._unheard[0].number <= message.heard:
            self._unheard.popleft()
        if self._repeated and self._unheard and self._unheard[0].number > self._repeated:
            self._repeat()  # the peer received the repeated one, but has missed more
        self.advance()

    @property
    def _window(self) -> int:
        """The number of notifications that may be sent now."""
        return WINDOW - (self._sent - self._taken)

    def advance(self) -> None:
        """Send the notifications that can be sent."""
        while self._pending:
            head = self._pending[0]
            if not head.is_dropped:
                if not head.is_ready or not self._window:
                    return
                self._say(head.payload)
                head.sent.set()
            self._pending.popleft()
        self._emptied.wake()

    def _say(self, payload: bytes) -> None:
        self._sent += 1
        note = Note.checked(payload=base64.b64encode(payload).decode(), number=self._sent)
        self._post(note)
        if self._is_numbered():
            self._unheard.append(note)
            self._look_again()

    # ---- what the peer did not hear ----

    def _look_again(self) -> None:
        """Set the timer that looks for notifications that the peer missed, unless it is set."""
        if self._timer is None and not self._is_over:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._pause, self._look, self._oldest, self._taken)

    @property
    def _oldest(self) -> int:
        """The number of the first notification that the peer may have missed; 0 if it has received all."""
        return self._unheard[0].number if self._unheard else 0

    def _look(self, oldest: int, taken: int) -> None:
        """Repeat a notification if the peer has received and taken none since the timer was set.

        ``oldest`` and ``taken`` are the values of that time. The peer answers only when its user takes one, so its silence
        alone does not mean that the notification was lost.
        """
        self._timer = None
        self._repeated = 0
        stands_still = self._oldest == oldest and self._taken == taken
        if stands_still and self._unheard:
            self._repeat()
        elif stands_still and self._pending:  # the message that made room for them may have been lost
            # The peer has received this number before: it answers, and ignores the payload.
            self._post_again(Note(payload="", number=self._sent))
        self._pause = min(2 * self._pause, MOST_AGAIN_SECONDS) if stands_still else AGAIN_SECONDS
        if self._unheard or (self._pending and not self._window):
            self._look_again()

    def _repeat(self) -> None:
        self._repeated = self._unheard[0].number
        self._post_again(self._unheard[0])

    def end(self) -> None:
        """Send nothing more, because the link has ended."""
        self._is_over = True
        self._unheard.clear()
        if self._timer is not None:
            self._timer.cancel()


class IncomingNotifications:
    """The notifications that a link's peer sends. Each is delivered once and in order, even if messages are lost.

    Args:
        post: sends a message to the peer while it listens.
        deliver: called with a payload, and with a function to call when the user has taken the notification.
        room: returns the room for the peer's notifications, over all its links.
        later: calls a function in the loop's next turn, once everything that is taken meanwhile has been; by default at once.
    """

    def __init__(
        self,
        post: Callable[[Message], None],
        deliver: Callable[[bytes, Callable[[], None]], object],
        room: Callable[[], NoteRoom],
        later: Callable[[Callable[[], None]], object] = lambda call: call(),
    ) -> None:
        self._post = post
        self._later = later
        self._is_to_answer = False
        self._is_counted = True
        self._deliver = deliver
        self._room = room
        self._heard = self._taken = 0
        self._early: dict[int, bytes] = {}  # those behind one that has not come

    def on_note(self, message: Note) -> None:
        """Deliver a notification and those that waited for it; keep it if an earlier one has not come.

        If there is no room because of what came over the peer's earlier links and was not taken, the notification
        counts as lost: its sender repeats it until there is room.

        Raises ProtocolError if the peer sends more than this end's user takes, or is too old to repeat it.
        """
        number = message.number or self._heard + 1
        self._is_counted = message.number > 0
        if number > self._taken + WINDOW:
            raise ProtocolError("the peer sends notifications faster than they are taken")
        if number <= self._heard or number in self._early:
            self._answer()
            return
        payload: bytes | None = decode(message)
        if payload is None or not self._room().take(len(payload)):
            if not message.number:
                raise ProtocolError(
                    "the peer sends notifications over one link after the other, and they are not taken"
                )
            return
        if number != self._heard + 1:
            self._early[number] = payload
            self._answer()
            return
        while payload is not None:
            self._heard += 1
            self._deliver(payload, partial(self._took, len(payload)))
            payload = self._early.pop(self._heard + 1, None)

    def _took(self, nbytes: int) -> None:
        self._room().free(nbytes)
        self._taken += 1
        if not self._is_counted:  # such a peer wants to hear of each
            self._answer()
        elif not self._is_to_answer:
            self._is_to_answer = True
            self._later(self._answer_once)

    def _answer_once(self) -> None:
        """Tell the peer of all that were taken since: the numbers are totals."""
        self._is_to_answer = False
        self._answer()

    def end(self) -> None:
        """Forget what waits for an earlier notification, because the link has ended."""
        for payload in self._early.values():
            self._room().free(len(payload))
        self._early.clear()

    def _answer(self) -> None:
        self._post(Taken(count=self._taken, heard=self._heard))


@dataclass(frozen=True, slots=True)
class Notification:
    """A notification that a peer sent, with ``notify=`` of a transfer or with ``notify()``.

    Attributes:
        cluster_id: the peer.
        payload: its bytes, at most 64 KiB.
        generation: the generation of the link over which it came: how many times the link to that cluster had been made,
            from 1.
    """

    cluster_id: int
    payload: bytes
    generation: int = field(default=0, compare=False)


class NotificationInbox:
    """The notifications of all peers, until they are taken.

    Args:
        check_here: raises if its caller is not on the cluster's event loop.
    """

    def __init__(self, check_here: Callable[[], None] = lambda: None) -> None:
        self._check_here = check_here
        self._notes: deque[tuple[Notification, Callable[[], None]]] = deque()
        self._came = Signal()
        self._is_closed = False

    def put(self, note: Notification, taken: Callable[[], None]) -> None:
        """Add a notification. ``taken`` is called when a caller takes it."""
        self._notes.append((note, taken))
        self._wake()

    def close(self) -> None:
        """Accept no further notifications. Those that have come can still be taken."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        self._came.wake()

    async def take(self) -> AsyncIterator[Notification]:
        """Yield the notifications one after the other, until no more can come. Several takers share them."""
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
    """Return the payload of a message. Raises ProtocolError if it is not base64."""
    try:
        return base64.b64decode(note.payload, validate=True)
    except binascii.Error as error:
        raise ProtocolError(f"a notification's payload is not base64: {error}") from None
