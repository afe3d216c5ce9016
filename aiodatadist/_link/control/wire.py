"""The wire: control messages over a byte stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic, perf_counter

import anyio
import anyio.abc

from aiodatadist._concurrency import forks
from aiodatadist._concurrency.signal import Signal
from aiodatadist._link.control.peer_share import Inflow
from aiodatadist._wire.frames import MAX_BODY, Decoder, Unknown, encode
from aiodatadist._wire.messages import PLAIN_PROTOCOL, PROTOCOL, SEALED_MINOR, Message
from aiodatadist._wire.seals import ByTls, Opener, Sealer
from aiodatadist.errors import PeerLost, ProtocolError

RECEIVE = 1 << 16
"""The most bytes that are received at a time."""
PIECE = 1 << 12
"""The number of received bytes that are decoded at a time: some ten requests, a fifth of a millisecond."""
UNVERIFIED_BODY = 1 << 14
"""The most bytes of a message before the peer is known."""

GATHER_SECONDS = 5e-5
"""Seconds after a message was sent at once in which others are gathered. A call of the kernel costs a fifth of that."""
MAX_BACKLOG = 4 << 20
"""Bytes that may wait for a peer that does not read. If more wait, this end stops reading from the peer."""
WHOLE_SECONDS = 20.0
"""Seconds of waiting in which the rest of a message must come.

