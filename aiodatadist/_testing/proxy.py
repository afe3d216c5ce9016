"""A TCP proxy in this event loop that treats connections as badly as it is told."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, TypeVar

import anyio
import anyio.abc
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from aiodatadist._concurrency.signal import Signal
from aiodatadist._testing.toxics import (
    Bandwidth,
    Corrupt,
    Drop,
    Latency,
    LimitData,
    Reorder,
    Repeat,
    ResetPeer,
    Slicer,
    SlowClose,
    Timeout,
    Toxic,
)

Direction = Literal["upstream", "downstream"]
"""The direction of a flow: to the server, or to its client."""

PIECE = 1 << 14
"""Bytes that are read from a connection at a time."""
WAITING = 16
"""Most pieces of one direction that wait in the proxy; then the sender waits, as it would for a slow network."""
RESET = struct.pack("ii", 1, 0)
"""A value of SO_LINGER with which closing a socket resets the connection."""

Piece = tuple[float, bytes]
"""The time when a piece arrived, and its bytes."""
ToxicT = TypeVar("ToxicT", bound=Toxic)


class _CutError(Exception):
    """A toxic ends the connection. ``is_reset``: with RST instead of FIN."""

    def __init__(self, is_reset: bool) -> None:
        super().__init__()
        self.is_reset = is_reset


@dataclass(eq=False)
class _Added:
    toxic: Toxic
    directions: tuple[Direction, ...]


class ChaosProxy:
    """A listener on a free loopback port that connects each client to ``upstream``, under the toxics that are added.

    Example::

        async with ChaosProxy(("127.0.0.1", port)) as proxy:
            ...                                      # link to proxy.address
            with proxy.under(Latency(0.2, jitter=0.1)):
                ...

    Toxics affect open connections as well as new ones, from the next piece on. Heartbeats and messages of a link are
    two connections, which both go through the proxy. The blocks do not: HCCL, or softnpu, moves them.

    Args:
        upstream: host and port of the server.
        seed: of jitter, slices and flipped bits, and of the choice of pieces that are lost, repeated or late.

    Attributes:
        upstream: may be changed if a server comes back elsewhere; new clients are connected there.
        passed: bytes that went through.
    """

    def __init__(self, upstream: tuple[str, int], *, seed: int = 0) -> None:
        self.upstream = upstream
        self.passed: int = 0
        self._chance = random.Random(seed)
        self._added: list[_Added] = []
        self._changed = Signal()
        self._is_down = False
        self._connections: dict[_Connection, None] = {}
        self._stack = AsyncExitStack()
        self._address: tuple[str, int] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """The address on which it listens. Raises RuntimeError if it is not open."""
        if self._address is None:
            raise RuntimeError("this ChaosProxy is not open: use async with")
        return self._address

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    async def __aenter__(self) -> Self:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._stack.callback(listener.close)
        listener.setblocking(False)
        try:
            group = await self._stack.enter_async_context(anyio.create_task_group())
        except BaseException:
            listener.close()
            raise
        self._stack.callback(group.cancel_scope.cancel)
        group.start_soon(self._accept, listener, group)
        self._address = listener.getsockname()[:2]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening, and reset open connections."""
        self._address = None
        await self._stack.__aexit__(kind, error, trace)

    # ---- what it does to connections ----

    def add(self, toxic: Toxic, direction: Direction | None = None) -> None:
        """Add a toxic, to both directions by default. The same may be added twice."""
        directions: tuple[Direction, ...] = ("upstream", "downstream") if direction is None else (direction,)
        self._added.append(_Added(toxic, directions))
        self._changed.wake()

    def remove(self, toxic: Toxic) -> None:
        """Remove a toxic once, if it is there."""
        for each in self._added:
            if each.toxic == toxic:
                self._added.remove(each)
                break
        self._changed.wake()

    @contextmanager
    def under(self, *toxics: Toxic, direction: Direction | None = None) -> Iterator[None]:
        """Add toxics for the duration of the context."""
        for toxic in toxics:
            self.add(toxic, direction)
        try:
            yield
        finally:
            for toxic in toxics:
                self.remove(toxic)

    @contextmanager
    def down(self) -> Iterator[None]:
        """Reset open connections, and new ones as soon as they are made, inside the context."""
        self._is_down = True
        self.reset()
        try:
            yield
        finally:
            self._is_down = False

    def reset(self) -> None:
        """End all open connections with RST."""
        for connection in list(self._connections):
            connection.end(is_reset=True)

    def heal(self) -> None:
        """Remove all toxics."""
        self._added.clear()
        self._changed.wake()

    # ---- for its connections ----

    def find(self, kind: type[ToxicT], direction: Direction) -> ToxicT | None:
        """Return the toxic of this kind that was added last, or None."""
        found = [each.toxic for each in self._added if direction in each.directions and isinstance(each.toxic, kind)]
        return found[-1] if found else None

    async def changed(self) -> None:
        """Wait until toxics are added or removed."""
        await self._changed.wait()

    @property
    def chance(self) -> random.Random:
        """The source of random numbers."""
        return self._chance

    async def _accept(self, listener: socket.socket, group: anyio.abc.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listener)
            client.setblocking(False)
            if self._is_down:
                _close(client, is_reset=True)
            else:
                group.start_soon(self._connect, client)

    async def _connect(self, client: socket.socket) -> None:
        family = socket.AF_INET6 if ":" in self.upstream[0] else socket.AF_INET
        server = socket.socket(family)
        server.setblocking(False)
        connection = _Connection(self, client, server)
        self._connections[connection] = None
        try:
            await connection.run(self.upstream)
        finally:
            del self._connections[connection]
            for each in (client, server):
                _close(each, connection.is_reset)


