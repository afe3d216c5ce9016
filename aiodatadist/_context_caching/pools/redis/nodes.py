"""Redis servers: their connections, each for one caller at a time, and the server of each slot.

Connections are :mod:`.connection`'s. redis-py's cluster client is not used: after an error of one server it learns the whole
cluster again before the next call, and a cluster that is down closes the connections of all calls. Here a server that
does not answer affects only the calls that need it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import anyio

from aiodatadist._context_caching.pools.extras import how_to_install
from aiodatadist._context_caching.pools.redis.connection import RedisConnection, ServerRefused
from aiodatadist._context_caching.pools.redis.resp import NotRedis, Reply, Request
from aiodatadist._values.addresses import host_port
from aiodatadist._values.foreign import printable

try:
    from redis.asyncio.connection import Connection, SSLConnection, parse_url
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.crc import key_slot
except ImportError as missing:
    raise ImportError(f"RedisPool needs the package redis ({missing}): {how_to_install('redis')}") from missing

__all__ = [
    "REFUSALS",
    "SLOTS",
    "Account",
    "Address",
    "Node",
    "NodeDown",
    "SSLConnection",
    "View",
    "key_slot",
    "parse_nodes",
    "parse_url",
]

logger = logging.getLogger(__name__)

SLOTS: Final = 16384
MAX_VIEW: Final = 1 << 20
"""Most characters in a cluster's description of itself: it is read on the event loop."""
MAX_HOST: Final = 253
"""Most characters of a server's name or address."""
MAX_SERVERS: Final = 4096
"""Most servers in it. Redis's own advice is 1000 at most."""
REFUSALS: Final = (ServerRefused, NotRedis)
"""Errors of a server that answers, for which trying again does not help."""
SMALL: Final = 2
"""Connections to a server beyond those for values, so that a question never waits behind values."""


Address: TypeAlias = tuple[str, int]
"""Host and port of a server."""


class NodeDown(ConnectionError):
    """The server does not answer."""


@dataclass(frozen=True)
class Account:
    """The connections to each server of a pool.

    Attributes:
        connections: the number of those for values.
        path: of a Unix socket, if the server is there.
        nat: the addresses at which servers are reached that announce others.
    """

    options: Mapping[str, Any]
    is_tls: bool
    connections: int
    path: str | None = None
    nat: Mapping[Address, Address] = field(default_factory=dict)
    settings: dict[tuple[str, int], Connection] = field(default_factory=dict, compare=False, repr=False)

    def forget(self, address: tuple[str, int]) -> None:
        """Forget a server that has left the pool."""
        self.settings.pop(address, None)

    def connection(self, host: str, port: int) -> RedisConnection:
        """Return a new connection. Raises TypeError if redis-py does not know an option."""
        if (host, port) not in self.settings:  # kept, because making them takes some milliseconds
            self.settings[host, port] = self._new_settings(host, port)
        return RedisConnection(self.settings[host, port], self.path)

    def reached(self, announced: Address) -> Address:
        """Return the address at which a server is reached that announces this one."""
        return self.nat.get(announced, announced)

    def _new_settings(self, host: str, port: int) -> Connection:
        kind = SSLConnection if self.is_tls else Connection
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
    """A server, with at most ``connections + SMALL`` connections.

    Requests with values wait for one of ``connections``. Small requests have ``SMALL`` connections that values never
    take; they use one of the others only if it is free.

    Attributes:
        name: ``host:port``.
        is_down: True if it did not answer the last time.
    """

    def __init__(self, host: str, port: int, account: Account) -> None:
        self.host = host
        self.port = port
        self.name = account.path or host_port(host, port)
        self.is_down = False
        self._account = account
        self._idle: list[RedisConnection] = []
        self._is_closed = False
        self._is_over = False
        self._busy: set[RedisConnection] = set()
        self._turn = 0  # counts starts of requests and connections that become idle: their order in time
        self._for_values = anyio.Semaphore(account.connections, fast_acquire=True)
        self._for_small = anyio.Semaphore(SMALL, fast_acquire=True)

    async def ask(self, *requests: Request, answers: Sequence[object] = ()) -> list[Reply]:
        """Send requests together; return their replies in order. A refusal is an instance of ``ResponseError``.

        A cancelled call drops its connection, so that no other call reads its replies. If that connection had been
        idle, all connections that were idle when the call started are dropped, too: whatever silently forgot one of
        them (for instance a firewall) has forgotten the others.

        Args:
            answers: replies of other servers to the same question. If there is one, a cancellation does not mean that
                this server is silent.

        Raises:
            NodeDown: if the server cannot be reached, or its connection breaks.
        """
        async with self._permits(requests):
            try:
                if (connection := self._idle_connection()) is not None:
                    try:
                        return await self._talk_again(connection, requests, answers)
                    except OSError as error:
                        # it was closed meanwhile, for instance by a restart of the server: try a new one
                        logger.debug("redis at %s: %s", printable(self.name), printable(error))
                if self._is_over:
                    raise ConnectionResetError("this pool is closed")
                return await self._talk(self._account.connection(self.host, self.port), requests)
            except (OSError, ValueError, OverflowError) as error:
                # the last two are raised for a host or a port that is not an address
                self.is_down = True
                raise NodeDown(printable(f"redis at {self.name}: {error}")) from error

    def _permits(self, requests: Sequence[Request]) -> anyio.Semaphore:
        if any(asked.has_value for asked in requests):
            return self._for_values
        return self._for_values if self._for_small.value == 0 and self._for_values.value > 0 else self._for_small

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _idle_connection(self) -> RedisConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_lost:
                return connection
            connection.drop()
        return None

    async def _talk_again(
        self, connection: RedisConnection, requests: Sequence[Request], answers: Sequence[object]
    ) -> list[Reply]:
        """Send requests on a connection that was idle."""
        began = self._next_turn()
        try:
            return await self._talk(connection, requests)
        except anyio.get_cancelled_exc_class():
            if not answers:
                self._drop_idle(before=began)
            raise

    def _drop_idle(self, before: int) -> None:
        """Drop the connections that have been idle since before that turn."""
        for connection in self._idle:
            if connection.idle_since < before:
                connection.drop()
        self._idle = [connection for connection in self._idle if connection.idle_since >= before]

    async def _talk(self, connection: RedisConnection, requests: Sequence[Request]) -> list[Reply]:
        self._busy.add(connection)
        try:
            replies = await connection.talk(requests)
        except BaseException:
            connection.drop()
            raise
        else:
            self.is_down = False
            if self._is_closed:
                connection.drop()
            else:
                connection.idle_since = self._next_turn()
                self._idle.append(connection)
            return replies
        finally:
            self._busy.discard(connection)

    def drop(self) -> None:
        """Close idle connections: the server has left the pool. Running calls continue."""
        self._is_closed = True
        self._account.forget((self.host, self.port))
        for connection in self._idle:
            connection.drop()
        self._idle.clear()

    async def aclose(self) -> None:
        """Drop all connections, and wait until their sockets are closed. Running calls fail."""
        connections = [*self._idle, *self._busy]
        self._is_over = True
        self.drop()
        for connection in connections:
            await connection.aclose()


