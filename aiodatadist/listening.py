"""A port on which clients come to us."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.abc

from aiodatadist.errors import LLMException

logger = logging.getLogger(__name__)

ACCEPT_PAUSE = 0.1
"""Seconds before accepting is tried again when the process has run out of file descriptors."""


class Listening:
    """One listener, the key that its clients have to prove, and its end.

    Attributes:
        address: host, and the real port.
        is_over: nobody who comes now gets a link.
    """

    def __init__(self, listener: Any, host: str, key: bytes | None) -> None:
        self.address: tuple[str, int] = (host, listener.extra(anyio.abc.SocketAttribute.local_port))
        self.key = key
        self.is_over = False
        self._listener = listener
        self._scope = anyio.CancelScope()

    @classmethod
    async def open(cls, host: str, port: int, key: bytes | None, operation: str) -> Listening:
        """Port 0 is any free one. Raises LLMException: it cannot be had."""
        try:
            return cls(await anyio.create_tcp_listener(local_host=host, local_port=port), host, key)
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error.strerror}"
            raise LLMException(
                f"port {port} on {host} {reason}",
                operation=operation,
                hint="choose another one, or 0 for any free port",
            ) from error

    async def serve(
        self,
        client: Callable[[anyio.abc.SocketStream, Listening], Coroutine[Any, Any, None]],
        group: anyio.abc.TaskGroup,
    ) -> None:
        """Serve clients, in tasks of the group, until closed; running out of file descriptors makes them wait, no more."""

        async def one(stream: anyio.abc.SocketStream) -> None:
            await client(stream, self)

        with self._scope:
            async with self._listener:
                while True:
                    try:
                        await self._listener.serve(one, group)
                    except* OSError as errors:  # of several listeners, which anyio serves in a group
                        logger.error("a client cannot be accepted: %s", errors.exceptions[0])  # noqa: TRY400
                    await anyio.sleep(ACCEPT_PAUSE)

    def close(self) -> None:
        """No more clients. The loop stops watching the socket first: else one that comes right now would be lost in it."""
        self.is_over = True
        loop = asyncio.get_running_loop()
        # A loop may say that it does not watch the socket, or that it is closed: then there is nothing to do.
        for listener in getattr(self._listener, "listeners", [self._listener]):
            with contextlib.suppress(OSError, ValueError, RuntimeError, NotImplementedError):
                loop.remove_reader(listener.extra(anyio.abc.SocketAttribute.raw_socket))
        self._scope.cancel()
