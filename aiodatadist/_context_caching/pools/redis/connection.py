"""A connection to a Redis server from start to end: TLS, account and database. Requests are :mod:`.resp`'s.

redis-py takes the options of a URL apart and checks them. Nothing else of it is used, and no private name.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import cast

import anyio

from aiodatadist._context_caching.pools.extras import how_to_install
from aiodatadist._context_caching.pools.redis.resp import Exchange, Reply, Request, ResponseError, request
from aiodatadist._values.foreign import printable

try:
    from redis.asyncio.connection import Connection, SSLConnection
except ImportError as missing:
    raise ImportError(f"RedisPool needs the package redis ({missing}): {how_to_install('redis')}") from missing

CLOSE_TIMEOUT = 1.0
"""Most seconds that closing a connection may take."""


class ServerRefused(ConnectionError):
    """The server answers, and refuses this account."""


class RedisConnection:
    """A connection that is established on first use, and never again.

    Args:
        settings: address and account. These settings are never connected themselves.
        path: of the Unix socket to connect to instead of the address.

    Attributes:
        idle_since: turn of its node at which it became idle.
    """

    idle_since = 0

    def __init__(self, settings: Connection, path: str | None = None) -> None:
        self._settings = settings
        self._path = path
        self._exchange: Exchange | None = None
        self._is_dropped = False

    async def talk(self, requests: Sequence[Request]) -> list[Reply]:
        """Send requests together; return their replies in order.

        Raises:
            ServerRefused: if the account or the database is refused.
            OSError: if the connection cannot be established or is lost. It must be dropped.
        """
        if self._exchange is None:
            exchange = await self._connect()
            self._exchange = exchange
            if self._is_dropped:  # dropped while it connected, when there was nothing to close yet
                exchange.drop()
                raise ConnectionResetError("the connection was dropped")
            await self._greet(exchange)
        return await self._exchange.ask(requests)

    async def _connect(self) -> Exchange:
        settings = self._settings
        if self._path is not None:
            return (await asyncio.get_running_loop().create_unix_connection(Exchange, self._path))[1]
        tls = settings.ssl_context.get() if isinstance(settings, SSLConnection) else None
        loop = asyncio.get_running_loop()
        transport, exchange = await loop.create_connection(Exchange, settings.host, settings.port, ssl=tls)
        sock = transport.get_extra_info("socket")
        if sock is not None and settings.socket_keepalive:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in cast("Mapping[int, int]", settings.socket_keepalive_options).items():
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        return exchange

    async def _greet(self, exchange: Exchange) -> None:
        """Sign in and select the database.

        There is always an answer to wait for: a server with too many clients says so instead of the first answer.
        """
        settings = self._settings
        if settings.username or settings.password:
            await self._sign_in(exchange, settings.username or "", settings.password or "")
        # older servers than 7.2 refuse it; that is ignored
        greeting = [request("CLIENT", "SETINFO", "LIB-NAME", "aiodatadist")]
        if settings.client_name:
            greeting.append(request("CLIENT", "SETNAME", settings.client_name))
        if settings.db:
            greeting.append(request("SELECT", settings.db))
        info, *others = await exchange.ask(greeting)
        _check_room(info)
        for reply in others:
            _check(reply)

    async def _sign_in(self, exchange: Exchange, user: str, password: str) -> None:
        replies = await exchange.ask([request("AUTH", user, password) if user else request("AUTH", password)])
        if user and isinstance(replies[0], ResponseError) and "wrong number of arguments" in str(replies[0]):
            replies = await exchange.ask([request("AUTH", password)])  # servers before Redis 6 have no users
        _check(replies[0])

    def drop(self) -> None:
        """Close it at once; buffered bytes are not sent."""
        self._is_dropped = True
        if self._exchange is not None:
            self._exchange.drop()

    @property
    def is_lost(self) -> bool:
        """True if the connection was closed since its last use."""
        return self._exchange is None or self._exchange.is_lost

    async def aclose(self) -> None:
        """Drop it, and wait until its socket is closed."""
        self.drop()
        if self._exchange is not None:
            with anyio.move_on_after(CLOSE_TIMEOUT, shield=True):  # a cancelled caller must not leave the socket open
                await self._exchange.closed()


def _check(reply: Reply) -> None:
    """Raise ServerRefused if the reply is an error."""
    _check_room(reply)
    if isinstance(reply, ResponseError):
        raise ServerRefused(printable(reply))


def _check_room(reply: Reply) -> None:
    """Raise ConnectionResetError if the server closes this connection because it has too many clients."""
    if isinstance(reply, ResponseError) and "max number of clients" in str(reply):
        raise ConnectionResetError(printable(reply))
