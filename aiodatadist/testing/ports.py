"""Ports for servers that have to be told theirs."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_given: set[int] = set()


def own_range(first: int, end: int) -> range:
    """The part of these ports that is this process's among the workers of a test run, of pytest-xdist's, or all of them."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    place = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return range(
        first + place % workers, end, workers
    )  # a worker that is started for one that crashed has a higher number


def free_port() -> int:
    """A port without a listener, that no outgoing connection will be given meanwhile, and that neither this process nor a
    worker beside it gave before: who was given one may not listen yet, or be down and come back.
    """
    first = int(RANGE.read_text().split()[0])
    ours = own_range(20_000, first)  # below, Mooncake takes some for itself
    while True:
        port = random.choice(ours) if first > 21_000 else 0
        try:
            with socket.create_server(("127.0.0.1", port)) as found:
                port = int(found.getsockname()[1])
        except OSError:
            continue
        if port not in _given:
            _given.add(port)
            return port
