"""``aiodatadist doctor --serve [HOST:]PORT --device N``: the far end of a probe that runs on another host.

One step at a time, each in a child process that ends with its connection.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiodatadist.cli.probe.children import GRACE, ending, kill, start, wait
from aiodatadist.cli.probe.hide import Hider
from aiodatadist.cli.probe.meeting import key_for, welcome

Say = Callable[[str], None]


def serve(host: str, port: int, order: dict[str, Any], say: Say) -> None:
    """Until it is interrupted.

    Raises:
        PermissionError: ``host`` is not of this host alone, and there is no key.
        OSError: it cannot listen there.
    """
    key = key_for(host)
    with socket.create_server((host, port)) as listener:
        say(f"listening on {host}:{listener.getsockname()[1]}, device {order['device']}; end it with Ctrl-C")
        while True:
            link, _ = listener.accept()
            with link:
                serve_one(link, key, order, say)


def serve_one(link: socket.socket, key: bytes, order: dict[str, Any], say: Say) -> None:
    """One step."""
    try:
        limit = welcome(link, key, Hider().this_host())
    except OSError as error:
        say(f"a caller was refused: {error}")
        return
    child = start({**order, "step": "far"}, link)
    with ending(child), ThreadPoolExecutor(1) as reader:
        reading = reader.submit(wait, child, limit + GRACE)
        try:
            if not _ended_first(child, link, limit):
                with contextlib.suppress(TimeoutError):
                    reading.result(GRACE)
        finally:
            kill(child)
        ended = reading.result()
    say(f"a step ended after {ended.seconds:.1f} s")


def _ended_first(child: subprocess.Popen[bytes], link: socket.socket, limit: float) -> bool:
    """Wait for the child, or for the near end to go: whether it was the child."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(child.pid)
        try:
            events = select.poll()
            events.register(process, select.POLLIN)
            events.register(link.fileno(), select.POLLRDHUP)
            return any(fd == process for fd, _ in events.poll(int((limit + GRACE) * 1000)))
        finally:
            os.close(process)
    return True
