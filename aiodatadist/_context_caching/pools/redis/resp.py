"""Redis's protocol (RESP 2) on an open connection: values travel from and into the caller's memory without a copy.

redis-py copies a value five times between socket and caller, which costs more than everything else that a load does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Final, NamedTuple, TypeAlias, cast

import anyio.lowlevel

from aiodatadist._context_caching.pools.buffers import TAIL, Buffer
from aiodatadist._values.foreign import printable

LARGEST: Final = 512 << 20
"""Most bytes of a value (``proto-max-bulk-len``)."""
PLAIN: Final = 16 << 20
"""Most bytes of a reply for which the request has no memory, for instance what a server says of itself."""
SCRATCH: Final = 1 << 16
"""Bytes for one-line replies, for the length line of a value, and for unwanted values."""
SLICE: Final = 1 << 20
"""Bytes that are handed to the transport at a time, before other tasks get a turn."""
KINDS: Final = b"+-:$*"
"""First bytes of a reply."""
SMALL: Final = 1 << 12
"""Bytes up to which a piece is copied beside the others, instead of being sent from its place."""


class NotRedis(ConnectionError):
    """The answer is not Redis's protocol. The connection is closed."""


class Filled(Enum):
    """The reply is in the memory that the request had for it."""

    FILLED = "filled"


class OtherLength(NamedTuple):
    """The reply is a value of another length than the request's memory. Its bytes were dropped."""

    nbytes: int


class ResponseError(Exception):
    """The server's refusal, in its own words, as far as they are printable and short."""


class Request(NamedTuple):
    """A command.

    Attributes:
        pieces: its bytes, as they are sent.
        key: its key, if it has one: a cluster routes by it.
        into: memory for a value and the end of line behind it. A value of another length is dropped.
        has_value: True if it carries a value or its reply does, so that it may take long.
        has_pair: True if its reply is a pair: two replies, or one None.
    """

    pieces: Sequence[bytes | memoryview]
    key: bytes = b""
    into: memoryview | None = None
    has_value: bool = False
    has_pair: bool = False


Reply: TypeAlias = bytes | int | ResponseError | Filled | OtherLength | None


def words(*texts: str | int | bytes) -> bytes:
    """Return the encoded arguments of a command."""
    raw = (text if isinstance(text, bytes) else str(text).encode() for text in texts)
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)


def request(*texts: str | int, into: memoryview | None = None) -> Request:
    """Return a command as one would type it; its second word is the key."""
    key = str(texts[1]).encode() if len(texts) > 1 else b""
    return Request([b"*%d\r\n%b" % (len(texts), words(*texts))], key, into, into is not None)


def keyed(command: str) -> Callable[[str], Request]:
    """Return a function that makes ``command name`` of a name, for very many names."""
    head = b"*2\r\n" + words(command)

    def about(name: str) -> Request:
        key = name.encode()
        return Request([b"%b$%d\r\n%b\r\n" % (head, len(key), key)], key)

    return about


def reading(name: str, buffer: Buffer) -> Request:
    """Return ``GETRANGE name 0 n``, which reads one byte more of a value that is too long."""
    key, last = name.encode(), b"%d" % buffer.nbytes
    command = b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n$1\r\n0\r\n$%d\r\n%b\r\n" % (len(key), key, len(last), last)
    return Request([command], key, buffer.with_tail(), has_value=True)


def storing(name: str, buffer: Buffer) -> Request:
    """Return ``SET name value NX``, in one piece unless the name is too long for the room in front of the value."""
    key = name.encode()
    head = b"*4\r\n%b$%d\r\n" % (words("SET", key), buffer.nbytes)
    tail = b"\r\n" + words("NX")
    whole = buffer.framed(head, tail)
    return Request([head, buffer.view(), tail] if whole is None else [whole], key, has_value=True)


def packed(requests: Sequence[Request]) -> Iterator[bytes | bytearray | memoryview]:
    """Yield the bytes to send: large pieces from their place, small ones together."""
    small = bytearray()
    for asked in requests:
        for piece in asked.pieces:
            if len(piece) > SMALL:
                if small:
                    yield small
                    small = bytearray()
                yield piece
            else:
                small += piece
    if small:
        yield small


PAIR: Final = memoryview(b"")
"""Stands for memory of a reply that is a pair."""


