"""Child processes of a command: started, fed, read, signalled and ended. None is left behind.

A child ends when its stdin closes, and is killed when its parent dies (``pipes.die_with_parent``). It has its own session:
Ctrl-C in a terminal reaches only the parent, and a signal reaches the child with everything that it started.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias, TypeVar

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from pydantic import TypeAdapter

import aiodatadist
from aiodatadist._cli.kit.pipes import Message

GRACE_SECONDS = 1.0
"""Seconds that a child has to end after its stdin closed."""

REAP_SECONDS = 10.0
"""Seconds within which a killed child must end. One that is stuck in a driver may never end, and is left behind."""

LINE_BYTES = 1 << 28
"""The longest line of a child: ten seconds of a benchmark are a million latencies in one line."""

_LAST_WORDS = 4096
"""Bytes kept of what a child writes to stderr: a traceback fits."""

_GONE = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError, ConnectionError)
"""Errors of a pipe whose other end has closed, or that was closed here."""

Command: TypeAlias = Callable[[str], Sequence[str]]
"""Returns the command line that starts the worker of this name."""

ReportT = TypeVar("ReportT")


class Ended(NamedTuple):
    """The end of a child: its exit code (negative: the signal that killed it), and the end of its stderr."""

    code: int
    last_words: str


class Child:
    """A child process that accepts orders and sends reports, a line each."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self._lines = None if process.stdout is None else BufferedByteReceiveStream(process.stdout)
        self._last_words = b""
        self._said_all = anyio.Event()
        if process.stderr is None:
            self._said_all.set()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def last_words(self) -> str:
        """The end of the child's stderr, as far as :meth:`keep_last_words` has read it."""
        return self._last_words.decode(errors="replace")

    async def order(self, order: Message) -> None:
        """Send an order. No effect if the child has ended; :meth:`ended` returns why."""
        await self.feed(order.line())

    async def feed(self, line: bytes) -> None:
        """Send a line. No effect if the child has ended."""
        if self.process.stdin is not None:
            with suppress(*_GONE):
                await self.process.stdin.send(line)

    async def close_orders(self) -> None:
        """Close the child's stdin: no further order follows."""
        if self.process.stdin is not None:
            await self.process.stdin.aclose()

    async def line(self) -> bytes | None:
        """Return the next line of the child's stdout, or None if the child has closed it."""
        assert self._lines is not None
        try:
            return await self._lines.receive_until(b"\n", LINE_BYTES)
        except _GONE:
            return None

    async def reports(self, adapter: TypeAdapter[ReportT]) -> AsyncIterator[ReportT]:
        """Yield the child's reports until it closes its stdout."""
        while (line := await self.line()) is not None:
            yield adapter.validate_json(line)

    async def keep_last_words(self) -> None:
        """Read stderr to its end, so that the child never waits for it."""
        assert self.process.stderr is not None
        with suppress(*_GONE):
            async for data in self.process.stderr:
                self._last_words = (self._last_words + data)[-_LAST_WORDS:]
        self._said_all.set()

    async def ended(self) -> Ended:
        """Wait for the child's end, and return how it ended."""
        code = await self.process.wait()
        with anyio.move_on_after(GRACE_SECONDS):
            await self._said_all.wait()
        return Ended(code, self.last_words)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child and to all that it started, unless the child has ended."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def stop(self, grace: float = 0.0) -> int | None:
        """End the child, and return its exit code, or None if it had to be killed.

        With ``grace`` its stdin closes first, and it has that many seconds to end by itself.
        """
        with anyio.CancelScope(shield=True):  # bounded by the two limits
            if grace:
                await self.close_orders()
                with anyio.move_on_after(grace):
                    await self.process.wait()
            code = self.process.returncode
            self.signal(signal.SIGKILL)
            self._close_pipes()
            with anyio.move_on_after(REAP_SECONDS):
                await self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                if pipe is not None:
                    await pipe.aclose()
            await self._forget_stdin()
            self._close_transport()
        return code

    async def _forget_stdin(self) -> None:
        """Wait for the end of the pipe to a child that was killed, and may have left orders unread.

        Otherwise asyncio of Python 3.11.2 logs that as an exception of the pipe that was never retrieved. anyio, whose
        stream this is, has no call for it.
        """
        writer = getattr(self.process.stdin, "_stream", None)
        if isinstance(writer, asyncio.StreamWriter):
            with anyio.move_on_after(GRACE_SECONDS), suppress(OSError):
                await writer.wait_closed()

    def _close_pipes(self) -> None:
        """Close this end of the pipes, for which anyio has no call.

        With older anyio, the wait for a process ends once its pipes have, and asyncio stops reading a pipe that is full:
        stopping a child with unread reports then took as long as the limit allows.
        """
        transport = self._transport()
        for number in range(3):
            pipe = None if transport is None else transport.get_pipe_transport(number)
            if pipe is not None:
                pipe.close()

    def _close_transport(self) -> None:
        """Close asyncio's transport. That of a child that is not gone would outlive its loop, which asyncio reports."""
        transport = self._transport()
        if transport is not None:
            transport.close()

    def _transport(self) -> asyncio.SubprocessTransport | None:
        process = getattr(self.process, "_process", None)
        return getattr(process, "_transport", None)

    def __str__(self) -> str:
        return f"the {self.name} process (pid {self.pid})"


async def start_child(
    name: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stderr: int | IO[bytes] | None = subprocess.PIPE,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start a child, which the caller must :meth:`~Child.stop`. With ``stderr=None`` it writes to this process's stderr."""
    process = await anyio.open_process(command, env=env, stderr=stderr, start_new_session=True, pass_fds=pass_fds)
    return Child(name, process)


@asynccontextmanager
async def open_child(
    name: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stderr: int | None = subprocess.PIPE,
    pass_fds: Sequence[int] = (),
    grace: float = GRACE_SECONDS,
) -> AsyncIterator[Child]:
    """Start a child, and end it ``grace`` seconds after the block, or at once if the block failed or was cancelled."""
    child = await start_child(name, command, env=env, stderr=stderr, pass_fds=pass_fds)
    seconds = 0.0
    try:
        yield child
        seconds = grace
    finally:
        await child.stop(seconds)


def module_command(*arguments: str) -> Sequence[str]:
    """Return the command line that runs this package with these arguments."""
    package = Path(aiodatadist.__file__).resolve().parent
    # The current folder is searched for modules only if the package itself is there, as in a checkout.
    isolation = [] if package.parent == Path.cwd() else ["-P"]
    return [sys.executable, *isolation, "-m", "aiodatadist", *arguments]


def environment() -> dict[str, str]:
    """Return this process's environment, with one thread per matrix product.

    The sums are then the same in every process, and the other cores stay free.
    """
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **single}
