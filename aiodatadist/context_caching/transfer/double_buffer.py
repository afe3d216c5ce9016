"""Pieces of work in two halves: the first halves one after the other, and behind them the second halves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import anyio.lowlevel

from aiodatadist.concurrency.signal import Signal


class Sequential:
    """One half after the other, and nothing beside anything: where there is nothing to gain."""

    @property
    def is_busy(self) -> bool:
        """Something goes on."""
        return False

    async def go_on(self, work: Callable[[], Awaitable[object]], *, is_last: bool) -> None:
        await work()

    async def room(self) -> None:
        """Not more than one thing is going on."""

    async def done(self) -> None:
        """Nothing is going on."""


class DoubleBuffer(Sequential):
    """What goes on beside its owner: one thing, or two."""

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
        """Begin this, even if all has been cancelled, and return, unless it is the last."""
        if is_last:
            await work()
        else:
            self._going += 1
            self._group.start_soon(self._run, work)
            await anyio.lowlevel.checkpoint()  # here it begins

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
        """Wait until not more than one thing is going on. Raises what one of them raised."""
        await self._at_most(1)

    async def done(self) -> None:
        """Wait until nothing is going on. Raises what that raised."""
        await self._at_most(0)

    async def _at_most(self, count: int) -> None:
        while self._going > count:
            await self._ended.wait()
        if self.error is not None:
            raise self.error
        if self._is_cut_short:  # and we are not, or not yet, because what we waited for came first
            await anyio.lowlevel.checkpoint_if_cancelled()
            raise asyncio.CancelledError("what went on behind was cancelled")


@asynccontextmanager
async def double_buffer() -> AsyncIterator[DoubleBuffer]:
    """Things go on behind the body, and nothing any more when this has ended.

    Raises:
        Exception: what went on beside the body raised, which cancels the body; or what the body raised, once that is done.
    """
    problem: Exception | None = None
    async with anyio.create_task_group() as group:
        buffer = DoubleBuffer(group)
        try:
            yield buffer
            await buffer.done()  # the end of a task group is silent about a cancellation
        except Exception as error:  # a task group would raise a group of one
            problem = error
    if (first := buffer.error or problem) is not None:
        raise first
