"""Ports for servers that have to be told theirs."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_given: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on, that no outgoing connection will be given meanwhile, and that this never gave before:
    who was given one may not listen yet, or be down and come back.
    """
    first = int(RANGE.read_text().split()[0])
    while True:
        port = random.randrange(20_000, first) if first > 21_000 else 0  # below, Mooncake takes some for itself
        try:
            with socket.create_server(("127.0.0.1", port)) as found:
                port = int(found.getsockname()[1])
        except OSError:
            continue
        if port not in _given:
            _given.add(port)
            return port
