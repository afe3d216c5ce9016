"""A connection: a plain socket until the client said what it is for, then a byte stream or the heartbeats'.

An event loop that once reads a socket for a stream of its own cannot be told reliably to stop. So it reads the first
message of a connection and no byte more, and only what is not for heartbeats becomes a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Self, SupportsIndex

import anyio
import anyio.abc
import anyio.lowlevel

from aiodatadist.concurrency import forks
from aiodatadist.errors import LinkError, PeerLost
from aiodatadist.link.wire import GONE, RECEIVE, UNVERIFIED_BODY, Wire
from aiodatadist.wire.frames import Decoder, Unknown, encode
from aiodatadist.wire.handshake import refusal
from aiodatadist.wire.messages import Message

MAX_REST = 8 << 20
"""Bytes that are read of a connection that broke: no more than the kernel holds, usually."""


async def connected(host: str, port: int, first: bytes = b"") -> socket.socket:
    """A plain socket that is connected to an IP address, and has sent this. Raises OSError."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (host, port))
        if sock.getsockname() == sock.getpeername():  # TCP has let it meet itself: nothing listens on that port
            # Closed without a word, or what wants to listen there would find the port in use for a minute.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        await loop.sock_sendall(sock, first)
    except BaseException:
        sock.close()
        raise
    return sock


class FirstWords:
    """Messages on a plain non-blocking socket, which stays the caller's. What is behind a message stays in the socket, too.

    They cost a fraction of what a stream and a link do, so a client gets those when it is known.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = Decoder(UNVERIFIED_BODY)

    async def hear(self) -> Message | Unknown:
        """Return the next message.

        Raises:
            PeerLost: if the client is gone.
            ProtocolError: if what came is no message.
            IncompatiblePeer: if it is of another major version.
        """
        loop, messages = asyncio.get_running_loop(), list[Message | Unknown]()
        try:
            while not messages:
                data = await loop.sock_recv(self._sock, self._decoder.wanting)
                if not data:
                    raise PeerLost(GONE)
                messages = self._decoder.feed(data)
        except LinkError:  # which is an OSError, too
            raise
        except OSError as error:
            raise PeerLost(GONE) from error
        return messages[0]

    async def say(self, *messages: Message) -> None:
        """Send messages. Raises PeerLost if the client is gone."""
        data = b"".join(encode(message, self._decoder.minor or 0) for message in messages)
        try:
            await asyncio.get_running_loop().sock_sendall(self._sock, data)
        except OSError as error:
            raise PeerLost(GONE) from error

    def refuse(self, error: LinkError) -> None:
        """Tell the client why there is no link, if the kernel takes that now: it keeps so little for a client that reads.

        The rest is read before the caller closes: the kernel throws away what was sent if something received was not read.
        """
        if isinstance(error, PeerLost):
            return
        with contextlib.suppress(OSError):
            self._sock.send(encode(refusal(error), self._decoder.minor or 0))
            self._sock.recv(RECEIVE)


class _Reader(asyncio.StreamReader):
    """Gives what came before the connection broke, which asyncio's own forgets: the peer's last word may be in it. Where a
    write finds out that it broke, that word may still be in the kernel.

    Attributes:
        hear: is shown what comes while nothing is to be read; what it answers True to is not read.
    """

    broken: Exception | None = None
    hear: Callable[[bytes], bool] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._generation = forks.generation
        # asyncio changes this buffer in place, and has no public question for how much is in it.
        self._has_unread: Callable[[], int] = self._buffer.__len__  # type: ignore[attr-defined]

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        if self.hear is None or self._has_unread() or not self.hear(bytes(data)):
            super().feed_data(data)

    def set_exception(self, exc: Exception) -> None:
        self.broken = exc
        self._take_the_rest()
        self.feed_eof()

    def _take_the_rest(self) -> None:
        """Nothing more comes, and the event loop is about to close the socket. (It would be paused in feed_data.) In a forked
        child it is the parent's to read."""
        if self._generation != forks.generation:
            return
        transport = getattr(self, "_transport", None)  # asyncio's, which it never takes away
        sock = None if transport is None else transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            while sock is not None and self._has_unread() < MAX_REST and (data := os.read(sock.fileno(), RECEIVE)):
                self._buffer.extend(data)  # type: ignore[attr-defined]  # asyncio's own: see __init__


