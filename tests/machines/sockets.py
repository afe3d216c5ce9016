"""TCP connections between machines, in this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.machines.networks import PORT, Machine

PATIENCE = 50.0
"""Seconds after which a connection gives up: before the test does, and its machines with it."""


def listen(machine: Machine, host: str, port: int = PORT) -> socket.socket:
    """Return a listening socket on a machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return machine.inside(lambda: socket.create_server((host, port), family=family))


def dial(machine: Machine, host: str, port: int = PORT) -> socket.socket:
    """Return a connection from a machine."""
    return machine.inside(lambda: socket.create_connection((host, port), PATIENCE))


@contextmanager
def connected(
    client: Machine, server: Machine, host: str, port: int = PORT
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Connect two machines; yield the client's end and the server's."""
    with listen(server, host, port) as listener, dial(client, host, port) as ours:
        theirs, _ = listener.accept()
        with theirs:
            theirs.settimeout(PATIENCE)
            yield ours, theirs


def sent(data: bytes, one: socket.socket, other: socket.socket) -> bytes:
    """Send bytes, and return what arrives of them."""
    sender = threading.Thread(target=one.sendall, args=(data,))
    sender.start()
    try:
        return received(other, len(data))
    finally:
        sender.join()


def received(sock: socket.socket, count: int) -> bytes:
    """Return this number of bytes, or what came before the end."""
    parts = []
    while count and (part := sock.recv(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
