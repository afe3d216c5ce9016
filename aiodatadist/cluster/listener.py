"""A port on which clients come: each as a plain socket, from which no event loop has read anything."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel

from aiodatadist.errors import LLMException, explained
from aiodatadist.values.addresses import host_port

logger = logging.getLogger(__name__)

ACCEPT_PAUSE = 0.1
"""Seconds before accepting is tried again when the process has run out of file descriptors."""


class Listener:
    """One listener, the key that its clients have to prove, and its end.

    Attributes:
        address: host, and the real port.
        is_over: no client that comes now gets a link.
    """

    def __init__(self, listener: Any, host: str, key: bytes | None) -> None:
        self.address: tuple[str, int] = (host, listener.extra(anyio.abc.SocketAttribute.local_port))
        self.key = key
        self.is_over = False
        self._listener = listener
        self._sockets: list[socket.socket] = [
            each.extra(anyio.abc.SocketAttribute.raw_socket) for each in getattr(listener, "listeners", [listener])
        ]
        self._scope = anyio.CancelScope()

    @classmethod
    async def open(cls, host: str, port: int, key: bytes | None, operation: str) -> Listener:
        """Port 0 is any free one. Raises LLMException: it cannot be had."""
        try:
            return cls(await anyio.create_tcp_listener(local_host=host, local_port=port), host, key)
        except OSError as error:
            is_full = error.errno in {errno.EMFILE, errno.ENFILE}
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {explained(error)}"
            raise LLMException(
                f"{host_port(host, port)} {reason}",
                operation=operation,
                hint=None if is_full else "choose another port, or 0 for any free port",
            ) from error

    async def serve(
        self, client: Callable[[socket.socket, Listener], Coroutine[Any, Any, None]], group: anyio.abc.TaskGroup
    ) -> None:
        """Serve clients, in tasks of the group, until closed; a client's task closes its socket."""
        with self._scope:
            async with self._listener, anyio.create_task_group() as accepting:
                for sock in self._sockets:
                    accepting.start_soon(self._accept, sock, client, group)

    async def _accept(
        self,
        sock: socket.socket,
        client: Callable[[socket.socket, Listener], Coroutine[Any, Any, None]],
        group: anyio.abc.TaskGroup,
    ) -> None:
        """Running out of file descriptors makes clients wait, no more."""
        loop = asyncio.get_running_loop()
        while not self.is_over:
            try:
                accepted, _ = await loop.sock_accept(sock)
            except OSError as error:
                logger.error("a client cannot be accepted: %s", error)  # noqa: TRY400
                await anyio.sleep(ACCEPT_PAUSE)
            else:
                group.start_soon(client, accepted, self)
                await anyio.lowlevel.checkpoint()  # where many wait, accepting does not

    def close(self) -> None:
        """No more clients; the port is free when this returns, for another process, too.

        The loop stops watching the socket first: else a client that comes right now would be lost in it.
        """
        self.is_over = True
        loop = asyncio.get_running_loop()
        # A loop may say that it does not watch the socket, or that it is closed: then there is nothing to do.
        for sock in self._sockets:
            with contextlib.suppress(OSError, ValueError, RuntimeError, NotImplementedError):
                loop.remove_reader(sock)
            sock.close()
        self._scope.cancel()
