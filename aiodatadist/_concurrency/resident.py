"""The task that holds everything of one object on an event loop: from opening to the end, on one loop, in one process.

An object that is opened, lives beside its callers and is closed, such as a cluster or a context cache, has a task group
for its work. A task group lives in the task that entered it, and that must not be the caller's, because the caller may
end before the object does. So each such object has a :class:`Resident`.

Who owns what
    The object owns its Resident. The Resident owns one task, the only one of the object that is in no task group,
    because it holds the group. That task runs the object's *life*: a coroutine function that opens everything in an
    ``AsyncExitStack``, enters a task group, sets the future it was given, waits for :attr:`Resident.stopping`, and
    closes everything again. Every other task of the object is in that group.

What cancellation means
    Cancelling :meth:`Resident.start` cancels the opening and closes what it opened; then the cancellation is delivered.
    Cancelling :meth:`Resident.stop` does not keep the life from ending, in at most ``patience`` seconds; then it is
    delivered.
    The Resident's own task is cancelled only by a loop that cancels all its tasks. Then the object was forgotten, which
    is a ResourceWarning.

What it guards
    Everything of the object belongs to the loop and the process in which it was opened. The ``check`` methods compare
    them with the caller's, and raise what ``refuse`` makes of a :class:`Misuse`: each interface has its own exceptions
    and words. A forked child leaves the task alone (:mod:`aiodatadist._concurrency.forks`), and there
    :meth:`Resident.stop` has no effect.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import warnings
from asyncio import _get_running_loop  # get_running_loop() raises where there is none, which is fine here
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any

import anyio

from aiodatadist._concurrency import forks
from aiodatadist._concurrency.outlast import outlast_future

logger = logging.getLogger(__name__)


class Misuse(Enum):
    """The reasons why a call is refused, in the order in which they are checked."""

    FORKED = "this is a child of the process that it was opened in"
    STOPPED = "its owner has stopped it"
    FAILED = "a task of it failed"
    LOOP_CLOSED = "its event loop is closed"
    NO_LOOP = "no event loop runs in this thread"
    OTHER_LOOP = "the event loop of this thread is another one"
    CANCELLED = "its task was cancelled"


Refuse = Callable[[Misuse, str | None], Exception]
"""Makes the exception to be raised. For FAILED it gets the reason as well, and for FORKED the names of the processes."""

Life = Callable[["asyncio.Future[None]"], Coroutine[Any, Any, None]]


class Resident:
    """The resident task of an object, on the event loop that runs where the object is made.

    Raises what ``refuse`` makes of NO_LOOP if no event loop runs there.

    Args:
        task_name: the name of the task.
        what: the name of the object, for the log.
        unfinished: the warning if its loop ends before it is stopped.
        patience: seconds that its end may take once the caller of :meth:`start` or :meth:`stop` was cancelled.

    Attributes:
        loop, pid: the loop and process in which it lives.
        stopping: set when it is to end, or has ended.
        reason: why a task failed that must not fail, in words; None if none has.
    """

    def __init__(
        self, task_name: str, refuse: Refuse, *, what: str, unfinished: str, patience: float = math.inf
    ) -> None:
        if _get_running_loop() is None:
            raise refuse(Misuse.NO_LOOP, None)
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.pid: int = os.getpid()
        self._generation = forks.generation  # cheaper to compare than os.getpid(), which takes 0.2 us
        self.stopping: anyio.Event = anyio.Event()
        self.reason: str | None = None
        self._task_name = task_name
        self._refuse = refuse
        self._what = what
        self._unfinished = unfinished
        self._patience = patience
        self._task: asyncio.Task[None] | None = None
        self._has_started = False
        self._is_stopped = False

    # ---- life ----

    async def start(self, live: Life) -> None:
        """Run this life in the task, and wait until it has set the future. Raises what the life raised before that."""
        started: asyncio.Future[None] = self.loop.create_future()
        task = self._task = asyncio.create_task(live(started), name=self._task_name)
        task.add_done_callback(self._warn_if_forgotten)
        forks.guard(task)
        try:
            await asyncio.wait([started, task], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._is_stopped = True
            self.stopping.set()  # in case the cancellation gets lost on its way
            if not started.done():
                task.cancel()
            await self._outlast(task)
            raise
        if not started.done():
            started.cancel()
            await task
        self._has_started = True

    def _warn_if_forgotten(self, task: asyncio.Task[None]) -> None:
        """Warn if the event loop ended first: it cancels all tasks, but :meth:`stop` does not cancel this one."""
        if task.cancelled() and self._has_started and not self._is_stopped:
            warnings.warn(self._unfinished, ResourceWarning, source=self, stacklevel=2)

    async def keep(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a task of the group that must not fail: if it does, everything here ends, and callers are told why."""
        try:
            await work()
        except Exception as error:
            if self.reason is None:
                self.reason = repr(error)
                logger.exception("%s has ended: %s", self._what, self.reason)
            raise

    async def stop(self) -> bool:
        """End the task, and wait for it. Has no effect in a forked child, or if the loop is closed.

        Returns:
            True if the caller must report how it ended, because it is the first caller, and not in a forked child.

        Raises what ``refuse`` makes of a misuse if the caller is on another loop, or on none, while the object's is not
        closed.
        """
        task = self._task
        if task is None or self.pid != os.getpid():
            return False
        is_first = not self._is_stopped
        if not self.loop.is_closed() and (is_first or not task.done()):
            self.check_loop()
            self._is_stopped = True
            self.stopping.set()
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                await self._outlast(task)
                raise
        self._is_stopped = True
        return is_first

    async def _outlast(self, task: asyncio.Task[None]) -> None:
        """Wait for the end after a cancellation.

        The cancelled caller cannot get a failure, so it is logged, unless it was before.
        """
        if await outlast_future(task, self._patience) and not task.cancelled():
            error = task.exception()
            if error is not None and self.reason is None:
                logger.error("%s failed to end", self._what, exc_info=error)

    def result(self) -> None:
        """Raise what the task raised, if anything. The task must have ended."""
        if self._task is not None:
            self._task.result()

    @property
    def error(self) -> BaseException | None:
        """The exception that the task raised; None if it has not ended, or was cancelled."""
        task = self._task
        return task.exception() if task is not None and task.done() and not task.cancelled() else None

    # ---- guards ----

    @property
    def is_alive(self) -> bool:
        """True if it is of this process, its event loop is open, and its task has not ended, or not begun."""
        return self.is_reachable and not self.has_ended

    @property
    def is_reachable(self) -> bool:
        """True if it is of this process, and its event loop is not closed."""
        return self.pid == os.getpid() and not self.loop.is_closed()

    @property
    def is_over(self) -> bool:
        """True if it was stopped, is ending, or has ended."""
        return self._is_stopped or self.stopping.is_set() or self.reason is not None or self.loop.is_closed()

    @property
    def is_abandoned(self) -> bool:
        """True if it is of this process, and its event loop was closed without ending it."""
        is_running = self._task is not None and not self._task.done()
        return is_running and self.pid == os.getpid() and self.loop.is_closed()

    @property
    def has_ended(self) -> bool:
        """True if its task has ended."""
        return self._task is not None and self._task.done()

    def check(self) -> None:
        """Check that it can be used from here; otherwise raise what ``refuse`` makes of the misuse."""
        self.check_process()
        if self._is_stopped:
            raise self._refuse(Misuse.STOPPED, None)
        if self.reason is not None:
            raise self._refuse(Misuse.FAILED, self.reason)
        self.check_loop()
        if self.stopping.is_set():
            raise self._refuse(Misuse.CANCELLED, None)

    def check_here(self) -> None:
        """Check that the caller is in the same process and on the same loop; otherwise raise what ``refuse`` makes of it."""
        # the fast path, because every await comes this way
        if _get_running_loop() is self.loop and self._generation == forks.generation:
            return
        self.check_process()
        self.check_loop()

    def check_process(self) -> None:
        """Check that this is the process in which it was opened; otherwise raise what ``refuse`` makes of FORKED."""
        if self.pid != os.getpid():
            raise self._refuse(Misuse.FORKED, forks.since(self.pid))

    def check_loop(self) -> None:
        """Check that the caller is on the same loop; otherwise raise what ``refuse`` makes of it."""
        if _get_running_loop() is None and not self.loop.is_closed():
            raise self._refuse(Misuse.NO_LOOP, None)
        self.check_no_other_loop()

    def check_no_other_loop(self) -> None:
        """Check as :meth:`check_loop` does, but allow a thread without a loop."""
        if self.loop.is_closed():
            raise self._refuse(Misuse.LOOP_CLOSED, None)
        running = _get_running_loop()
        if running is not None and running is not self.loop:
            raise self._refuse(Misuse.OTHER_LOOP, None)
