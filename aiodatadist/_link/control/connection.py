"""A connection: a plain socket until the client has said what it is for, then a byte stream or the heartbeats'.

An event loop that reads a socket for its own stream cannot reliably be told to stop. So only the first message of a
connection is read, and no byte more. The socket becomes a stream only if it is not for heartbeats.
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

from aiodatadist._concurrency import forks
from aiodatadist._link.control.delivery import Delivery, UnderWay, keep_alive, under_way
from aiodatadist._link.control.wire import GONE, LAST_LOOK, RECEIVE, UNVERIFIED_BODY, WHOLE_SECONDS, Wire, no_end
from aiodatadist._wire.frames import Decoder, Unknown, encode
from aiodatadist._wire.messages import PLAIN_PROTOCOL, PROTOCOL, SEALED_MINOR, Message
from aiodatadist._wire.reasons import discreet, refusal
from aiodatadist._wire.seals import ByTls, Opener, Sealer
from aiodatadist._wire.tls_pipe import FIRST_BYTE, TlsPipe
from aiodatadist.errors import LinkError, PeerLost

MAX_REST = 8 << 20
"""The most bytes that are read from a broken connection. The kernel rarely holds more."""


async def connected(host: str, port: int, first: bytes = b"") -> socket.socket:
    """Connect a plain socket to an IP address, send ``first``, and return the socket. Raises OSError."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (host, port))
        if sock.getsockname() == sock.getpeername():  # TCP has connected it to itself: nothing listens on that port
            # Closed without a handshake: otherwise a listener would find the port in use for a minute.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        await loop.sock_sendall(sock, first)
    except BaseException:
        sock.close()
        raise
    return sock


class FirstWords:
    """Messages on a plain non-blocking socket, which stays the caller's. Bytes behind a message stay in the socket.

    They cost a fraction of what a stream and a link cost, so a client gets a stream and a link only once it is known. With
    TLS, bytes behind a message are kept here.

    Args:
        protocol: the major version of this end.
    """

    def __init__(self, sock: socket.socket, protocol: int = PROTOCOL) -> None:
        self._sock = sock
        self._decoder = Decoder(UNVERIFIED_BODY, protocol)
        self._seals: tuple[Sealer, Opener] | None = None
        self._pipe: TlsPipe | None = None
        self._unread = b""
        self._is_proved = protocol == PLAIN_PROTOCOL

    async def first_byte(self) -> bytes:
        """Return the client's first byte, which remains part of its first message. Raises PeerLost."""
        self._unread = await self._receive(1)
        if self._unread == FIRST_BYTE:
            self._decoder.minor = SEALED_MINOR
        return self._unread

    async def start_tls(self, pipe: TlsPipe) -> None:
        """Shake hands as a server, and pass all messages through TLS from then on.

        Raises LinkError if either end refuses the other, or the client is gone.
        """
        data, self._unread, self._pipe = self._unread, b"", pipe
        is_complete = pipe.shake(data)
        while not is_complete:
            await self._send(pipe.outgoing())
            is_complete = pipe.shake(await self._from_socket(RECEIVE))
        await self._send(pipe.outgoing())
        self._unread, self._is_proved = pipe.feed(b""), True
        self._decoder.open_with(ByTls.SEALED)

    async def hear(self) -> Message | Unknown:
        """Return the next message.

        Raises:
            PeerLost: if the client is gone.
            ProtocolError: if the received bytes are not a message.
            IncompatiblePeer: if it is of another major version.
        """
        messages = list[Message | Unknown]()
        while not messages:
            messages = self._decoder.feed(await self._receive(self._decoder.wanting))
        self._is_proved |= self._seals is not None
        return messages[0]

    async def _receive(self, most: int) -> bytes:
        """Return at most this number of bytes of messages."""
        while not self._unread:
            if self._pipe is None:
                return await self._from_socket(most)
            self._unread = self._pipe.feed(await self._from_socket(RECEIVE))
            await self._send(self._pipe.outgoing())
            if self._pipe.is_over and not self._unread:
                raise PeerLost(GONE)
        data, self._unread = self._unread[:most], self._unread[most:]
        return data

    async def _from_socket(self, most: int) -> bytes:
        try:
            data = await asyncio.get_running_loop().sock_recv(self._sock, most)
        except OSError as error:
            raise PeerLost(GONE) from error
        if not data:
            raise PeerLost(GONE)
        return data

    async def _send(self, data: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._sock, data)
        except OSError as error:
            raise PeerLost(GONE) from error

    def seal_with(self, sealer: Sealer, opener: Opener) -> None:
        """Seal all messages from now on, and accept only sealed ones. The first one that is heard proves its sender."""
        self._seals = (sealer, opener)
        self._decoder.open_with(opener)

    def _frame(self, message: Message) -> bytes:
        sealer = None if self._seals is None else self._seals[0]
        return encode(message, self._decoder.minor or 0, sealer if self._pipe is None else ByTls.SEALED)

    async def connection(self) -> Connection:
        """Make a stream of the socket, which belongs to it from here on, even if this raises."""
        connection = await Connection.over(self._sock, self._pipe, self._unread)
        connection.seals = self._seals
        return connection

    async def say(self, *messages: Message) -> None:
        """Send messages. Raises PeerLost if the client is gone."""
        data = b"".join(map(self._frame, messages))
        await self._send(data if self._pipe is None else self._pipe.seal(data))

    def refuse(self, error: LinkError) -> None:
        """Tell the client why there is no link, without waiting: the kernel always accepts so little if the client reads.

        What the client has sent is read before the caller closes the socket: otherwise the kernel may discard the refusal.
        """
        if isinstance(error, PeerLost):
            return
        data = self._frame(refusal(error if self._is_proved else discreet(error)))
        if self._pipe is not None:  # before the proof TLS has the reason, if it knows one
            is_open = self._pipe.is_proved and not self._pipe.is_over
            data = self._pipe.seal(data) if is_open else self._pipe.outgoing()
        with contextlib.suppress(OSError):
            self._sock.send(data)
            self._sock.recv(RECEIVE)


