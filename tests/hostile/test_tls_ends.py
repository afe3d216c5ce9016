"""A server that is gone right behind its handshake of TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from aiodatadist._config.certificates import Certificates, read_certificates
from aiodatadist._link.control.connection import Connection
from aiodatadist._link.control.wire import RECEIVE
from aiodatadist._wire.tls_pipe import TlsPipe
from tests.certificates import Authority, tls_folder, uri_of


@pytest.fixture
def own(tmp_path: Path) -> Certificates:
    authority = Authority(0)
    return read_certificates(tls_folder(tmp_path / "group", authority.issue([uri_of(1), uri_of(2)]), authority))


class Peer:
    """The other end of a connection: a socket, and an end of TLS that says whatever a test wants."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, is_server: bool = False) -> None:
        self.sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)

    def shake(self, data: bytes = b"") -> bytes:
        self._incoming.write(data)
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        return self._outgoing.read()


@asynccontextmanager
async def no_failed_callback() -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    """Open a connection, and check that no callback of the event loop fails."""
    loop, failed, (near, far) = asyncio.get_running_loop(), list[dict[str, Any]](), socket.socketpair()
    loop.set_exception_handler(lambda _, context: failed.append(context))
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        yield near, far
    loop.set_exception_handler(None)
    assert not failed


class Late(Connection):
    """A connection whose reader runs only when the other end has closed it."""

    async def receive(self, max_bytes: int = RECEIVE) -> bytes:
        data = await super().receive(max_bytes)
        with pytest.raises(anyio.EndOfStream):
            await super().receive(max_bytes)
        return data


async def test_a_server_that_closes_behind_its_handshake_is_gone(own: Certificates) -> None:
    async with no_failed_callback() as (near, far):
        connection, peer = await Late.over(near), Peer(far, own.server, is_server=True)

        async def answer() -> None:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(far, peer.shake(await loop.sock_recv(far, RECEIVE)))
            far.shutdown(socket.SHUT_WR)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(answer)
                await connection.start_tls(TlsPipe("client", own))
            with pytest.raises(anyio.EndOfStream):
                await Connection.receive(connection)
        await connection.aclose()
