"""Redis servers: one connection for one caller at a time, and which server has which slot.

Connections are :mod:`.wire`'s. redis-py's cluster client is not used: after an error of one server no next call begins
before the cluster has been learnt anew, and a cluster that is down closes the connections of all calls. Here a server that
does not answer costs the calls that wanted it, and no others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import anyio

from aiodatadist.context_caching.pools.extras import how_to_install
from aiodatadist.context_caching.pools.redis.resp import NotRedis, Reply, Request
from aiodatadist.context_caching.pools.redis.wire import Refused, Wire
from aiodatadist.values.addresses import host_port
from aiodatadist.values.foreign import printable

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
REFUSALS: Final = (Refused, NotRedis)
"""Raised where a server answers, and that is the end of it."""
SMALL: Final = 2
"""Connections to a server beyond those for values: a question never waits behind these."""


class NodeDown(ConnectionError):
    """This server does not answer."""


@dataclass(frozen=True)
class Account:
    """How to talk to each server of a pool; ``connections`` are those for values."""

    options: Mapping[str, Any]
    is_tls: bool
    connections: int
    _settings: dict[tuple[str, int], Connection] = field(default_factory=dict, compare=False, repr=False)

    def wire(self, host: str, port: int) -> Wire:
        """Raises TypeError: redis-py does not know an option."""
        if (host, port) not in self._settings:  # to make them takes some milliseconds
            self._settings[host, port] = self._new_settings(host, port)
        return Wire(self._settings[host, port])

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
        self._idle: list[Wire] = []
        self._is_closed = False
        self._is_over = False
        self._busy: set[Wire] = set()
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
                    except OSError as error:  # closed just now: the server was restarted, perhaps
                        logger.debug("redis at %s: %s", printable(self.name), printable(error))
                if self._is_over:
                    raise ConnectionResetError("this pool is closed")
                return await self._talk(self._account.wire(self.host, self.port), requests)
            except (OSError, UnicodeError, OverflowError) as error:  # the last two: of what is no address
                self.is_down = True
                raise NodeDown(printable(f"redis at {self.name}: {error}")) from error

    def _permits(self, requests: Sequence[Request]) -> anyio.Semaphore:
        if any(asked.has_value for asked in requests):
            return self._for_values
        return self._for_values if self._for_small.value == 0 and self._for_values.value > 0 else self._for_small

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _idle_wire(self) -> Wire | None:
        while self._idle:
            wire = self._idle.pop()
            if not wire.is_lost:
                return wire
            wire.drop()
        return None

    async def _talk_again(self, wire: Wire, requests: Sequence[Request], answers: Sequence[object]) -> list[Reply]:
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

    async def _talk(self, wire: Wire, requests: Sequence[Request]) -> list[Reply]:
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