class _Reader(asyncio.StreamReader):
    """A reader that still returns what came before the connection broke. It may contain the peer's last word.

    asyncio's own reader discards these bytes. If a write finds the connection broken, they may still be in the kernel.

    Attributes:
        broken: the error that broke the connection.
        hear: called with bytes that come while no others wait to be read. If it returns True, they are not read again.
        pipe: the TLS through which all bytes come, if any.
        wrong: what was wrong with bytes that came through it, or with the network. It ends the stream.
        at_end: called when no more bytes come.
    """

    broken: Exception | None = None
    hear: Callable[[bytes], bool] | None = None
    pipe: TlsPipe | None = None
    wrong: LinkError | None = None
    at_end: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self) -> None:
        super().__init__()
        self._generation = forks.generation
        self._alarm: asyncio.TimerHandle | None = None
        # asyncio changes this buffer in place, and has no public question for how much is in it.
        self._has_unread: Callable[[], int] = self._buffer.__len__  # type: ignore[attr-defined]

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        if self.wrong is not None:  # nothing may come behind the end of the stream
            return
        pipe = self.pipe
        content = bytes(data) if pipe is None else self._opened(pipe, data)  # type: ignore[arg-type]  # bytes, or a view
        if content and (self.hear is None or self._has_unread() or not self.hear(content)):
            super().feed_data(content)
        if pipe is None:
            return
        if self.wrong is not None or pipe.is_over:
            self.feed_eof()
        elif pipe.is_within and self._alarm is None:
            self._wait_for_end_of(pipe, WHOLE_SECONDS)

    def feed_eof(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self.at_end()
        super().feed_eof()

    def _wait_for_end_of(self, pipe: TlsPipe, seconds: float, is_last_look: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self._alarm = loop.call_later(seconds, self._is_time, pipe, pipe.records, is_last_look)

    def _is_time(self, pipe: TlsPipe, records: int, was_last_look: bool) -> None:
        """End the connection if the rest of a record has not come, although this end reads."""
        self._alarm = None
        if not pipe.is_within:
            return
        if pipe.records != records or self._has_unread():
            self._wait_for_end_of(pipe, WHOLE_SECONDS)
        elif not was_last_look:
            self._wait_for_end_of(pipe, LAST_LOOK, is_last_look=True)
        else:
            self.wrong = no_end()
            self.feed_eof()

    def begin_tls(self, pipe: TlsPipe, unread: bytes) -> None:
        """Pass everything through TLS from now on.

        Args:
            unread: bytes of messages that came with the handshake. The peer may have closed its side behind them.
        """
        self.pipe = pipe
        self._buffer.extend(unread)  # type: ignore[attr-defined]  # asyncio's own: see __init__
        if pipe.is_over:
            self.feed_eof()

    def _opened(self, pipe: TlsPipe, data: bytes | memoryview) -> bytes:
        """Decrypt bytes that came over TLS, and return the messages in them. Send what TLS itself answers."""
        if self.wrong is not None:
            return b""
        plain = b""
        try:
            plain = pipe.feed(data)
        except LinkError as error:
            self.wrong = error
        answer = pipe.outgoing()
        if answer and self._transport is not None and not self._transport.is_closing():  # type: ignore[attr-defined]
            self._transport.write(answer)  # type: ignore[attr-defined]  # asyncio's own, as below
        return plain

    def set_exception(self, exc: Exception) -> None:
        self.broken = exc
        self._take_the_rest()
        self.feed_eof()

    def _take_the_rest(self) -> None:
        """Read what the kernel still holds, because the event loop is about to close the socket.

        ``feed_data`` is not used, because it would pause the transport. A forked child reads nothing: the bytes are the
        parent's.
        """
        if self._generation != forks.generation:
            return
        transport = getattr(self, "_transport", None)  # set by asyncio, and never cleared
        sock = None if transport is None else transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            while sock is not None and self._has_unread() < MAX_REST and (data := os.read(sock.fileno(), RECEIVE)):
                self._buffer.extend(data if self.pipe is None else self._opened(self.pipe, data))  # type: ignore[attr-defined]  # asyncio's own: see __init__


TCP_INFO_BYTES = 256
"""More than any kernel's ``struct tcp_info``: the kernel returns what it has."""
LAST_DATA_RECEIVED = 52
"""The offset of ``tcpi_last_data_recv`` in the kernel's ``struct tcp_info``: milliseconds since data came."""


def seconds_since_data(sock: socket.socket) -> float | None:
    """Return how many seconds ago the kernel last received bytes of the peer.

    None if the socket is not TCP, or is closed. Acknowledgements do not count: the kernel of a stopped process continues to
    send them.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    except OSError:
        return None
    if len(info) < LAST_DATA_RECEIVED + 4:
        return None
    return float(struct.unpack_from("I", info, LAST_DATA_RECEIVED)[0]) / 1000


class _Space(threading.local):
    """The memory that a thread's event loop reads into. It is free again at the end of the same call."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(RECEIVE))


_space = _Space()


class _Protocol(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """asyncio's own protocol, except that it reads into memory that is already allocated.

    For an unbuffered protocol asyncio allocates and frees 256 KiB for each message, which the kernel maps and unmaps: a third
    of the cost of a question and its answer. uvloop has its own buffer, and calls ``data_received``.
    """

    def get_buffer(self, sizehint: int) -> memoryview:
        return _space.view

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(_space.view[:nbytes])  # type: ignore[arg-type]  # which copies it


class Connection(anyio.abc.ByteStream):
    """A connected socket as a byte stream. The stream of a client starts behind its first message.

    Attributes:
        place: the address and port of the other end.
        seals: what seals and checks messages, if that was agreed before there was a stream.
    """

    def __init__(self, reader: _Reader, writer: asyncio.StreamWriter, pipe: TlsPipe | None = None) -> None:
        self._reader = reader
        self._pipe = reader.pipe = pipe
        self._writer = writer
        self._may_hold_more = False
        self.seals: tuple[Sealer, Opener] | None = None
        place = writer.get_extra_info("peername")  # None if the other end has closed already; a str for a Unix socket
        self.place: tuple[str, int] = place[:2] if isinstance(place, tuple) else ("", 0)
        writer.transport.set_write_buffer_limits(0)  # so that drain() waits until the kernel has accepted everything
        self._delivery = Delivery(self._under_way, self._is_swallowed)
        reader.at_end = self._delivery.end

    @classmethod
    async def over(cls, sock: socket.socket, pipe: TlsPipe | None = None, unread: bytes = b"") -> Self:
        """Make a stream over a socket. The stream owns the socket from here on, even if this raises.

        Args:
            pipe: TLS whose handshake is complete.
            unread: bytes of messages that came through it already.
        """
        loop, reader = asyncio.get_running_loop(), _Reader()
        protocol = _Protocol(reader)
        try:
            # Without TCP_NODELAY a message waits for the acknowledgement of the one before, up to 40 ms. asyncio sets it only
            # for sockets created with an explicit protocol number.
            if sock.family in {socket.AF_INET, socket.AF_INET6}:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(sock)
            reader.feed_data(unread)
            reader.pipe = pipe  # before the loop reads from the socket
            transport, _ = await loop.create_connection(lambda: protocol, sock=sock)
            return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop), pipe)
        except BaseException:
            sock.close()
            raise

    def wire(self) -> Wire:
        """Return a wire that carries messages over this connection."""
        wire = Wire(self, self.send_at_once)
        if self._pipe is not None:
            wire.has_proved()
        self._reader.hear = wire.hear
        if self.seals is not None:
            wire.seal_with(*self.seals)
        return wire

    def quiet_seconds(self) -> float | None:
        """Return how many seconds ago the kernel last received bytes of the peer, read or not; None if that is not known."""
        sock = self._socket()
        return None if sock is None else seconds_since_data(sock)

    def allow_silence(self, seconds: float) -> None:
        """Do not end the connection sooner than heartbeats would end the link if the network delivers nothing."""
        self._delivery.patience = max(self._delivery.patience, seconds)

    def _socket(self) -> socket.socket | None:
        transport = self._writer.transport
        return None if transport.is_closing() else transport.get_extra_info("socket")

    def _under_way(self) -> UnderWay | None:
        sock = self._socket()
        return None if sock is None else under_way(sock)

    def _is_swallowed(self) -> None:
        """End the connection: what was sent does not arrive."""
        self._reader.wrong = PeerLost(
            f"the network does not deliver messages: none was acknowledged for {self._delivery.patience:g} s, though "
            "heartbeats may come (does a firewall or NAT forget connections, or is the MTU of a route too small?)"
        )
        self._reader.feed_eof()

    async def receive(self, max_bytes: int = RECEIVE) -> bytes:
        """Receive bytes.

        Raises:
            EndOfStream, BrokenResourceError: if no more will come.
            LinkError: if TLS refused the bytes, or carried the peer's refusal.
        """
        if self._may_hold_more:  # then reading does not wait, and a peer that sends much would hold up the loop
            await anyio.lowlevel.checkpoint()
        data = await self._reader.read(max_bytes)
        if not data:
            if self._reader.wrong is not None:
                raise self._reader.wrong
            if self._reader.broken is not None:
                raise anyio.BrokenResourceError from self._reader.broken
            raise anyio.EndOfStream
        self._may_hold_more = len(data) == max_bytes
        return data

    async def send(self, item: bytes) -> None:
        """Send bytes, and wait until the kernel has accepted them. Raises BrokenResourceError."""
        pipe = self._pipe
        if self._writer.transport.is_closing() or (pipe is not None and pipe.is_over):
            raise anyio.BrokenResourceError
        self._writer.write(item if pipe is None else pipe.seal(item))
        if self._delivery.is_due:
            self._delivery.sent()
        try:
            await self._writer.drain()
        except OSError as error:
            raise anyio.BrokenResourceError from error

    def send_at_once(self, data: bytes) -> bool:
        """Send without waiting, and return True.

        Return False, and send nothing, if the kernel has not accepted earlier bytes, or if the connection is closing.
        """
        transport, pipe = self._writer.transport, self._pipe
        if transport.is_closing() or (pipe is not None and pipe.is_over) or transport.get_write_buffer_size():
            return False
        transport.write(data if pipe is None else pipe.seal(data))
        if self._delivery.is_due:
            self._delivery.sent()
        return True

    async def start_tls(self, pipe: TlsPipe) -> None:
        """Shake hands as a client, and pass everything through TLS from then on. No other task may use it meanwhile.

        Raises:
            LinkError: if either end refuses the other, or the peer is gone.
        """
        is_complete = pipe.shake()
        try:
            while not is_complete:
                await self.send(pipe.outgoing())
                is_complete = pipe.shake(await self.receive())
            unread = pipe.feed(b"")
            last = pipe.outgoing()
            self._pipe = pipe
            self._reader.begin_tls(pipe, unread)  # before anything else can come
            self._writer.write(last)
        except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
            raise PeerLost(GONE) from error
        except LinkError:
            with contextlib.suppress(anyio.BrokenResourceError):
                await self.send(pipe.outgoing())  # the reason, as an alert
            raise

    async def send_eof(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    async def aclose(self) -> None:
        """Close the connection at once. Bytes that are still buffered are dropped."""
        # not close(), which waits until the peer has read everything, or for ever
        self._writer.transport.abort()
        await anyio.lowlevel.checkpoint()