class _Connection:
    """A client, a server, and two flows between them."""

    def __init__(self, proxy: ChaosProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client, self._server = client, server
        self._scope = anyio.CancelScope()
        self.is_reset = True  # unless both directions end in order

    def end(self, is_reset: bool) -> None:
        """End the connection."""
        self.is_reset = is_reset
        self._scope.cancel()

    async def run(self, upstream: tuple[str, int]) -> None:
        """Connect to the server, and pass bytes until the connection ends."""
        with self._scope:
            try:
                await asyncio.get_running_loop().sock_connect(self._server, upstream)
            except OSError:  # the client sees an RST
                return
            for each in (self._client, self._server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._flow()

    async def _flow(self) -> None:
        async with anyio.create_task_group() as both:
            async with anyio.create_task_group() as flows:
                both.start_soon(self._resetting)
                flows.start_soon(self._pass, Flow(self._proxy, "upstream", self._client, self._server))
                flows.start_soon(self._pass, Flow(self._proxy, "downstream", self._server, self._client))
            self.is_reset = False
            both.cancel_scope.cancel()

    async def _pass(self, flow: Flow) -> None:
        try:
            await flow.run()
        except _CutError as cut:
            self.end(cut.is_reset)
        except OSError:  # one end has gone: the other sees the same
            self.end(is_reset=True)

    async def _resetting(self) -> None:
        """Reset the connection once a ResetPeer has been there for its seconds."""
        while True:
            toxic = self._proxy.find(ResetPeer, "upstream") or self._proxy.find(ResetPeer, "downstream")
            if toxic is None:
                await self._proxy.changed()
                continue
            with anyio.move_on_after(toxic.seconds):
                await self._proxy.changed()
                continue
            self.end(is_reset=True)
            return


class Flow:
    """A direction of a connection."""

    def __init__(self, proxy: ChaosProxy, direction: Direction, source: socket.socket, sink: socket.socket) -> None:
        self._proxy = proxy
        self._direction = direction
        self._source, self._sink = source, sink
        self._limit: tuple[LimitData, int] | None = None
        self._overtaken: list[bytes] = []
        self._sending = anyio.Lock()

    async def run(self) -> None:
        """Pass everything that the source sends. Raises _CutError or OSError if the connection ends."""
        send, receive = anyio.create_memory_object_stream[Piece](WAITING)
        failures: list[Exception] = []
        with send, receive:
            async with anyio.create_task_group() as group:
                group.start_soon(self._read, send, failures, group.cancel_scope)
                group.start_soon(self._write, receive, failures, group.cancel_scope)
                group.start_soon(self._bring_back, failures, group.cancel_scope)
        if failures:
            raise failures[0]

    async def _read(
        self, send: MemoryObjectSendStream[Piece], failures: list[Exception], scope: anyio.CancelScope
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            with send:
                while data := await loop.sock_recv(self._source, PIECE):
                    await send.send((anyio.current_time(), data))
        except OSError as error:
            failures.append(error)
            scope.cancel()

    async def _write(
        self, receive: MemoryObjectReceiveStream[Piece], failures: list[Exception], scope: anyio.CancelScope
    ) -> None:
        try:
            async for arrived, data in receive:
                await self._late(arrived)
                async with self._sending:
                    for piece in self.lost_or_moved(data):
                        await self._on_its_way(piece)
            async with self._sending:
                await self._held_back()
                await self._send_overtaken()
            if (slow := self._find(SlowClose)) is not None:
                await anyio.sleep(slow.seconds)
            with suppress(OSError):  # the sink has already gone
                self._sink.shutdown(socket.SHUT_WR)
        except (OSError, _CutError) as error:
            failures.append(error)
        scope.cancel()

    async def _bring_back(self, failures: list[Exception], scope: anyio.CancelScope) -> None:
        """Send pieces that wait for the next one, once the Reorder is removed."""
        try:
            while True:
                await self._proxy.changed()
                if self._find(Reorder) is None:
                    async with self._sending:
                        await self._send_overtaken()
        except (OSError, _CutError) as error:
            failures.append(error)
            scope.cancel()

    async def _send_overtaken(self) -> None:
        pieces, self._overtaken = self._overtaken, []
        for piece in pieces:
            await self._on_its_way(piece)

    def _find(self, kind: type[ToxicT]) -> ToxicT | None:
        return self._proxy.find(kind, self._direction)

    async def _late(self, arrived: float) -> None:
        if (latency := self._find(Latency)) is not None:
            jitter = self._proxy.chance.uniform(-latency.jitter, latency.jitter)
            await anyio.sleep_until(arrived + max(0.0, latency.seconds + jitter))

    def lost_or_moved(self, data: bytes) -> list[bytes]:
        """Return the pieces that arrive instead of this one, in order."""
        pieces = [] if self._hits(Drop) else [data, data] if self._hits(Repeat) else [data]
        if pieces and not self._overtaken and self._hits(Reorder):
            self._overtaken = pieces
            return []
        behind, self._overtaken = self._overtaken, []
        return pieces + behind

    def _hits(self, kind: type[Corrupt | Drop | Repeat | Reorder]) -> bool:
        toxic = self._find(kind)
        return toxic is not None and self._proxy.chance.random() < toxic.share

    async def _on_its_way(self, data: bytes) -> None:
        while data:
            await self._held_back()
            data = await self._send_slice(data)

    async def _held_back(self) -> None:
        """Wait while there is a Timeout. Raises _CutError after its seconds."""
        while (timeout := self._find(Timeout)) is not None:
            with anyio.move_on_after(timeout.seconds or None):
                await self._proxy.changed()
                continue
            raise _CutError(is_reset=False)

    async def _send_slice(self, data: bytes) -> bytes:
        """Send the first part of the data; return the rest."""
        slicer, bandwidth = self._find(Slicer), self._find(Bandwidth)
        size = len(data)
        if slicer is not None:
            spread = self._proxy.chance.randint(-slicer.variation, slicer.variation)
            size = min(size, slicer.average + spread)
        elif bandwidth is not None:
            size = min(size, max(1, int(bandwidth.bytes_per_second / 100)))
        piece = self._limited(self._corrupted(data[:size]))
        await asyncio.get_running_loop().sock_sendall(self._sink, piece)
        self._proxy.passed += len(piece)
        if len(piece) < size:
            raise _CutError(is_reset=False)
        pause = (slicer.seconds if slicer else 0.0) + (size / bandwidth.bytes_per_second if bandwidth else 0.0)
        if pause:
            await anyio.sleep(pause)
        return data[size:]

    def _corrupted(self, piece: bytes) -> bytes:
        if not self._hits(Corrupt):
            return piece
        number = self._proxy.chance.randrange(8 * len(piece))
        return (int.from_bytes(piece, "little") ^ (1 << number)).to_bytes(len(piece), "little")

    def _limited(self, piece: bytes) -> bytes:
        """Return the part of a piece that may still pass."""
        limit = self._find(LimitData)
        if limit is None:
            self._limit = None
            return piece
        left = self._limit[1] if self._limit is not None and self._limit[0] is limit else limit.nbytes
        self._limit = limit, left - len(piece)
        return piece[: max(left, 0)]


def _close(sock: socket.socket, is_reset: bool) -> None:
    if is_reset:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    sock.close()
