"""A port to which clients connect: each becomes a plain socket, from which no event loop has read anything."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel

from aiodatadist._cluster.key_ring import Keys
from aiodatadist._counting import Incident, Incidents
from aiodatadist._values.addresses import host_port
from aiodatadist._wire.messages import PROTOCOL
from aiodatadist.errors import LLMException, explained

logger = logging.getLogger(__name__)

ANY_IPV6 = "::"
BACKLOG = 65536
"""Clients that may wait to be accepted; the system lowers it to its own limit."""
ACCEPT_PAUSE = 0.1
"""Seconds until accepting is tried again when the process has run out of file descriptors."""


def _is_any_ipv6(host: str) -> bool:
    """Return True for ``::``, in any notation."""
    try:
        return ipaddress.ip_address(host) == ipaddress.IPv6Address(ANY_IPV6)
    except ValueError:  # a host name
        return False


def _of_both_families(port: int) -> socket.socket | None:
    """Listen on all addresses; return None if this machine has no such socket, which is logged.

    A socket of IPv6 accepts clients with IPv4 addresses only if it is told to. Raises OSError.
    """
    if not socket.has_dualstack_ipv6():
        logger.warning("[::] accepts only IPv6 on this machine: peers with IPv4 addresses are refused")
        return None
    sock = socket.create_server((ANY_IPV6, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    sock.setblocking(False)
    return sock


class Listener:
    """A listener, with the keys that its clients may prove.

    Attributes:
        address: host, and the real port.
        keys: returns the keys, of which a client must prove one, or none if it need not prove anything. May raise AuthError.
        protocol: the major version of the protocol that clients must speak.
        is_over: True once no new client gets a link.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        owner: AbstractAsyncContextManager[object],
        host: str,
        keys: Keys,
        protocol: int,
    ) -> None:
        """Make a listener. Leaving ``owner`` closes the sockets, if they are another object's."""
        self.address: tuple[str, int] = (host, sockets[0].getsockname()[1])
        self.keys: Keys = keys
        self.protocol: int = protocol
        self.is_over: bool = False
        self._sockets = sockets
        self._owner = owner
        self._scope = anyio.CancelScope()

    @classmethod
    async def open(cls, host: str, port: int, keys: Keys, operation: str, protocol: int = PROTOCOL) -> Listener:
        """Listen on an address; port 0 is any free one. Raises LLMException if it cannot be used."""
        try:
            if _is_any_ipv6(host) and (sock := _of_both_families(port)) is not None:
                owner = contextlib.AsyncExitStack()
                owner.callback(sock.close)
                return cls([sock], owner, host, keys, protocol)
            listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
            each = [
                one.extra(anyio.abc.SocketAttribute.raw_socket) for one in getattr(listener, "listeners", [listener])
            ]
            return cls(each, listener, host, keys, protocol)
        except OSError as error:
            is_full = error.errno in {errno.EMFILE, errno.ENFILE}
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {explained(error)}"
            raise LLMException(
                f"{host_port(host, port)} {reason}",
                operation=operation,
                hint=None if is_full else "choose another port, or 0 for any free port",
            ) from error

    async def serve(
        self,
        client: Callable[[socket.socket, Listener], Coroutine[Any, Any, None]],
        group: anyio.abc.TaskGroup,
        incidents: Incidents,
    ) -> None:
        """Serve clients, in tasks of the group, until closed; a client's task closes its socket."""
        with self._scope:
            async with self._owner, anyio.create_task_group() as accepting:
                for sock in self._sockets:
                    accepting.start_soon(self._accept, sock, client, group, incidents)

    async def _accept(
        self,
        sock: socket.socket,
        client: Callable[[socket.socket, Listener], Coroutine[Any, Any, None]],
        group: anyio.abc.TaskGroup,
        incidents: Incidents,
    ) -> None:
        """Accept clients until closed. If file descriptors run out, clients only wait."""
        loop = asyncio.get_running_loop()
        while not self.is_over:
            try:
                accepted, _ = await loop.sock_accept(sock)
            except OSError as error:
                told = "a client cannot be accepted: %s", explained(error)
                incidents.add(Incident.ACCEPT_FAILED, logger, *told, level=logging.ERROR)
                await anyio.sleep(ACCEPT_PAUSE)
            else:
                group.start_soon(client, accepted, self)
                await anyio.lowlevel.checkpoint()  # accepting does not suspend if many clients wait

    def close(self) -> None:
        """Accept no more clients; when this returns the port is free, also for another process.

        The loop stops watching the socket first; otherwise a client that comes right now would be lost in it.
        """
        self.is_over = True
        loop = asyncio.get_running_loop()
        # The loop may raise because it does not watch the socket, or is closed: then there is nothing to do.
        for sock in self._sockets:
            with contextlib.suppress(OSError, ValueError, RuntimeError, NotImplementedError):
                loop.remove_reader(sock)
            sock.close()
        self._scope.cancel()
