"""The life of an adapter's object on an event loop in another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import anyio
import anyio.abc

from aiodatadist._concurrency.resident import Misuse, Resident
from aiodatadist.errors import InternalError


class LoopService:
    """Resources and a task group that are open from :meth:`open` to :meth:`close`. Both are awaited on the same loop.

    Attributes:
        group: for tasks that end with it. Set once :meth:`open` has returned.
    """

    group: anyio.abc.TaskGroup

    def __init__(self, what: str) -> None:
        """Keep the noun for messages, for instance ``"value service"``."""
        self._what = what
        self._resident: Resident | None = None

    async def open(
        self, enter: Callable[[AsyncExitStack], Awaitable[object]], leave: Callable[[], object] = lambda: None
    ) -> None:
        """Open resources. Raises what ``enter`` raises, with everything closed.

        Args:
            enter: opens resources. What it puts on the stack is closed at the end, once all tasks of the group have
                ended.
            leave: called at the end, before the tasks of the group are cancelled.
        """
        resident = self._resident = Resident(
            f"aiodatadist {self._what}", self._refusal, what=self._what, unfinished=f"a {self._what} was not closed"
        )

        async def live(started: asyncio.Future[None]) -> None:
            async with AsyncExitStack() as stack:
                await enter(stack)  # before there is a group, which would wrap an error in an ExceptionGroup
                self.group = await stack.enter_async_context(anyio.create_task_group())
                started.set_result(None)
                await resident.stopping.wait()
                leave()
                self.group.cancel_scope.cancel()

        await resident.start(live)

    async def close(self) -> None:
        """Cancel all tasks, close what was opened, and raise what failed."""
        if self._resident is not None:
            await self._resident.stop()
            self._resident.result()

    @property
    def is_ending(self) -> bool:
        """True once :meth:`close` was called, or the loop ends."""
        return self._resident is None or self._resident.stopping.is_set()

    @property
    def error(self) -> BaseException | None:
        """The error that ended it, or None if it was closed in order. May be read from any thread."""
        return None if self._resident is None else self._resident.error

    def _refusal(self, misuse: Misuse, reason: str | None) -> Exception:
        return InternalError(f"{self._what}: {reason or misuse.value}")