TCP_INFO_BYTES = 256
LAST_DATA_RECEIVED = 52
"""Where the kernel's ``struct tcp_info`` has the milliseconds since data came (``tcpi_last_data_recv``)."""


def seconds_since_data(sock: socket.socket) -> float | None:
    """Return how long ago the kernel received bytes of the peer; None if it does not know: not TCP, or closed.

    Acknowledgements do not count: the kernel of a stopped process goes on sending them.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    except OSError:
        return None
    if len(info) < LAST_DATA_RECEIVED + 4:
        return None
    return float(struct.unpack_from("I", info, LAST_DATA_RECEIVED)[0]) / 1000


class _Space(threading.local):
    """What a thread's event loop reads into: each time it is taken out of it in the same call."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(RECEIVE))


_space = _Space()


class _Protocol(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """asyncio's own, read into memory that is there. For another protocol asyncio takes 256 KiB for each message and gives
    them back, which the kernel maps and unmaps: that is a third of what a question and its answer cost. (uvloop has a buffer
    of its own, and calls ``data_received``.)"""

    def get_buffer(self, sizehint: int) -> memoryview:
        return _space.view

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(_space.view[:nbytes])  # type: ignore[arg-type]  # it is copied there


class Connection(anyio.abc.ByteStream):
    """A connected socket as a byte stream; of a client's, what is behind its first message.

    Attributes:
        place: address and port of the other end.
    """

    def __init__(self, reader: _Reader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._may_hold_more = False
        place = writer.get_extra_info("peername")  # None if the other end is gone already; a text over a Unix socket
        self.place: tuple[str, int] = place[:2] if isinstance(place, tuple) else ("", 0)
        writer.transport.set_write_buffer_limits(0)  # sent is what the kernel has

    @classmethod
    async def over(cls, sock: socket.socket) -> Self:
        """The socket is the stream's from here on, whatever is raised."""
        loop, reader = asyncio.get_running_loop(), _Reader()
        protocol = _Protocol(reader)
        try:
            # A message waits for no acknowledgement of the one before, which the kernel may put off for 40 ms. asyncio sets
            # this only where a socket was made with the protocol's number.
            if sock.family in {socket.AF_INET, socket.AF_INET6}:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            transport, _ = await loop.create_connection(lambda: protocol, sock=sock)
            return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        except BaseException:
            sock.close()
            raise

    def wire(self) -> Wire:
        """Messages over it."""
        wire = Wire(self, self.send_at_once)
        self._reader.hear = wire.hear
        return wire

    def quiet_seconds(self) -> float | None:
        """How long ago bytes of the peer came, also those that the event loop has not read yet. None: not known."""
        transport = self._writer.transport
        sock = None if transport.is_closing() else transport.get_extra_info("socket")
        return None if sock is None else seconds_since_data(sock)

    async def receive(self, max_bytes: int = RECEIVE) -> bytes:
        """Raises EndOfStream, BrokenResourceError."""
        if self._may_hold_more:  # then reading does not wait, and a peer that sends much would keep the loop
            await anyio.lowlevel.checkpoint()
        data = await self._reader.read(max_bytes)
        if not data:
            if self._reader.broken is not None:
                raise anyio.BrokenResourceError from self._reader.broken
            raise anyio.EndOfStream
        self._may_hold_more = len(data) == max_bytes
        return data

    async def send(self, item: bytes) -> None:
        """Until the kernel has it. Raises BrokenResourceError."""
        if self._writer.transport.is_closing():
            raise anyio.BrokenResourceError
        self._writer.write(item)
        try:
            await self._writer.drain()
        except OSError as error:
            raise anyio.BrokenResourceError from error

    def send_at_once(self, data: bytes) -> bool:
        """Whether it is on its way: not behind something that the kernel has not taken, nor when the connection is over."""
        transport = self._writer.transport
        if transport.is_closing() or transport.get_write_buffer_size():
            return False
        transport.write(data)
        return True

    async def send_eof(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    async def aclose(self) -> None:
        """At once: what was not sent by now is dropped."""
        self._writer.transport.abort()
        await anyio.lowlevel.checkpoint()
