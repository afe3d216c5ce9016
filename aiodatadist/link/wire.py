"""Control messages over a byte stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

import anyio
import anyio.abc

from aiodatadist.concurrency import forks
from aiodatadist.concurrency.signal import Signal
from aiodatadist.errors import PeerLost
from aiodatadist.wire.frames import MAX_BODY, Decoder, Unknown, encode
from aiodatadist.wire.messages import Message

RECEIVE = 1 << 16
PIECE = 1 << 12
"""Bytes of that which are decoded at a time: some ten requests, a fifth of a millisecond."""
UNVERIFIED_BODY = 1 << 14
"""Bytes of a message before the peer is known."""

GATHER_SECONDS = 5e-5
"""After a message was sent at once: what is posted within is sent together. A call of the kernel costs a fifth of that."""
MAX_BACKLOG = 4 << 20
"""Bytes that wait for a peer that does not read, before we stop reading from it."""

_NOTHING = memoryview(b"")

GONE = "the peer's process is gone, or its connection broke"


class Wire:
    """Messages over a byte stream: one reader, and one writer at a time.

    While a link is made its messages are sent with :meth:`send`, which waits. On a ready link they are posted: that never
    waits, so a reaction to a message can answer it. They are sent in this order: one that comes alone in the call that posts
    it, those that follow it closely, or answer what came together, at the beginning of the loop's next turn, and what the
    kernel does not take by :meth:`pump`.

    A forked child may run some of the parent's tasks once more, while its event loop ends. It says nothing over it.

    Args:
        at_once: sends without waiting, or says that it cannot now.
    """

    def __init__(self, stream: anyio.abc.ByteStream, at_once: Callable[[bytes], bool] = lambda _: False) -> None:
        self.stream = stream
        self._at_once = at_once
        self._generation = forks.generation
        self._gathers_until = 0.0
        self._is_waiting = False
        self._react: Callable[[Message | Unknown], bool] | None = None
        self._failure: Exception | None = None
        self._decoder = Decoder(UNVERIFIED_BODY)
        self._ready: deque[Message | Unknown] = deque()
        self._backlog: list[bytes] = []
        self._backlog_bytes = 0
        self._flushed = Signal()
        self._start_pump: Callable[[], object] | None = None
        self._is_pumped = False
        self._is_over = False
        self._may_be_buffered = False
        self._posts_many = False
        self._unread = _NOTHING

    @property
    def peer_minor(self) -> int:
        """The peer's minor version of the protocol; 0 until it is known: what is said to the peer is in all of them."""
        return self._decoder.minor or 0

    def quiet_seconds(self) -> float | None:
        """How long ago bytes of the peer came. None: not known."""
        quiet: Callable[[], float | None] | None = getattr(self.stream, "quiet_seconds", None)
        return None if quiet is None else quiet()

    def trust(self) -> None:
        """The peer is known: full-sized messages are fine from now on."""
        self._decoder.max_body = MAX_BODY

    def meet(self, first: Message | Unknown) -> None:
        """The peer said this already, on the same connection."""
        self._decoder.meet(first)

    async def send(self, *messages: Message) -> None:
        """Raises PeerLost: the peer is gone."""
        await self._write(b"".join(encode(message, self.peer_minor) for message in messages))

    async def _write(self, data: bytes) -> None:
        if self._generation != forks.generation:
            raise PeerLost("the connection is the parent process's")
        try:
            await self.stream.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise PeerLost(GONE) from error

    def post(self, message: Message) -> None:
        """Send it soon. Raises ProtocolError: it is too large for a frame, or newer than the peer; nothing was posted."""
        data = encode(message, self.peer_minor)
        if self._generation != forks.generation or self._is_over:
            return
        if not self._backlog_bytes:
            now = monotonic()
            if not self._is_one_of_many and now >= self._gathers_until and self._try(data):
                self._gathers_until = now + GATHER_SECONDS
                return
            if not self._posts_many:
                asyncio.get_running_loop().call_soon(self._next_turn)
        self._backlog.append(data)
        self._backlog_bytes += len(data)

    @property
    def _is_one_of_many(self) -> bool:
        """More is about to be posted: the answers to messages that came together, or what :meth:`together` is around."""
        return self._posts_many or bool(self._ready or self._unread)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is posted within is sent at its end, at one go if it is no more than the kernel takes at a time."""
        self._posts_many = True
        try:
            yield
        finally:
            self._posts_many = False
            self._next_turn()

    def _try(self, data: bytes) -> bool:
        is_sent = self._at_once(data)
        self._may_be_buffered |= is_sent
        return is_sent

    def _next_turn(self) -> None:
        if not self.hurry():
            self._pump()

    def hurry(self) -> bool:
        """Send what is being gathered, if the kernel takes it at once: False where it does not. What it did not take
        earlier is not this method's."""
        if not self._backlog or self._is_pumped or self._generation != forks.generation:
            return True
        if self._backlog_bytes > RECEIVE or not self._try(b"".join(self._backlog)):
            return False
        self._backlog.clear()
        self._backlog_bytes = 0
        self._flushed.wake()
        return True

    def _pump(self) -> None:
        if self._start_pump is not None:
            self._is_pumped = True
            self._start_pump()

    def pump_with(self, start_pump: Callable[[], object]) -> None:
        """From now on what the kernel does not take at once is sent by :meth:`pump`, which this starts in a task."""
        self._start_pump = start_pump
        if self._backlog:
            self._pump()

    @property
    def is_congested(self) -> bool:
        return self._backlog_bytes > MAX_BACKLOG

    async def flush(self) -> None:
        """Until everything posted so far was handed to the kernel, or the peer is gone."""
        while self._backlog_bytes:
            await self._flushed.wait()
        if self._may_be_buffered:
            with suppress(PeerLost):
                await self._write(b"")  # behind what was sent at once, and may be in the stream's buffer yet

    async def pump(self) -> None:
        """Send what is posted, until nothing is left. Raises PeerLost: the peer is gone. Then, and when it is cancelled, no
        posted message is sent any more."""
        while self._backlog:
            frames, self._backlog = self._backlog, []
            data = b"".join(frames)
            try:
                await self._write(data)
            except PeerLost:
                self._give_up()
                raise
            self._backlog_bytes -= len(data)
        self._is_pumped = False
        self._flushed.wake()

    def _give_up(self) -> None:
        """Nothing is sent any more, and no caller waits for it. What the peer said can still be received."""
        self._is_over = True
        self._backlog.clear()
        self._backlog_bytes = 0
        self._flushed.wake()

    async def receive(self) -> Message | Unknown:
        """The next message, or one that only a newer version than this end's knows.

        Raises:
            PeerLost: the peer is gone.
            ProtocolError: what came is no message.
            Exception: a reaction at once failed with it.
        """
        while not self._ready:
            if self._unread:
                piece, self._unread = self._unread[:PIECE], self._unread[PIECE:] or _NOTHING
                self._ready.extend(self._decoder.feed(piece))
                continue
            self._ready.extend(self._decoder.feed(b""))  # what came behind an earlier message may have been wrong
            self._is_waiting = True
            try:
                data = await self.stream.receive(RECEIVE)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
                raise PeerLost(GONE) from error
            finally:
                self._is_waiting = False
            if self._failure is not None:
                raise self._failure
            self._unread = memoryview(data)
        return self._ready.popleft()

    def react_at_once(self, react: Callable[[Message | Unknown], bool] | None) -> None:
        """From now on a single small message that comes while :meth:`receive` waits is shown to ``react`` in the call that
        brings it, two turns of the loop sooner. What that answers False to is received."""
        self._react = react

    def hear(self, data: bytes) -> bool:
        """Bytes came, and nothing that came before waits to be read; whether that was all for them."""
        if self._react is None or not self._is_waiting or self._ready or self._unread or self.is_congested:
            return False
        message = self._decoder.peek(data)
        if message is None:
            return False
        try:
            return self._react(message)
        except Exception as error:  # it is the receiver's
            self._failure = error
            return False

    async def aclose(self) -> None:
        await anyio.aclose_forcefully(self.stream)