Without a limit, one bit of a length that was changed on its way would keep a link mute that has heartbeats: all that its
peer says would count as the rest of that message. The largest message takes this long at 16 KiB/s.
"""
LAST_LOOK = 0.2
"""Further seconds for it: a busy event loop first reads what came in the meantime."""

_NOTHING = memoryview(b"")

GONE = "the peer's process is gone, or its connection broke"


def no_end() -> ProtocolError:
    """Return the error for a message whose rest does not come."""
    return ProtocolError(
        f"the end of a message did not come within {WHOLE_SECONDS:g} s: its length was changed on its way, or the peer "
        "stopped within it"
    )


class Wire:
    """Messages over a byte stream: one reader, and one writer at a time.

    While a link is made, its messages are sent with :meth:`send`, which waits. On a ready link they are posted: that never
    waits, so a reaction to a message can answer it.

    A message that is posted alone is sent in the same call. Messages that follow it closely, or answer messages that came
    together, are sent at the beginning of the loop's next turn. :meth:`pump` sends what the kernel does not accept then.

    A forked child may run some of the parent's tasks once more while its event loop ends. It sends nothing.

    Args:
        stream: the byte stream.
        at_once: sends bytes without waiting and returns True, or returns False if that is not possible now.

    Attributes:
        is_proved: True if the peer has proved that it has a key, or a certificate.
        on_repeated: called for each sealed message that was ignored, because it had come before.
    """

    def __init__(self, stream: anyio.abc.ByteStream, at_once: Callable[[bytes], bool] = lambda _: False) -> None:
        self.stream = stream
        self._at_once = at_once
        self._generation = forks.generation
        self._gathers_until = 0.0
        self._is_waiting = False
        self._react: Callable[[Message | Unknown], bool] | None = None
        self._failure: Exception | None = None
        self._decoder = Decoder(UNVERIFIED_BODY, PROTOCOL)
        self._sealer: Sealer | ByTls | None = None
        self.is_proved: bool = False
        self.on_repeated: Callable[[], object] = lambda: None
        self._inflow: Inflow | None = None
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
        self._rest_seconds = WHOLE_SECONDS

    @property
    def peer_minor(self) -> int:
        """The peer's minor version of the protocol; 0 until it is known, so that only what all versions know is sent."""
        return self._decoder.minor or 0

    def quiet_seconds(self) -> float | None:
        """Return how many seconds ago bytes of the peer came; None if that is not known."""
        quiet: Callable[[], float | None] | None = getattr(self.stream, "quiet_seconds", None)
        return None if quiet is None else quiet()

    def allow_silence(self, seconds: float) -> None:
        """Set how long the network may deliver nothing before the stream ends, if that is more than it allows anyway."""
        allow: Callable[[float], None] | None = getattr(self.stream, "allow_silence", None)
        if allow is not None:
            allow(seconds)

    def speak(self, protocol: int) -> None:
        """Set the major version of this end, for errors."""
        self._decoder.protocol = protocol

    @property
    def may_say_who(self) -> bool:
        """True unless this end has a key, and the peer has not proved yet that it has it, too."""
        return self.is_proved or self._decoder.protocol == PLAIN_PROTOCOL

    def seal_with(self, sealer: Sealer, opener: Opener) -> None:
        """Seal all messages from now on, and accept only sealed ones.

        Raises ProtocolError if another message came already, which nothing has proved.
        """
        if self._ready:
            raise ProtocolError("a message without a seal came before there was a key for it")
        self._sealer, self.is_proved = sealer, True
        self._decoder.open_with(opener)
        opener.on_repeated = self._repeated

    def has_proved(self) -> None:
        """Note that the peer has proved a certificate, and everything passes through TLS."""
        self._decoder.minor, self.is_proved = SEALED_MINOR, True
        self._sealer = ByTls.SEALED
        self._decoder.open_with(ByTls.SEALED)

    def _repeated(self) -> None:
        self.on_repeated()  # which the link may set later

    def trust(self) -> None:
        """Accept messages of full size from now on, because the peer is known."""
        self._decoder.max_body = MAX_BODY

    def limit(self, inflow: Inflow) -> None:
        """Count what the peer sends from now on, and do not read while it has sent too much."""
        self._inflow = inflow

    def meet(self, first: Message | Unknown) -> None:
        """Note a message that the peer has sent before, on the same connection."""
        self._decoder.meet(first)

    async def send(self, *messages: Message) -> None:
        """Send messages, and wait until the kernel has accepted them. Raises PeerLost if the peer is gone."""
        await self._write(b"".join(encode(message, self.peer_minor, self._sealer) for message in messages))

    async def _write(self, data: bytes) -> None:
        if self._generation != forks.generation:
            raise PeerLost("the connection is the parent process's")
        try:
            await self.stream.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise PeerLost(GONE) from error

    def post(self, message: Message) -> None:
        """Send a message soon, without waiting.

        It is sent at once, unless more is about to be posted: answers to messages that came together, or messages within
        :meth:`together`.

        Raises ProtocolError if the message is too large for a frame, or newer than the peer. Nothing is sent then.
        """
        data = encode(message, self._decoder.minor or 0, self._sealer)
        if self._generation != forks.generation or self._is_over:
            return
        if not self._backlog_bytes:
            now = monotonic()
            is_one_of_many = self._posts_many or self._ready or self._unread
            if not is_one_of_many and now >= self._gathers_until and self._try(data):
                self._gathers_until = now + GATHER_SECONDS
                return
            if not self._posts_many:
                asyncio.get_running_loop().call_soon(self._next_turn)
        self._backlog.append(data)
        self._backlog_bytes += len(data)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Gather what is posted within the context, and send it together at its end."""
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
        """Send the gathered messages; return False if the kernel does not accept them now.

        Once :meth:`pump` has taken over, leave them to it and return True.
        """
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
        """Set a function that starts :meth:`pump` in a task, to send what the kernel does not accept at once."""
        self._start_pump = start_pump
        if self._backlog:
            self._pump()

    @property
    def is_congested(self) -> bool:
        """True if so much waits for the peer that this end must not read more from it."""
        return self._backlog_bytes > MAX_BACKLOG

    async def flush(self) -> None:
        """Wait until the kernel has accepted everything posted so far, or the peer is gone."""
        while self._backlog_bytes:
            await self._flushed.wait()
        if self._may_be_buffered:
            with suppress(PeerLost):
                await self._write(b"")  # waits for what was sent at once, which may still be in the stream's buffer

    async def pump(self) -> None:
        """Send posted messages until none is left. Raises PeerLost if the peer is gone.

        After that, and after a cancellation, no posted message is sent.
        """
        while self._backlog:
            frames, self._backlog = self._backlog, []
            data = b"".join(frames)
            try:
                await self._write(data)
            except PeerLost:
                self._give_up()
                raise
            # not before: flush() waits until the kernel has accepted these bytes
            self._backlog_bytes -= len(data)
        self._is_pumped = False
        self._flushed.wake()

    def _give_up(self) -> None:
        """Drop what is posted, and let no caller wait for it. What the peer has sent can still be received."""
        self._is_over = True
        self._backlog.clear()
        self._backlog_bytes = 0
        self._flushed.wake()

    async def receive(self) -> Message | Unknown:
        """Return the next message, or an :class:`Unknown` that only a newer version than this end's knows.

        Raises:
            PeerLost: if the peer is gone.
            ProtocolError: if the received bytes are not a message.
            Exception: whatever a reaction at once raised.
        """
        inflow = self._inflow
        if inflow is not None:
            seconds = inflow.wait() if inflow.is_spent else inflow.turn()
            if seconds > 0:
                await anyio.sleep(seconds)
        while not self._ready:
            if self._unread:
                piece, self._unread = self._unread[:PIECE], self._unread[PIECE:] or _NOTHING
                began = perf_counter()
                if messages := self._decoder.feed(piece):
                    self._rest_seconds = WHOLE_SECONDS
                    self._ready.extend(messages)
                if inflow is not None:
                    inflow.worked(perf_counter() - began)
                continue
            self._ready.extend(self._decoder.feed(b""))  # raises what is wrong with bytes behind an earlier message
            self._is_waiting = True
            try:
                data = await (self._rest() if self._decoder.is_within else self.stream.receive(RECEIVE))
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
                raise PeerLost(GONE) from error
            finally:
                self._is_waiting = False
            if self._failure is not None:
                raise self._failure
            self._unread = memoryview(data)
            if inflow is not None:
                inflow.received(len(data))
        if inflow is not None:
            inflow.heard()
        return self._ready.popleft()

    async def _rest(self) -> bytes:
        """Receive more of a message that has begun. Raises ProtocolError if its end has not come in time."""
        began = anyio.current_time()
        for seconds in (max(self._rest_seconds, 0.0), LAST_LOOK):
            with anyio.move_on_after(seconds):
                data = await self.stream.receive(RECEIVE)
                self._rest_seconds -= anyio.current_time() - began
                return data
        raise no_end()

    def react_at_once(self, react: Callable[[Message | Unknown], bool] | None) -> None:
        """Set a function that reacts to a message in the call that brings it, two turns of the loop sooner.

        It is called with single small messages that come while :meth:`receive` waits. If it returns False, the message is
        received as usual.
        """
        self._react = react

    def hear(self, data: bytes) -> bool:
        """React to bytes that came while no earlier ones wait to be read. Return True if they need not be received."""
        if self._react is None or not self._is_waiting or self._ready or self._unread:
            return False
        inflow = self._inflow
        # A peer that does not read, or sends too much, has to wait for receive(), which slows it down.
        if self._backlog_bytes > MAX_BACKLOG or (inflow is not None and inflow.is_spent):
            return False
        message = self._decoder.peek(data)
        if message is None:
            return False
        try:
            has_reacted = self._react(message)
        except Exception as error:  # receive() raises it
            self._failure = error
            return False
        if has_reacted:
            self._decoder.consume()
            if inflow is not None:
                inflow.heard(len(data))
        return has_reacted

    async def aclose(self) -> None:
        """Close the stream at once."""
        await anyio.aclose_forcefully(self.stream)
