"""The life of a cache: a task that holds all that it has, on one event loop, in one process, from opening to closing."""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from asyncio import _get_running_loop  # get_running_loop() raises where there is none, which is fine here
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

from aiodatadist.concurrency import forks
from aiodatadist.concurrency.outlast import outlast
from aiodatadist.context_caching import checks as rules
from aiodatadist.context_caching.errors import EmsInternalError, EmsInvalidArgument, translated
from aiodatadist.context_caching.results import CcResult

logger = logging.getLogger(__name__)


class Life:
    """Belongs to the event loop that it was made on. Raises EmsInvalidArgument: there is none.

    Attributes:
        stopping: it is to end, or has ended.
    """

    def __init__(self) -> None:
        rules.on_a_loop("a ContextCache")
        self.stopping = anyio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._is_closed = False
        self._reason: str | None = None
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()

    async def start(self, live: Callable[[asyncio.Future[None]], Coroutine[Any, Any, None]]) -> None:
        """Run this in a task, and wait until it has set the future. Raises what it raised before that."""
        started: asyncio.Future[None] = self._loop.create_future()
        # The one task that is in no task group, because it holds the group: aclose() ends and awaits it.
        self._runner = asyncio.create_task(live(started), name="aiodatadist context cache")
        self._runner.add_done_callback(self._on_end)
        forks.guard(self._runner)
        try:
            await asyncio.wait([started, self._runner], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._is_closed = True
            self.stopping.set()  # in case that the cancellation gets lost on its way
            self._runner.cancel()
            await _ended(self._runner)
            raise
        if not started.done():
            started.cancel()
            await self._runner

    def _on_end(self, runner: asyncio.Task[None]) -> None:
        """The task is over. It is not cancelled by aclose(), but when its event loop cancels all tasks."""
        if runner.cancelled() and not self._is_closed:
            words = "a ContextCache was never closed: use async with, or await aclose()"
            warnings.warn(words, ResourceWarning, source=self, stacklevel=2)

    async def keep(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A task of the cache's that must not fail: if it does, the cache has ended, and everybody is told why."""
        try:
            await work()
        except Exception as error:
            if self._reason is None:
                self._reason = repr(error)
                logger.exception("this cache has ended: %s", self._reason)
            raise

    @property
    def is_over(self) -> bool:
        """It is closed, or ends, or has ended."""
        return self._is_closed or self.stopping.is_set() or self._reason is not None or self._loop.is_closed()

    @property
    def is_abandoned(self) -> bool:
        """Its event loop was closed without ending it."""
        is_ours = self._pid == os.getpid()
        return is_ours and self._loop.is_closed() and self._runner is not None and not self._runner.done()

    def failure(self, partial: CcResult | None = None) -> EmsInternalError | None:
        """Why the cache has ended without being closed; None if it has not."""
        if self._reason is None:
            return None
        return EmsInternalError(f"this cache has ended: {self._reason}", partial=partial)

    def check(self) -> None:
        """Raises EmsException: the cache cannot be used, or not from here."""
        if self._pid != os.getpid():
            raise EmsInternalError("this cache was opened before a fork: start processes with spawn")
        if self._is_closed:
            raise EmsInvalidArgument("this cache is closed")
        if (failure := self.failure()) is not None:
            raise failure
        self._check_loop()
        if self.stopping.is_set():
            raise EmsInternalError("this cache has ended: its task was cancelled")

    def _check_loop(self) -> None:
        if self._loop.is_closed():
            raise EmsInvalidArgument("this cache has ended with its event loop: open another one on this loop")
        running = _get_running_loop()
        if running is None:
            raise EmsInvalidArgument("there is no event loop here: call this on the event loop that opened the cache")
        if running is not self._loop:
            raise EmsInvalidArgument(
                "this cache belongs to another event loop: call this on the event loop that opened the cache"
            )

    async def aclose(self) -> None:
        """End the task and wait for it. Does nothing in a forked child; tells how it ended only once.

        Raises:
            EmsInvalidArgument: this is another event loop, and its own is not closed.
            EmsException: it had ended of an error, or with its event loop; or to end it failed.
        """
        runner = self._runner
        if runner is None or self._pid != os.getpid():
            return
        is_told = self._is_closed
        if is_told and (runner.done() or self._loop.is_closed()):
            return
        if not self._loop.is_closed():
            self._check_loop()
            self._is_closed = True
            self.stopping.set()
            try:
                await asyncio.wait([runner])
            except asyncio.CancelledError:
                await _ended(runner)
                raise
        self._is_closed = True
        if is_told:
            return
        if not runner.done():
            raise EmsInternalError("the event loop of this cache was closed before the cache: nothing was given back")
        if not runner.cancelled() and (error := runner.exception()) is not None:
            failure = self.failure() or translated(error, "the cache was not closed properly")
            raise failure from (None if failure is error else error)


async def _ended(task: asyncio.Task[None]) -> None:
    """Until it has; what it raised is logged by those who see it."""
    await outlast(task.done, lambda: asyncio.wait([task]))
    if not task.cancelled():
        task.exception()
