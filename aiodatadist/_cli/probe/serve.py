"""``aiodatadist doctor --serve [HOST:]PORT --device N``: the far end of a probe that runs on another host.

One step at a time, each in a child process that ends with its connection. Callers are greeted concurrently, so a silent
one does not delay the others.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread

from aiodatadist._cli.probe.children import GRACE, Watched, open_end
from aiodatadist._cli.probe.hide import Hider
from aiodatadist._cli.probe.meeting import key_for, welcome

Say = Callable[[str], None]
MAX_CALLERS = 64
"""Connections at a time; further ones wait in the listener's queue."""


def serve(host: str, port: int, order: dict[str, Any], say: Say) -> None:
    """Serve callers until interrupted.

    Raises:
        PermissionError: if ``host`` is not a loopback address, and there is no key.
        OSError: if it cannot listen there.
    """
    key, turn, room = key_for(host), threading.Lock(), threading.BoundedSemaphore(MAX_CALLERS)
    with socket.create_server((host, port)) as listener:
        say(f"listening on {host}:{listener.getsockname()[1]}, device {order['device']}; end it with Ctrl-C")
        while True:
            link, _ = listener.accept()
            room.acquire()
            threading.Thread(target=_greet, args=(link, key, order, turn, room, say), daemon=True).start()


def _greet(
    link: socket.socket, key: bytes, order: dict[str, Any], turn: threading.Lock, room: threading.Semaphore, say: Say
) -> None:
    """Greet a caller, in a separate thread. The caller's child dies with this process."""
    try:
        with link:
            serve_one(link, key, order, turn, say)
    finally:
        room.release()


def serve_one(link: socket.socket, key: bytes, order: dict[str, Any], turn: threading.Lock, say: Say) -> None:
    """Run one step, when it is its turn."""
    try:
        limit = welcome(link, key, Hider().this_host())
    except OSError as error:
        say(f"a caller was refused: {error}")
        return
    with turn:
        anyio.run(_step, link, limit, order, say)


async def _step(link: socket.socket, limit: float, order: dict[str, Any], say: Say) -> None:
    async with open_end({**order, "step": "far"}, link) as far, anyio.create_task_group() as tasks:
        tasks.start_soon(_kill_after_near, far, link, limit)
        ended = await far.wait(limit + GRACE)
    say(f"a step ended after {ended.seconds:.1f} s")


async def _kill_after_near(far: Watched, link: socket.socket, limit: float) -> None:
    """Kill the far end ``GRACE`` seconds after the near end has ended, unless it has ended by itself."""
    if not await anyio.to_thread.run_sync(_ended_first, far.child.pid, link, limit):
        await anyio.sleep(GRACE)
        far.kill()


def _ended_first(pid: int, link: socket.socket, limit: float) -> bool:
    """Wait until the child or the near end has ended; return True if it was the child."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            events = select.poll()
            events.register(process, select.POLLIN)
            events.register(link.fileno(), select.POLLRDHUP)
            return any(fd == process for fd, _ in events.poll(int((limit + GRACE) * 1000)))
        finally:
            os.close(process)
    return True
