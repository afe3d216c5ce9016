"""Transfers that are submitted, polled and drained, by loops that never wait.

What is submitted is posted to the loop; what ended is kept until :meth:`Submissions.drain` takes it. Both are
bounded together: the thread that submits, drains.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from enum import StrEnum
from typing import Any

import anyio
import anyio.lowlevel

from aiodatadist.blocking.stats import Counters
from aiodatadist.cache.task import CacheTask
from aiodatadist.concurrency.loop_thread import LoopThread
from aiodatadist.concurrency.signal import Signal
from aiodatadist.device import TransferReport
from aiodatadist.errors import DataCorrupted, LinkClosed, LLMException, LLMStatusCode

LIMIT = 4096
"""Handles that may be submitted and not drained."""
LET_GO_SECONDS = 30.0
"""Seconds that a cancelled transfer has for ending; it is bounded by its own deadlines, which are shorter."""


class QueueFull(LLMException):
    """Too many handles are submitted and not drained. Nothing was started; ``drain()`` makes room."""

    default_status = LLMStatusCode.LLM_FAILED
    retryable = True


class HandleState(StrEnum):
    """``PENDING`` until the loop took it up, then ``RUNNING``; it ends in exactly one of the others."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_OPEN = frozenset({HandleState.PENDING, HandleState.RUNNING})


