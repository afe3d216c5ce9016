"""Work in two halves: the first halves run one after the other, and behind them the second halves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import anyio.lowlevel

from aiodatadist._concurrency.signal import Signal


class Sequential:
    """Halves that run one after the other, for calls that gain nothing from overlap."""

    @property
    def is_busy(self) -> bool:
        """True while something runs behind."""
        return False

    async def go_on(self, work: Callable[[], Awaitable[object]], *, is_last: bool) -> None:
        """Do the work now."""
        await work()

    async def room(self) -> None:
        """Wait until at most one thing runs."""

    async def done(self) -> None:
        """Wait until nothing runs."""


class DoubleBuffer(Sequential):
    """Work that runs behind its owner, at most two pieces at a time."""

    def __init__(self, group: anyio.abc.TaskGroup) -> None:
        self._group = group
        self._going = 0
        self._ended = Signal()
        self._is_cut_short = False
        self.error: Exception | None = None

    @property
    def is_busy(self) -> bool:
        return self._going > 0

    async def go_on(self, work: Callable[[], Awaitable[object]], *, is_last: bool) -> None:
        """Start this work, even if everything has been cancelled. Wait for it only if it is the last."""
        if is_last:
            await work()
        else:
            self._going += 1
            self._group.start_soon(self._run, work)
            await anyio.lowlevel.checkpoint()  # the work starts here

    async def _run(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except Exception as error:
            self.error = self.error or error
            self._group.cancel_scope.cancel()
        except asyncio.CancelledError:
            self._is_cut_short = True
            raise
        finally:
            self._going -= 1
            self._ended.wake()

    async def room(self) -> None:
        """Wait until at most one piece of work runs. Raises what one of them raised."""
        await self._at_most(1)

    async def done(self) -> None:
        """Wait until no work runs. Raises what it raised."""
        await self._at_most(0)

    async def _at_most(self, count: int) -> None:
        while self._going > count:
            await self._ended.wait()
        if self.error is not None:
            raise self.error
        if self._is_cut_short:  # the work was cancelled, but this task not, or not yet
            await anyio.lowlevel.checkpoint_if_cancelled()
            raise asyncio.CancelledError("the work in the background was cancelled")


@asynccontextmanager
async def double_buffer() -> AsyncIterator[DoubleBuffer]:
    """Let work run behind the body; none runs once this has ended.

    Raises:
        Exception: what the work behind the body raised, which cancels the body; or what the body raised, once the work
            is done.
    """
    problem: Exception | None = None
    async with anyio.create_task_group() as group:
        buffer = DoubleBuffer(group)
        try:
            yield buffer
            await buffer.done()  # leaving a task group does not report a cancelled child
        except Exception as error:  # raised below: leaving the task group would wrap it in an ExceptionGroup
            problem = error
    if (first := buffer.error or problem) is not None:
        raise first
