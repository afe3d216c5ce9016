"""Two halves of a piece of work, one after the other, and the second half of each beside the first half of the next."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.abc


class InTurn:
    """One half after the other, and nothing beside anything: where there is nothing to gain."""

    @property
    def is_busy(self) -> bool:
        """Something goes on."""
        return False

    async def go_on(self, work: Callable[[], Awaitable[object]], *, is_last: bool) -> None:
        await work()

    async def done(self) -> None:
        """Nothing is going on."""


class Behind(InTurn):
    """Whatever goes on beside its owner: one thing at a time."""

    def __init__(self, group: anyio.abc.TaskGroup) -> None:
        self._group = group
        self._ended: anyio.Event | None = None
        self.error: Exception | None = None

    @property
    def is_busy(self) -> bool:
        return self._ended is not None and not self._ended.is_set()

    async def go_on(self, work: Callable[[], Awaitable[object]], *, is_last: bool) -> None:
        """Begin this, even if all has been cancelled, and return, unless it is the last. Nothing else may be going on."""
        if is_last:
            await work()
        else:
            self._ended = anyio.Event()
            self._group.start_soon(self._run, work, self._ended)

    async def _run(self, work: Callable[[], Awaitable[object]], ended: anyio.Event) -> None:
        try:
            await work()
        except Exception as error:
            self.error = error
            self._group.cancel_scope.cancel()
        finally:
            ended.set()

    async def done(self) -> None:
        """Wait until nothing is going on. Raises what that raised."""
        if self._ended is not None:
            await self._ended.wait()
        if self.error is not None:
            raise self.error


@asynccontextmanager
async def one_behind() -> AsyncIterator[Behind]:
    """Nothing goes on any more when this has ended.

    Raises:
        Exception: what went on beside the body raised, which cancels the body; or what the body raised, once that is done.
    """
    problem: Exception | None = None
    async with anyio.create_task_group() as group:
        behind = Behind(group)
        try:
            yield behind
        except Exception as error:  # a task group would raise a group of one
            problem = error
    if (first := behind.error or problem) is not None:
        raise first