@dataclass(frozen=True)
class View:
    """A cluster's description of itself.

    Attributes:
        owners: address of the server of each slot, or None.
        failed: addresses of servers that the others have given up.
        members: addresses of all servers, with and without slots, by number and by name.
    """

    owners: list[tuple[str, int] | None]
    failed: set[tuple[str, int]] = field(default_factory=set)
    members: set[tuple[str, int]] = field(default_factory=set)


def parse_nodes(text: str, asked: str, reached: Callable[[Address], Address] = lambda announced: announced) -> View:
    """Return the view in the answer to ``CLUSTER NODES`` from the server at host ``asked``.

    Raises ValueError if it is none. Whatever the text says, reading it takes some milliseconds.

    Args:
        reached: returns the address at which a server is reached that announces another one.
    """
    if len(text) > MAX_VIEW:
        raise ValueError(f"it has {len(text)} characters: the limit is {MAX_VIEW}")
    lines = text.splitlines()
    if len(lines) > MAX_SERVERS:
        raise ValueError(f"it has {len(lines)} servers: the limit is {MAX_SERVERS}")
    view = View([None] * SLOTS)
    owned = 0
    for line in lines:
        _, place, flags, _, _, _, _, _, *ranges = line.split()
        kinds = flags.split(",")
        if "noaddr" in kinds or "handshake" in kinds:
            continue
        address, by_number = map(reached, _addresses(place, asked))
        view.members.update((address, by_number))
        if "master" not in kinds:
            continue
        if "fail" in kinds:
            view.failed.add(address)
        for part in ranges:
            if not part.startswith("["):  # "[": a slot that is being migrated, which its owner lists as well
                slots = _slots(part)
                owned += len(slots)
                if owned > SLOTS:
                    raise ValueError("a slot has more than one owner")
                view.owners[slots.start : slots.stop] = [address] * len(slots)
    return view


def _addresses(place: str, asked: str) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return a server's addresses, by name if it has one, and by number. Raises ValueError if there is none."""
    place, _, hostname = place.partition(",")
    host, _, port = place.partition("@")[0].rpartition(":")
    return (_host(hostname.partition(",")[0] or host or asked), int(port)), (_host(host or asked), int(port))


def _host(name: str) -> str:
    if len(name) > MAX_HOST or not (name.isascii() and name.isprintable()):
        raise ValueError(f"{printable(name)!r} is not a host")
    return name


def _slots(part: str) -> range:
    first, _, last = part.partition("-")
    slots = range(int(first), int(last or first) + 1)
    if not 0 <= slots.start < slots.stop <= SLOTS:
        raise ValueError(f"{printable(part)} are no slots")
    return slots
