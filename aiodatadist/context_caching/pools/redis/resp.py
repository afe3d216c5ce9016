"""Redis's protocol (RESP 2) on a connection that stands: values go from and into memory given to it, with no copy on the way.

redis-py copies a value five times between socket and caller, which costs more than all else that a load does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Final, NamedTuple, TypeAlias, cast

import anyio.lowlevel

from aiodatadist.context_caching.pools.buffers import TAIL, Buffer
from aiodatadist.values.foreign import printable

LARGEST: Final = 512 << 20
"""Bytes that a value may have (``proto-max-bulk-len``)."""
PLAIN: Final = 16 << 20
"""Bytes that a reply may have for which the request had no memory: what a server says of itself."""
SCRATCH: Final = 1 << 16
"""Bytes for replies of one line, for what stands in front of a value, and for a value that is not wanted."""
SLICE: Final = 1 << 20
"""Bytes that the transport gets at a time, and the loop is kept for."""
KINDS: Final = b"+-:$"
"""First bytes of a reply."""
SMALL: Final = 1 << 12
"""Bytes up to which a piece is copied next to the others, instead of being sent from where it is."""


class NotRedis(ConnectionError):
    """What came is not Redis's protocol. The connection is closed."""


class Filled(Enum):
    """The reply is in the memory that the request had for it."""

    FILLED = "filled"


class OtherLength(NamedTuple):
    """The reply is a value of another length than the memory that the request had for it. Its bytes are gone."""

    nbytes: int


class ResponseError(Exception):
    """The server's refusal, in its own words, as far as they are printable and short."""


class Request(NamedTuple):
    """A command.

    Attributes:
        pieces: as it is sent.
        key: that it is about, if any: a cluster routes by it.
        into: memory for a value and the end of line behind it. Of a value of another length nothing is kept.
        has_value: one goes with it, or comes back: it may take as long as that.
    """

    pieces: Sequence[bytes | memoryview]
    key: bytes = b""
    into: memoryview | None = None
    has_value: bool = False


Reply: TypeAlias = bytes | int | ResponseError | Filled | OtherLength | None


def words(*texts: str | int | bytes) -> bytes:
    """Arguments of a command."""
    raw = (text if isinstance(text, bytes) else str(text).encode() for text in texts)
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)


def request(*texts: str | int, into: memoryview | None = None) -> Request:
    """A command as one would type it; the second word is its key."""
    key = str(texts[1]).encode() if len(texts) > 1 else b""
    return Request([b"*%d\r\n%b" % (len(texts), words(*texts))], key, into, into is not None)


def keyed(command: str) -> Callable[[str], Request]:
    """What makes ``command name`` of a name: for very many of them."""
    head = b"*2\r\n" + words(command)

    def about(name: str) -> Request:
        key = name.encode()
        return Request([b"%b$%d\r\n%b\r\n" % (head, len(key), key)], key)

    return about


def reading(name: str, buffer: Buffer) -> Request:
    """``GETRANGE name 0 n``: of a value that is too long, one byte more than there is room for."""
    key, last = name.encode(), b"%d" % buffer.nbytes
    command = b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n$1\r\n0\r\n$%d\r\n%b\r\n" % (len(key), key, len(last), last)
    return Request([command], key, buffer.with_tail(), has_value=True)


def storing(name: str, buffer: Buffer) -> Request:
    """``SET name value NX``: in one piece, if the name is not so long that it has no room in front of the value."""
    key = name.encode()
    head = b"*4\r\n%b$%d\r\n" % (words("SET", key), buffer.nbytes)
    tail = b"\r\n" + words("NX")
    whole = buffer.framed(head, tail)
    return Request([head, buffer.view(), tail] if whole is None else [whole], key, has_value=True)


def packed(requests: Sequence[Request]) -> Iterator[bytes | bytearray | memoryview]:
    """What is sent: what is large where it is, all else together."""
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


class Exchange(asyncio.BufferedProtocol):
    """Asks, and reads the answers; one caller at a time. Its transport's protocol from the beginning.

    Raises:
        ConnectionError: from every call, once the connection is lost.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._room: asyncio.Future[None] | None = None  # of a writer that waits for the socket
        self._answer: asyncio.Future[list[Reply]] | None = None
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._places: deque[memoryview | None] = deque()  # of the replies that are still to come
        self._replies: list[Reply] = []
        self._scratch = memoryview(bytearray(SCRATCH))
        self._farewell = ""  # what the server said before it was asked anything: then it closes the connection
        self._have = 0  # bytes in it that were not looked at
        self._nbytes = 0  # of the value that is coming in
        self._skip = 0  # of these, still to come and not wanted
        self._value = memoryview(b"")  # what is wanted of it, with its tail
        self._rest: memoryview | None = None  # of it

    async def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """Send, and wait for as many replies. Cancelled, it has to be dropped, since what was still to come is not read."""
        if self._lost.done():
            raise ConnectionResetError(self._farewell or "the connection was lost")
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
                waiting.exception()  # only one of them has a waiter

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
        """Take replies off the front of the scratch memory, and leave what is not whole yet."""
        raw = bytes(self._scratch[: self._have])
        at = 0
        if raw[0] not in KINDS:  # an alert of TLS, for instance, in which no line may ever end
            raise ValueError(f"a line that begins with {raw[:16]!r}")
        while self._rest is None and (end := raw.find(b"\r\n", at)) >= 0:
            line, at = raw[at:end], end + 2
            if line[:1] != b"$" or line == b"$-1":
                self._reply(_simple(line))
                continue
            at = self._begin(int(line[1:]), raw, at)
        if self._rest is None and at == 0 and len(raw) == SCRATCH:
            raise ValueError(f"a line of more than {SCRATCH} bytes")
        self._have = len(raw) - at
        self._scratch[: self._have] = raw[at:]

    def _begin(self, nbytes: int, raw: bytes, at: int) -> int:
        """A value of that length comes in, as much of it as is there from ``at`` on; where that ends."""
        place = self._places[0]
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
        """So many more bytes of the value are there."""
        assert self._rest is not None
        self._rest = self._rest[nbytes:]
        if self._rest:
            return
        self._rest = None
        if (tail := bytes(self._value[-TAIL:])) != b"\r\n":
            raise ValueError(f"{tail!r} behind a value")
        value, self._value = self._value, memoryview(b"")  # its memory is used elsewhere now
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
    """A reply of one line. Raises ValueError: there is no such kind."""
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