class Handle:
    """A submitted transfer. All of it may be asked from any thread; only :meth:`wait` waits.

    Attributes:
        operation: the call, for instance ``"pull_blocks"``.
        tag: what the caller submitted it with: a request, say.
    """

    __slots__ = ("_args", "_blocks", "_context", "_error", "_report", "_start", "_state", "_submissions", "_task", "_waiters",
                 "operation", "tag")  # fmt: skip

    def __init__(
        self,
        submissions: Submissions,
        operation: str,
        start: Callable[..., CacheTask],
        blocks: Sequence[int],
        tag: object,
        args: tuple[Any, ...] = (),
    ) -> None:
        """``start(*args)`` is called on the loop, in the context of the thread that submits it.

        A submission makes few objects that the garbage collector looks after: with twenty of them each thirtieth submission
        waits for a collection, 50 us and more.
        """
        self.operation = operation
        self.tag = tag
        self._submissions = submissions
        self._start: Callable[..., CacheTask] | None = start
        self._args = args
        self._blocks = blocks
        self._context = copy_context()  # the caller's span is that of the transfer, too
        self._state = HandleState.PENDING
        self._error: Exception | None = None
        self._report: TransferReport | None = None
        self._task: CacheTask | None = None
        self._waiters: list[Signal] | None = None

    def poll(self) -> HandleState:
        """How it is, in one word."""
        return self._state

    def done(self) -> bool:
        """It has ended, one way or another."""
        return self._state not in _OPEN

    def exception(self) -> Exception | None:
        """Why it failed; None while it is under way, when it succeeded, and when it was cancelled."""
        return self._error

    def failed_blocks(self) -> list[int]:
        """Destination blocks that may not be used, because it failed or was cancelled: all of them, or none; where checksums
        found that bytes changed on their way, the damaged ones.

        Of a slot its number. Empty while it is under way, when nothing is known yet.
        """
        if isinstance(self._error, DataCorrupted):
            return list(self._error.blocks)
        return list(self._blocks) if self._state in {HandleState.FAILED, HandleState.CANCELLED} else []

    def report(self) -> TransferReport | None:
        """Bytes, ranges and times of one that succeeded; else None."""
        return self._report

    def cancel(self) -> None:
        """Ask it to stop, without waiting. Its memory is free to use when it is done.

        Raises ForkError: it is under way, and this is a child of the process that submitted it.
        """
        if not self.done():
            self._start = None
            self._submissions.post(self._cancel)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, whatever it is, at most ``timeout`` seconds; whether it has ended.

        An interrupt cancels the transfer, and is re-raised when no byte can land any more.
        """
        return self.done() or self._submissions.call(lambda: self._join(timeout))

    # ---- on the loop ----

    def begin(self) -> None:
        """Its turn has come."""
        self._context.run(self._begin)

    def _begin(self) -> None:
        start, self._start = self._start, None
        if start is None:  # it was cancelled, or abandoned
            self._finish(HandleState.CANCELLED)
            return
        try:
            task = start(*self._args)
        except Exception as error:
            self._submissions.counters.refused(error)
            self._finish(HandleState.FAILED, error)
            return
        self._task, self._state = task, HandleState.RUNNING
        self._submissions.counters.watch(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: CacheTask) -> None:
        error = task.exception()
        if error is not None:
            self._finish(HandleState.FAILED, error)
        elif task.cancelled():
            self._finish(HandleState.CANCELLED)
        else:
            self._report = task.result()
            self._finish(HandleState.DONE)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self._finish(HandleState.CANCELLED)

    def _finish(self, state: HandleState, error: Exception | None = None) -> None:
        """Once. Other threads see the state last, when all that belongs to it is there."""
        if self.done():
            return
        self._start = None
        self._args = ()
        self._error = error
        self._state = state
        self._submissions._ended(self)
        for waiter in self._waiters or ():
            waiter.set()

    async def _join(self, seconds: float | None) -> bool:
        if self.done():
            return True
        ended = Signal()
        self._waiters = waiters = self._waiters or []
        waiters.append(ended)
        try:
            with anyio.move_on_after(seconds):
                await ended.wait()
        except asyncio.CancelledError:
            self._cancel()
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + LET_GO_SECONDS):
                await ended.wait()
            raise
        finally:
            waiters.remove(ended)
        return self.done()

    def __repr__(self) -> str:
        return f"<Handle {self.operation} {self._state}{'' if self.tag is None else f' {self.tag!r}'}>"


class Submissions:
    """Those of one cluster, while it is initialised.

    Its lock is held by submitting and draining threads for a few instructions at a time; the data path never has it.
    """

    def __init__(self, thread: LoopThread, counters: Counters) -> None:
        self.limit = LIMIT
        self.counters = counters
        self._thread = thread
        self._lock = threading.Lock()
        self._ended_handles: deque[Handle] = deque()
        self._undrained = 0
        self._is_closed = False
        self._under_way: set[Handle] = set()
        self._news = Signal()

    def submit(self, handle: Handle) -> None:
        """Let the loop begin it. Never waits.

        Raises:
            QueueFull: ``limit`` handles are not drained yet.
            LLMException: ``LLM_ENGINE_FINALIZED``: it is closed.
            ForkError: this is a child of the process that it belongs to.
        """
        self._thread.check_process()  # before the lock, which another thread may have had at the fork
        with self._lock:
            if self._is_closed:
                raise LLMException(
                    "nothing can be submitted: the cluster is finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED
                )
            if self._undrained >= self.limit:
                raise QueueFull(
                    f"{self._undrained} handles are submitted and not drained: the limit is {self.limit}",
                    operation=handle.operation,
                    hint="drain() takes those that have ended",
                )
            self._undrained += 1
            self._under_way.add(handle)
            self.post(handle.begin)

    def drain(self, max_items: int | None = None) -> list[Handle]:
        """What has ended since the last call, at most ``max_items``, oldest first. Each comes out once.

        Raises ForkError: this is a child of the process that they belong to.
        """
        self._thread.check_process()  # before the lock, which another thread may have had at the fork
        count = len(self._ended_handles) if max_items is None else min(max_items, len(self._ended_handles))
        taken: list[Handle] = []
        try:
            for _ in range(count):
                taken.append(self._ended_handles.popleft())
        except IndexError:  # another thread drains, too
            pass
        if taken:
            with self._lock:
                self._undrained -= len(taken)
        return taken

    def post(self, function: Callable[[], object]) -> None:
        self._thread.post(function)

    def call(self, function: Callable[[], Any]) -> Any:
        return self._thread.call(function)

    def abandon(self) -> None:
        """The engine is gone, and whatever is still here with it. Waits for the loop, on which the waiters are told."""
        with self._lock:
            self._is_closed = True
        if not self._under_way:
            return
        try:
            self.post(self._abandon)  # is run also where the wait for it is interrupted
            self.call(anyio.lowlevel.checkpoint)
        except LLMException:  # the loop is over, and nothing waits there
            self._abandon()

    # ---- on the loop ----

    def _ended(self, handle: Handle) -> None:
        self._under_way.discard(handle)
        self._ended_handles.append(handle)
        if not self._under_way:
            self._news.wake()

    async def close(self, seconds: float) -> None:
        """Refuse what is new, let what is under way finish for so long, and stop what is left then."""
        with self._lock:
            self._is_closed = True
        with anyio.move_on_after(seconds):
            await self._wait_idle()
        for handle in list(self._under_way):
            handle._cancel()
        with anyio.move_on_after(LET_GO_SECONDS):
            await self._wait_idle()

    async def _wait_idle(self) -> None:
        while self._under_way:
            await self._news.wait()

    def _abandon(self) -> None:
        for handle in list(self._under_way):
            handle._finish(HandleState.FAILED, LinkClosed("the cluster was finalized"))
