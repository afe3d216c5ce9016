"""The demo's child processes: started together, ended together, none left behind.

A child ends on its own when its stdin closes (and dies at once when its parent does, see ``pipes.die_with_parent``).
It has a session of its own, so that Ctrl-C in a terminal reaches only the parent, which then ends the children.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

import aiodatadist
from aiodatadist.cli.demo.messages import REPORT, Failed, Order, Report
from aiodatadist.cli.kit.errors import CommandError

GRACE_SECONDS = 1.0
"""Seconds that a child has to end on its own after its stdin closed."""

_LAST_WORDS = 4096
"""Bytes kept of what a child writes to stderr: a traceback fits."""

Command: TypeAlias = Callable[[str], Sequence[str]]
"""From a worker's name to the command line that starts it."""


class Child:
    """One worker process. Its reports come out of :meth:`reports`; its last words on stderr are kept."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self._last_words = b""
        self._said_all = anyio.Event()

    @property
    def pid(self) -> int:
        return self.process.pid

    async def order(self, order: Order) -> None:
        """Send an order. A child that is gone does not get it; :meth:`outcome` tells what became of it."""
        assert self.process.stdin is not None
        try:
            await self.process.stdin.send(order.line())
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, ConnectionError):
            return

    async def reports(self) -> AsyncIterator[Report]:
        """Everything the child says until it closes its stdout."""
        assert self.process.stdout is not None
        lines = BufferedByteReceiveStream(self.process.stdout)
        while True:
            try:
                line = await lines.receive_until(b"\n", 1 << 20)
            except (anyio.IncompleteRead, anyio.BrokenResourceError):
                return
            yield REPORT.validate_json(line)

    async def keep_last_words(self) -> None:
        """Drain stderr, so that the child never waits for it."""
        assert self.process.stderr is not None
        async for data in self.process.stderr:
            self._last_words = (self._last_words + data)[-_LAST_WORDS:]
        self._said_all.set()

    async def death(self) -> ChildError:
        """Wait for the end of a child that should have gone on, and say how it went."""
        code = await self.process.wait()
        if code < 0:
            return ChildError(
                f"{self} was killed by {signal.Signals(-code).name}; the demo ends with it", is_root_cause=True
            )
        with anyio.move_on_after(GRACE_SECONDS):
            await self._said_all.wait()
        words = "".join(f"\n  {line}" for line in self._last_words.decode(errors="replace").splitlines())
        return ChildError(f"{self} ended unexpectedly with exit code {code}{words}")

    async def stop(self, grace: float) -> None:
        """End the child: close its stdin, wait ``grace`` seconds, kill it. Always waits for its end."""
        with anyio.CancelScope(shield=True):  # bounded: a killed process ends
            if self.process.stdin is not None:
                await self.process.stdin.aclose()
            with anyio.move_on_after(grace):
                await self.process.wait()
            if self.process.returncode is None:
                self.process.kill()
            await self.process.aclose()
            await self._forget_stdin()

    async def _forget_stdin(self) -> None:
        """A child that was killed may have left orders unread. asyncio of Python 3.11.2 logs that as an exception of
        the pipe that was never retrieved, unless its end is waited for. anyio, whose stream this is, has no name for that."""
        writer = getattr(self.process.stdin, "_stream", None)
        if isinstance(writer, asyncio.StreamWriter):
            with anyio.move_on_after(GRACE_SECONDS), suppress(OSError):
                await writer.wait_closed()

    def __str__(self) -> str:
        return f"the {self.name} process (pid {self.pid})"


class ChildError(CommandError):
    """A child ended before its work was done.

    Attributes:
        is_root_cause: the death of this child explains what others then complain about.
    """

    def __init__(self, message: str, *, exit_code: int = 1, is_root_cause: bool = False) -> None:
        super().__init__(message, exit_code=exit_code)
        self.is_root_cause = is_root_cause

    @classmethod
    def reported(cls, child: Child, failed: Failed) -> ChildError:
        """What a child said itself before it ended, as one line. Wrong input needs no other explanation."""
        message = " ".join(failed.message.split())
        if failed.exit_code == 2:
            return cls(message, exit_code=2, is_root_cause=True)
        return cls(f"{child} failed: {message}", exit_code=failed.exit_code)


@asynccontextmanager
async def open_child(name: str, command: Sequence[str]) -> AsyncIterator[Child]:
    """Start a worker. On the way out it has ``GRACE_SECONDS`` to end by itself; none if the body failed or was cancelled."""
    process = await anyio.open_process(command, env=environment(), start_new_session=True)
    child = Child(name, process)
    grace = 0.0
    try:
        yield child
        grace = GRACE_SECONDS
    finally:
        await child.stop(grace)


def module_command(*arguments: str) -> Sequence[str]:
    """The command line of this very package with these arguments."""
    package = Path(aiodatadist.__file__).resolve().parent
    # The current folder is searched for modules only if the package itself is there, as in a checkout.
    isolation = [] if package.parent == Path.cwd() else ["-P"]
    return [sys.executable, *isolation, "-m", "aiodatadist", *arguments]


def environment() -> dict[str, str]:
    """Ours, with one thread per matrix product: the sums are then the same in every process, and cores are left."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **single}
