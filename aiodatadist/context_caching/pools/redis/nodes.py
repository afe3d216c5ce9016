"""Redis servers: one connection for one caller at a time, and which server has which slot.

redis-py's ``Connection`` connects, with TLS and ACLs; what is said then is ours (:mod:`.resp`). Its cluster client is not
used: after an error of one server no next call begins before the cluster has been learnt anew, and a cluster that is
down closes everybody's connections. Here a server that does not answer costs the calls that wanted it, and no others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import anyio

from aiodatadist.context_caching.pools.extras import how_to_install
from aiodatadist.context_caching.pools.redis.resp import Exchange, Reply, Request
from aiodatadist.values.addresses import host_port

try:
    from redis.asyncio.connection import Connection, SSLConnection, parse_url
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.crc import key_slot
    from redis.exceptions import AuthenticationError, InvalidResponse, RedisError
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import ResponseError as RedisResponseError
except ImportError as missing:
    raise ImportError(f"RedisPool needs the package redis ({missing}): {how_to_install('redis')}") from missing

__all__ = [
    "REFUSALS",
    "SLOTS",
    "Account",
    "Node",
    "NodeDown",
    "SSLConnection",
    "View",
    "key_slot",
    "parse_nodes",
    "parse_url",
]

if TYPE_CHECKING:
    Base: TypeAlias = Connection
else:
    Base = object

logger = logging.getLogger(__name__)

SLOTS: Final = 16384
REFUSALS: Final = (AuthenticationError, InvalidResponse, RedisResponseError)
"""What redis-py raises when a server answers, and does not let this caller in."""
CLOSE_TIMEOUT: Final = 1.0
"""Seconds that closing a connection may take."""
SMALL: Final = 2
"""Connections to a server beyond those for values: a question never waits behind these."""


class NodeDown(ConnectionError):
    """This server does not answer."""


class _Wire(Base):
    """A connection that redis-py makes, and that is ours from then on: :class:`Exchange` speaks on it.

    Attributes:
        idle_since: turn of its :class:`Node`.
    """

    idle_since = 0
    _transport: asyncio.Transport | None = None
    _exchange: Exchange | None = None
    _is_dropped = False

    async def _connect(self) -> None:
        await super()._connect()  # type: ignore[no-untyped-call]
        self._transport = cast("asyncio.Transport", self._writer.transport) if self._writer is not None else None
        if self._is_dropped:  # while it was under way, when there was nothing to close
            self.drop()
            raise ConnectionResetError("the connection was dropped")

    async def talk(self, requests: Sequence[Request]) -> list[Reply]:
        """Send requests at once; their replies, in this order. Raises RedisError, OSError: it has to be dropped."""
        if self._exchange is None:
            await self.connect()  # type: ignore[no-untyped-call]
            if self._transport is None or self._is_dropped:
                self.drop()
                raise ConnectionResetError("the connection was dropped")
            self._exchange = Exchange(self._transport)
        return await self._exchange.ask(requests)

    def drop(self) -> None:
        """Close it at once: ``disconnect()`` would first send what is buffered, perhaps never."""
        self._is_dropped = True
        if self._exchange is not None:
            self._exchange.drop()
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.abort()
        self._transport = self._reader = self._writer = None

    @property
    def is_lost(self) -> bool:
        """It was closed since it was last used."""
        return self._exchange is None or self._exchange.is_lost

    async def aclose(self) -> None:
        """Drop it, and wait until its socket is closed."""
        self.drop()
        if self._exchange is not None:
            with anyio.move_on_after(CLOSE_TIMEOUT, shield=True):
                await self._exchange.closed()


class _PlainWire(_Wire, Connection):
    pass


class _TlsWire(_Wire, SSLConnection):
    pass


@dataclass(frozen=True)
class Account:
    """How to talk to each server of a pool; ``connections`` are those for values."""

    options: Mapping[str, Any]
    is_tls: bool
    connections: int

    def wire(self, host: str, port: int) -> _Wire:
        """Raises TypeError: redis-py does not know an option."""
        kind = _TlsWire if self.is_tls else _PlainWire
        return kind(
            host=host,
            port=port,
            **self.options,
            protocol=2,
            socket_timeout=None,
            socket_connect_timeout=None,
            health_check_interval=0,
            retry=Retry(NoBackoff(), 0),
        )


class Node:
    """One server, with at most ``connections + SMALL`` connections.

    Requests with values have ``connections`` of them, and wait for these. Others, which are small, have ``SMALL`` that no
    value ever takes; they use one of the rest only when it is free.

    Attributes:
        name: ``host:port``.
        is_down: it did not answer the last time.
    """

    def __init__(self, host: str, port: int, account: Account) -> None:
        self.host = host
        self.port = port
        self.name = host_port(host, port)
        self.is_down = False
        self._account = account
        self._idle: list[_Wire] = []
        self._is_closed = False
        self._is_over = False
        self._busy: set[_Wire] = set()
        self._turn = 0  # that a request begins, or a connection becomes idle: the order in which they did
        self._for_values = anyio.Semaphore(account.connections, fast_acquire=True)
        self._for_small = anyio.Semaphore(SMALL, fast_acquire=True)

    async def ask(self, *requests: Request, answers: Sequence[object] = ()) -> list[Reply]:
        """Send requests at once; their replies, in this order. A refusal is an instance of ``ResponseError`` among them.

        A cancelled call drops its connection, so no other call reads what it did not. If that one had been idle, those go
        with it that were idle when the call began: what forgot the one in silence (a firewall, say) has forgotten them.

        Args:
            answers: of other servers that were asked the same. If there is one, to be cancelled is no sign of anything.

        Raises:
            NodeDown: the server is gone, or went in the middle.
        """
        async with self._permits(requests):
            try:
                if (wire := self._idle_wire()) is not None:
                    try:
                        return await self._talk_again(wire, requests, answers)
                    except (
                        RedisConnectionError,
                        OSError,
                    ) as error:  # closed just now: the server was restarted, perhaps
                        logger.debug("redis at %s: %s", self.name, error)
                if self._is_over:
                    raise ConnectionResetError("this pool is closed")
                return await self._talk(self._account.wire(self.host, self.port), requests)
            except (RedisError, OSError, UnicodeError, OverflowError) as error:  # the last two: of what is no address
                self.is_down = True
                raise NodeDown(f"redis at {self.name}: {error}") from error

    def _permits(self, requests: Sequence[Request]) -> anyio.Semaphore:
        if any(asked.has_value for asked in requests):
            return self._for_values
        return self._for_values if self._for_small.value == 0 and self._for_values.value > 0 else self._for_small

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _idle_wire(self) -> _Wire | None:
        while self._idle:
            wire = self._idle.pop()
            if not wire.is_lost:
                return wire
            wire.drop()
        return None

    async def _talk_again(self, wire: _Wire, requests: Sequence[Request], answers: Sequence[object]) -> list[Reply]:
        """On a connection that was idle."""
        began = self._next_turn()
        try:
            return await self._talk(wire, requests)
        except anyio.get_cancelled_exc_class():
            if not answers:
                self._drop_idle(before=began)
            raise

    def _drop_idle(self, before: int) -> None:
        """Those that are idle since before that turn."""
        for wire in self._idle:
            if wire.idle_since < before:
                wire.drop()
        self._idle = [wire for wire in self._idle if wire.idle_since >= before]

    async def _talk(self, wire: _Wire, requests: Sequence[Request]) -> list[Reply]:
        self._busy.add(wire)
        try:
            replies = await wire.talk(requests)
        except BaseException:
            wire.drop()
            raise
        else:
            self.is_down = False
            if self._is_closed:
                wire.drop()
            else:
                wire.idle_since = self._next_turn()
                self._idle.append(wire)
            return replies
        finally:
            self._busy.discard(wire)

    def drop(self) -> None:
        """It is not part of the pool any more: no connection is kept. Calls that are under way come to their end."""
        self._is_closed = True
        for wire in self._idle:
            wire.drop()
        self._idle.clear()

    async def aclose(self) -> None:
        """Drop all connections, and wait until their sockets are closed. Calls that are under way fail."""
        wires = [*self._idle, *self._busy]
        self._is_over = True
        self.drop()
        for wire in wires:
            await wire.aclose()


@dataclass(frozen=True)
class View:
    """What a cluster says of itself.

    Attributes:
        owners: address of the server of each slot, or None.
        failed: addresses of servers that the others have given up.
    """

    owners: list[tuple[str, int] | None]
    failed: set[tuple[str, int]] = field(default_factory=set)


def parse_nodes(text: str, asked: str) -> View:
    """The answer to ``CLUSTER NODES`` of the server at host ``asked``."""
    view = View([None] * SLOTS)
    for line in text.splitlines():
        _, place, flags, _, _, _, _, _, *ranges = line.split()
        place, _, hostname = place.partition(",")
        host, _, port = place.partition("@")[0].rpartition(":")
        kinds = flags.split(",")
        if "noaddr" in kinds or "master" not in kinds:
            continue
        address = (hostname.partition(",")[0] or host or asked, int(port))
        if "fail" in kinds:
            view.failed.add(address)
        for part in ranges:
            if not part.startswith("["):  # a slot on its way: it is still at home
                first, _, last = part.partition("-")
                for slot in range(int(first), int(last or first) + 1):
                    view.owners[slot] = address
    return view
