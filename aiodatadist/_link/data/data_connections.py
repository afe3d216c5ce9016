"""The data connections of a link's channel: TCP connections that carry bytes, outside the link's own connection.

The end that dialled the link dials them, at the address that it used, all at the same time. ``data_proof`` says what both
ends prove. The first message of a connection is its proof, so it counts among those without a proof only until then.

Who owns what
    A cluster has one :class:`DataConnections`. A link that waits for data connections is in it from before the peer may dial
    until its handshake has ended. A socket belongs to the one who made it until :meth:`AwaitedConnections.take`, and then to
    the channel that waits. ``open`` passes all of them to the transport, or closes them.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio

from aiodatadist._concurrency.signal import Signal
from aiodatadist._link.control.connection import FirstWords, connected
from aiodatadist._transport import DataConnection, OpenSockets
from aiodatadist._values.addresses import host_port
from aiodatadist._wire.data_proof import ChannelKey
from aiodatadist._wire.frames import encode
from aiodatadist._wire.messages import AttachData, Refuse
from aiodatadist._wire.reasons import refused
from aiodatadist.errors import LinkError, LinkTimeout, ProtocolError, explained

UNEXPECTED: Final = "a data connection came for a channel that does not wait for it"
_NONCE: Final = 32


class AwaitedConnections:
    """The data connections of one channel, at the end that is dialled. Each index comes once.

    Args:
        count: the number of connections that the channel may have.
        plain: True if this end lets the bytes travel without seals.
    """

    def __init__(self, key: ChannelKey, count: int, plain: bool) -> None:
        self._key = key
        self._count = count
        self._plain = plain
        self._came: dict[int, DataConnection | None] = {}  # None until its socket is here
        self._changed = Signal()
        self._is_over = False

    def answer(self, asked: AttachData) -> AttachData:
        """Return the answer to a client that has proved the key. No other may have the same index from here on.

        Raises:
            AuthError: if it proves nothing.
            LinkError: if the index is not one of the channel's, or has come before.
        """
        self._key.check(asked)
        if asked.index >= self._count:
            raise LinkError(f"data connection {asked.index} came: the channel has {self._count}")
        if asked.index in self._came:
            raise LinkError(f"data connection {asked.index} came twice")
        self._came[asked.index] = None
        return self._key.answer(asked, secrets.token_hex(_NONCE), self._plain)

    def take(self, sock: socket.socket, asked: AttachData, answered: AttachData) -> None:
        """Take the socket of a client that was answered. It is closed if the channel waits no longer."""
        if self._is_over:
            sock.close()
            return
        sock.setblocking(False)
        self._came[asked.index] = DataConnection(sock, self._key.seals(asked, answered, "server"))
        self._changed.wake()

    async def open(self, count: int, seconds: float) -> list[DataConnection]:
        """Wait for this number of connections, and return them in the order of their indexes.

        Raises LinkTimeout if they do not come in time. Those that came are closed, as at a cancellation.
        """
        try:
            with anyio.move_on_after(seconds):
                while len(came := self._here(count)) < count:
                    await self._changed.wait()
                for index in range(count):
                    del self._came[index]
                return came
            raise LinkTimeout(f"{len(self._here(count))} of {count} data connections came within {seconds:g} s")
        finally:
            self.close()

    def _here(self, count: int) -> list[DataConnection]:
        return [came for index in range(count) if (came := self._came.get(index)) is not None]

    def close(self) -> None:
        """Accept nothing more, and close what came."""
        self._is_over = True
        for came in self._came.values():
            if came is not None:
                came.sock.close()
        self._came.clear()


class Losses:
    """Connections of a link's channels that ended although the channel was open.

    Attributes:
        on_loss: called with the reason for each. The session sets it. Before the link is made, :meth:`check` tells.
    """

    def __init__(self) -> None:
        self.on_loss: Callable[[str], object] = lambda _: None
        self._first = ""

    def report(self, why: str) -> None:
        """Note that a connection has ended."""
        self._first = self._first or why
        self.on_loss(why)

    def check(self) -> None:
        """Raise LinkError if a connection has ended already."""
        if self._first:
            raise LinkError(self._first)


class DataConnections:
    """The channels of a cluster that wait for data connections, on its event loop. ``len()`` is their number."""

    def __init__(self) -> None:
        self._awaited: dict[str, AwaitedConnections] = {}

    def __len__(self) -> int:
        return len(self._awaited)

    @contextmanager
    def expected(self, key: ChannelKey, count: int, plain: bool) -> Iterator[OpenSockets]:
        """Accept the data connections of a channel inside this context. Its value waits for them."""
        awaited = self._awaited[key.name] = AwaitedConnections(key, count, plain)

        async def open_sockets(count: int, seconds: float) -> list[DataConnection]:
            try:
                return await awaited.open(count, seconds)
            finally:
                self._awaited.pop(key.name, None)

        try:
            yield open_sockets
        finally:
            self._awaited.pop(key.name, None)
            awaited.close()

    def awaited(self, asked: AttachData) -> AwaitedConnections:
        """Return the channel for which a connection comes. Raises LinkError if none waits for it."""
        awaited = self._awaited.get(asked.channel)
        if awaited is None:
            raise LinkError(UNEXPECTED)
        return awaited


def dialling(address: tuple[str, int], key: ChannelKey, plain: bool) -> OpenSockets:
    """Return what dials the data connections of a channel.

    Args:
        plain: True if this end lets the bytes travel without seals.
    """

    async def open_sockets(count: int, seconds: float) -> list[DataConnection]:
        made: dict[int, DataConnection] = {}
        failure: LinkError | None = None

        async def make(index: int) -> None:
            nonlocal failure
            try:
                made[index] = await _dial(address, key, index, plain)
            except LinkError as error:  # raised below: the task group would wrap it in an ExceptionGroup
                failure = failure or error
                group.cancel_scope.cancel()

        try:
            with anyio.move_on_after(seconds):
                async with anyio.create_task_group() as group:
                    for index in range(count):
                        group.start_soon(make, index)
            if failure is not None:
                raise failure
            if len(made) < count:
                words = f"accepted {len(made)} of {count} data connections within {seconds:g} s"
                raise LinkTimeout(f"{host_port(*address)} {words}")
        except BaseException:
            for each in made.values():
                each.sock.close()
            raise
        return [made[index] for index in range(count)]

    return open_sockets


async def _dial(address: tuple[str, int], key: ChannelKey, index: int, plain: bool) -> DataConnection:
    """Make one data connection. Raises LinkError if the other end does not accept it, or is not that of the link."""
    asked = key.ask(index, secrets.token_hex(_NONCE), plain)
    try:
        sock = await connected(*address, encode(asked))
    except OSError as error:
        what = f"{host_port(*address)} accepted no data connection"
        raise LinkError(f"{what}: {explained(error)}") from error
    try:
        answered = await FirstWords(sock).hear()
        if isinstance(answered, Refuse):
            raise LinkError(f"data connection {index}: {refused(answered, is_proved=False).args[0]}")
        if not isinstance(answered, AttachData):
            raise ProtocolError(f"the peer sent {answered.type!r} when 'attach_data' was expected")
        key.check(answered, asked)
    except BaseException:
        sock.close()
        raise
    return DataConnection(sock, key.seals(asked, answered, "client"))
