"""Free ports, for servers that must be told theirs."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_given: set[int] = set()


def own_range(first: int, end: int) -> range:
    """Return the part of these ports that belongs to this worker of this test run, or all of them.

    Workers are those of pytest-xdist. ``AIODATADIST_PORTS``, for instance ``2/5``, says that five runs go on beside each
    other, and that this one is number 2, counted from 0.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    # Modulo, because the replacement of a crashed worker has a higher number.
    place = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % workers
    run, _, runs = os.environ.get("AIODATADIST_PORTS", "0/1").partition("/")
    return range(first + place * int(runs) + int(run), end, workers * int(runs))


def free_port() -> int:
    """Return a port without a listener, which neither this process nor a worker beside it has given away before.

    No outgoing connection will use it. The user of a port may not listen yet, or be down and come back, so a free port
    alone is not enough.
    """
    first = int(RANGE.read_text().split()[0])
    ours = own_range(20_000, first)  # lower ports are used by Mooncake
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
