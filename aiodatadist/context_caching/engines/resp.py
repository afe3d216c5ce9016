"""Redis's protocol (RESP 2) on a connection that stands: values go from and into memory of ours, with no copy on the way.

redis-py copies a value five times between socket and caller, which costs more than all else that a load does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

import anyio.lowlevel

from aiodatadist.context_caching.engines.buffers import TAIL, Buffer

LARGEST: Final = 512 << 20
"""Bytes that a value may have (``proto-max-bulk-len``)."""
SCRATCH: Final = 1 << 16
"""Bytes for replies without a place of their own, and for what stands in front of a value."""
SLICE: Final = 1 << 20
"""Bytes that the transport gets at a time, and the loop is kept for."""
SMALL: Final = 1 << 12
"""Bytes up to which a piece is copied next to the others, instead of being sent from where it is."""


class Filled(Enum):
    """The reply is in the memory that the request had for it."""

    FILLED = "filled"


class ResponseError(Exception):
    """The server's refusal, in its own words."""


class Request(NamedTuple):
    """A command.

    Attributes:
        pieces: as it is sent.
        key: that it is about, if any: a cluster routes by it.
        into: memory for a value and the end of line behind it. A reply that is not a value of exactly that
            length is an object of its own.
    """

    pieces: Sequence[bytes | memoryview]
    key: bytes = b""
    into: memoryview | None = None


Reply: TypeAlias = bytes | int | ResponseError | Filled | None


def words(*texts: str | int | bytes) -> bytes:
    """Arguments of a command."""
    raw = (text if isinstance(text, bytes) else str(text).encode() for text in texts)
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)


def request(*texts: str | int, into: memoryview | None = None) -> Request:
    """A command as one would type it; the second word is its key."""
    key = str(texts[1]).encode() if len(texts) > 1 else b""
    return Request([b"*%d\r\n%b" % (len(texts), words(*texts))], key, into)


def storing(name: str, buffer: Buffer) -> Request:
    """``SET name value NX``: in one piece, if the name is not so long that it has no room in front of the value."""
    key = name.encode()
    head = b"*4\r\n%b$%d\r\n" % (words("SET", key), buffer.nbytes)
    tail = b"\r\n" + words("NX")
    whole = buffer.framed(head, tail)
    return Request([head, buffer.view(), tail] if whole is None else [whole], key)


def packed(requests: Sequence[Request]) -> Iterator[bytes | bytearray | memoryview]:
    """What is sent: what is large where it is, all else together."""
    small = bytearray()
    for pieces, _, _ in requests:
        for piece in pieces:
            if len(piece) > SMALL:
                if small:
                    yield small
                    small = bytearray()
                yield piece
            else:
                small += piece
    if small:
        yield small


class Exchange(asyncio.BufferedProtocol):
    """Asks, and reads the answers. It takes the transport over from whoever connected it; one caller at a time.

    Raises:
        ConnectionError: from every call, once the connection is lost.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._room: asyncio.Future[None] | None = None  # of a writer that waits for the socket
        self._answer: asyncio.Future[list[Reply]] | None = None
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._places: deque[memoryview | None] = deque()  # of the replies that are still to come
        self._replies: list[Reply] = []
        self._scratch = memoryview(bytearray(SCRATCH))
        self._have = 0  # bytes in it that were not looked at
        self._value = memoryview(b"")  # that is coming in, with its tail
        self._rest: memoryview | None = None  # of it
        transport.set_write_buffer_limits(
            high=1, low=0
        )  # with 0, asyncio's TLS would take an empty buffer for a full one
        transport.set_protocol(self)

    async def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """Send, and wait for as many replies. Cancelled, it has to be dropped, since nobody reads what was still to come."""
        if self._lost.done():
            raise ConnectionResetError("the connection was lost")
        self._places.extend(asked.into for asked in requests)
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
            if start:  # others want the loop, too
                await anyio.lowlevel.checkpoint()
            if self._lost.done():  # the answer says why
                return
            self._transport.write(piece[start : start + SLICE])
            if self._room is not None:
                await self._room

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    def drop(self) -> None:
        """Close it at once. No byte is read or sent any more."""
        if not self._lost.done():
            self._transport.abort()

    async def closed(self) -> None:
        """Wait until its socket is closed."""
        await asyncio.wait([self._lost])

    # ---- what the transport calls ----

    def pause_writing(self) -> None:
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def eof_received(self) -> None:
        self._transport.abort()  # asyncio would first send what is buffered, to nobody

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._lost.done():
            self._lost.set_result(None)
        for waiting in (self._room, self._answer):
            if waiting is not None and not waiting.done():
                waiting.set_exception(exc or ConnectionResetError("the server closed the connection"))
                waiting.exception()  # only one of them has a waiter

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rest if self._rest is not None else self._scratch[self._have :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._rest is None:
                self._have += nbytes
                self._parse()
            else:
                self._take(nbytes)
        except (ValueError, IndexError) as error:
            self._transport.abort()
            self.connection_lost(ConnectionError(f"not Redis's protocol: {error}"))

    def _parse(self) -> None:
        """Take replies off the front of the scratch memory, and leave what is not whole yet."""
        raw = bytes(self._scratch[: self._have])
        at = 0
        while self._rest is None and (end := raw.find(b"\r\n", at)) >= 0:
            line, at = raw[at:end], end + 2
            if line[:1] != b"$" or line == b"$-1":
                self._reply(_simple(line))
                continue
            place = self._places[0]
            self._value = place if place is not None and len(place) == int(line[1:]) + TAIL else _memory(int(line[1:]))
            self._rest = self._value
            there = raw[at : at + len(self._value)]
            self._rest[: len(there)] = there
            at += len(there)
            self._take(len(there))
        if self._rest is None and at == 0 and len(raw) == SCRATCH:
            raise ValueError(f"a line of more than {SCRATCH} bytes")
        self._have = len(raw) - at
        self._scratch[: self._have] = raw[at:]

    def _take(self, nbytes: int) -> None:
        """So many more bytes of the value are there."""
        assert self._rest is not None
        self._rest = self._rest[nbytes:]
        if self._rest:
            return
        self._rest = None
        if (tail := bytes(self._value[-TAIL:])) != b"\r\n":
            raise ValueError(f"{tail!r} behind a value")
        value, self._value = self._value, memoryview(b"")  # its memory is somebody else's now
        self._reply(Filled.FILLED if value is self._places[0] else bytes(value[:-TAIL]))

    def _reply(self, reply: Reply) -> None:
        self._places.popleft()
        self._replies.append(reply)
        if not self._places and self._answer is not None and not self._answer.done():
            self._answer.set_result(self._replies)
            self._replies = []


def _memory(nbytes: int) -> memoryview:
    """For a value. Raises ValueError: no value has such a length."""
    if not 0 <= nbytes <= LARGEST:
        raise ValueError(f"a value of {nbytes} bytes")
    return memoryview(bytearray(nbytes + TAIL))


def _simple(line: bytes) -> Reply:
    """A reply of one line. Raises ValueError: there is no such kind."""
    kind, rest = line[:1], line[1:]
    if kind == b"+":
        return rest
    if kind == b":":
        return int(rest)
    if kind == b"-":
        return ResponseError(rest.decode(errors="replace"))
    if line == b"$-1":
        return None
    raise ValueError(f"a line that begins with {line[:16]!r}")
