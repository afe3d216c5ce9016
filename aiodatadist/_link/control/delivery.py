"""The delivery of messages: a network that swallows them would otherwise keep a link mute for a quarter of an hour.

Heartbeats travel over another connection. They continue if a firewall has forgotten only the connection of messages, or if a
route drops only large packets. Then the kernel accepts messages, and repeats them until it gives up, after some 15 minutes.

What the peer's kernel acknowledges is delivered: a peer whose event loop is busy, or that does not read, is none of this
module's business. ``TCP_USER_TIMEOUT`` would end such a connection, too, once the peer's buffer is full.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

PATIENCE = 8.0
"""The least number of seconds in which one more byte must be acknowledged while any are under way.

By then the kernel has sent them six times, the last time after 6 s: on a network that loses a packet in ten, a link is ended
by mistake once in a million messages.
"""

INFO_BYTES = 256
"""More than any kernel's ``struct tcp_info``: the kernel returns what it has."""
UNACKNOWLEDGED, BYTES_ACKNOWLEDGED = 24, 120
"""The offsets of ``tcpi_unacked``, packets under way, and of ``tcpi_bytes_acked``."""
IDLE_SECONDS, PROBE_SECONDS, PROBES = 30, 10, 3


class UnderWay(NamedTuple):
    """The bytes that the peer's kernel has acknowledged so far, while others are under way."""

    acknowledged: int


def under_way(sock: socket.socket) -> UnderWay | None:
    """Return how far a connection is; None if nothing is under way, or that cannot be known."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    except OSError:  # closed, or not TCP
        return None
    if len(info) < BYTES_ACKNOWLEDGED + 8 or not struct.unpack_from("I", info, UNACKNOWLEDGED)[0]:
        return None
    return UnderWay(struct.unpack_from("Q", info, BYTES_ACKNOWLEDGED)[0])


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel probe an idle connection: middleboxes keep what is used, and one that has forgotten it is noticed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


class Delivery:
    """The delivery of what one connection sends. It has a timer while bytes may be under way, and only then.

    Args:
        look: returns how far the connection is, as :func:`under_way` does.
        fail: called once, if the network delivers nothing.

    Attributes:
        is_due: True if nothing may be under way so far. Then :meth:`sent` must be called for what is sent; else it may be.
        patience: seconds in which one more byte must be acknowledged. It is noticed within twice that time.
    """

    def __init__(self, look: Callable[[], UnderWay | None], fail: Callable[[], object]) -> None:
        self._look = look
        self._fail: Callable[[], object] | None = fail
        self._alarm: asyncio.TimerHandle | None = None
        self.patience: float = PATIENCE
        self.is_due: bool = True

    def sent(self) -> None:
        """Note that bytes were sent."""
        if self.is_due:
            self._look_after(None)

    def _look_after(self, before: UnderWay | None) -> None:
        self.is_due = False
        self._alarm = asyncio.get_running_loop().call_later(self.patience, self._is_time, before)

    def _is_time(self, before: UnderWay | None) -> None:
        self._alarm = None
        now, fail = self._look(), self._fail
        if now is None or fail is None:
            self.is_due = fail is not None
            return
        if now != before:
            self._look_after(now)
        else:  # the same byte was under way all the time
            self.end()
            fail()

    def end(self) -> None:
        """Look no more."""
        self.is_due = False
        self._fail = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