class Exchange(asyncio.BufferedProtocol):
    """Questions and answers on one connection, for one caller at a time. It is its transport's protocol from the start.

    Raises:
        ConnectionError: from every call, once the connection is lost.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._room: asyncio.Future[None] | None = None  # a writer waits here for room in the socket
        self._answer: asyncio.Future[list[Reply]] | None = None
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._places: deque[memoryview | None] = deque()  # memory for the replies that are still to come
        self._replies: list[Reply] = []
        self._scratch = memoryview(bytearray(SCRATCH))
        self._farewell = ""  # what the server said unasked before it closed the connection
        self._have = 0  # bytes in it that are not parsed yet
        self._nbytes = 0  # length of the value that is coming in
        self._skip = 0  # unwanted bytes of it that are still to come
        self._value = memoryview(b"")  # its wanted bytes, with the end of line
        self._rest: memoryview | None = None  # the part of that which is still to come

    async def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """Send requests and return their replies. If cancelled, drop the connection: unread replies are left."""
        if self._lost.done():
            raise ConnectionResetError(self._farewell or "the connection was lost")
        self._places.extend(PAIR if asked.has_pair else asked.into for asked in requests)
        self._replies = []
        self._answer = self._loop.create_future()
        try:
            for piece in packed(requests):
                await self._write(memoryview(piece))
            return await self._answer
        finally:
            self._answer = None

    async def _write(self, piece: memoryview) -> None:
        for start in range(0, len(piece), SLICE):
            if start:  # other tasks get a turn
                await anyio.lowlevel.checkpoint()
            if self._lost.done():  # the reply's future has the reason
                return
            self._transport.write(piece[start : start + SLICE])
            if self._room is not None:
                await self._room

    @property
    def is_lost(self) -> bool:
        """True once the connection is lost."""
        return self._lost.done()

    def drop(self) -> None:
        """Close the connection at once. No more bytes are read or sent."""
        if not self._lost.done():
            self._transport.abort()

    async def closed(self) -> None:
        """Wait until the socket is closed."""
        await asyncio.wait([self._lost])

    # ---- what the transport calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # With 0, asyncio's TLS would take an empty buffer for a full one.
        self._transport.set_write_buffer_limits(high=1, low=0)

    def pause_writing(self) -> None:
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def eof_received(self) -> None:
        self._transport.abort()  # asyncio would first send what is buffered, in vain

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._lost.done():
            self._lost.set_result(None)
        for waiting in (self._room, self._answer):
            if waiting is not None and not waiting.done():
                waiting.set_exception(exc or ConnectionResetError(self._farewell or "the server closed the connection"))
                waiting.exception()  # marks it as retrieved: only one of the two has a waiter

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._skip:
            return self._scratch[: self._skip]
        return self._rest if self._rest is not None else self._scratch[self._have :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._skip:
                self._skip -= nbytes
            elif self._rest is None:
                self._have += nbytes
                self._parse()
            else:
                self._take(nbytes)
        except (ValueError, IndexError) as error:
            self._transport.abort()
            self.connection_lost(NotRedis(f"not Redis's protocol: {error}"))

    def _parse(self) -> None:
        """Take complete replies off the front of the scratch memory, and leave the rest."""
        raw = bytes(self._scratch[: self._have])
        at = 0
        if raw[0] not in KINDS:  # for instance a TLS alert, which may never contain an end of line
            raise ValueError(f"a line that begins with {raw[:16]!r}")
        while self._rest is None and (end := raw.find(b"\r\n", at)) >= 0:
            line, at = raw[at:end], end + 2
            if line[:1] == b"*":
                self._pair(line)
                continue
            if line[:1] != b"$" or line == b"$-1":
                self._reply(_simple(line))
                continue
            at = self._begin(int(line[1:]), raw, at)
        if self._rest is None and at == 0 and len(raw) == SCRATCH:
            raise ValueError(f"a line of more than {SCRATCH} bytes")
        self._have = len(raw) - at
        self._scratch[: self._have] = raw[at:]

    def _pair(self, line: bytes) -> None:
        """Expect two replies instead of one, or none. Raises ValueError if no pair is due."""
        if not self._places or self._places[0] is not PAIR or line not in {b"*2", b"*-1"}:
            raise ValueError(f"a line that begins with {line[:16]!r}")
        if line == b"*-1":
            self._reply(None)
            return
        self._places.popleft()
        self._places.extendleft((None, None))

    def _begin(self, nbytes: int, raw: bytes, at: int) -> int:
        """Start to receive a value with what is there from ``at`` on; return where that ends."""
        place = self._places[0]
        if place is PAIR:
            raise ValueError("a value where a pair is due")
        limit = PLAIN if place is None else LARGEST
        if not 0 <= nbytes <= limit:
            raise ValueError(f"a value of {nbytes} bytes: must be 0 to {limit}")
        self._nbytes, self._skip = nbytes, 0
        if place is None:
            self._value = memoryview(bytearray(nbytes + TAIL))
        elif len(place) == nbytes + TAIL:
            self._value = place
        else:
            self._value, self._skip = memoryview(bytearray(TAIL)), nbytes
        skipped = min(self._skip, len(raw) - at)
        self._skip -= skipped
        at += skipped
        there = raw[at : at + len(self._value)]
        self._value[: len(there)] = there
        self._rest = self._value
        self._take(len(there))
        return at + len(there)

    def _take(self, nbytes: int) -> None:
        """Count bytes of the value that have arrived."""
        assert self._rest is not None
        self._rest = self._rest[nbytes:]
        if self._rest:
            return
        self._rest = None
        if (tail := bytes(self._value[-TAIL:])) != b"\r\n":
            raise ValueError(f"{tail!r} after a value")
        value, self._value = self._value, memoryview(b"")  # forgotten here: its memory is the caller's now
        if (place := self._places[0]) is None:
            self._reply(bytes(value[:-TAIL]))
        else:
            self._reply(Filled.FILLED if value is place else OtherLength(self._nbytes))

    def _reply(self, reply: Reply) -> None:
        if not self._places and isinstance(reply, ResponseError):
            self._farewell = str(reply)
            self._transport.abort()
            return
        self._places.popleft()
        self._replies.append(reply)
        if not self._places and self._answer is not None and not self._answer.done():
            self._answer.set_result(self._replies)
            self._replies = []


def _simple(line: bytes) -> Reply:
    """Return a reply of one line. Raises ValueError if there is no such kind."""
    kind, rest = line[:1], line[1:]
    if kind == b"+":
        return rest
    if kind == b":":
        return int(rest)
    if kind == b"-":
        return ResponseError(printable(rest.decode(errors="replace")))
    if line == b"$-1":
        return None
    raise ValueError(f"a line that begins with {line[:16]!r}")
