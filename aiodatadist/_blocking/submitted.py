"""Transfers that are submitted, polled and drained by loops that never wait.

Submitted transfers are posted to the loop. Ended ones are kept until :meth:`Submissions.drain` takes them. Both
together are bounded: a thread that submits must drain.
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

from aiodatadist._blocking.stats import Counters
from aiodatadist._cache.task import CacheTask
from aiodatadist._concurrency.loop_thread import LoopThread
from aiodatadist._concurrency.signal import Signal
from aiodatadist._device import TransferReport
from aiodatadist.errors import DataCorrupted, LinkClosed, LLMException, LLMStatusCode

LIMIT = 4096
"""Most handles that may be submitted and not drained."""
LET_GO_SECONDS = 30.0
"""Seconds in which a cancelled transfer must end. Its own deadlines are shorter."""


class QueueFull(LLMException):
    """Too many handles are submitted and not drained. Nothing was started; ``drain()`` makes room."""

    default_status = LLMStatusCode.LLM_FAILED
    retryable = True


class HandleState(StrEnum):
    """The state of a handle: ``PENDING``, ``RUNNING`` once the loop has started it, then one of the others."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_OPEN = frozenset({HandleState.PENDING, HandleState.RUNNING})


class Handle:
    """A submitted transfer. Its methods may be called from any thread; only :meth:`wait` waits.

    Attributes:
        operation: the call, for instance ``"pull_blocks"``.
        tag: the object that the caller submitted with it, for instance a request.
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
        """Keep the call: ``start(*args)`` runs on the loop, in the context of the thread that submits it.

        A submission creates few objects that the garbage collector tracks: with twenty of them, every thirtieth
        submission would wait for a collection of 50 us and more.
        """
        self.operation: str = operation
        self.tag: object = tag
        self._submissions = submissions
        self._start: Callable[..., CacheTask] | None = start
        self._args = args
        self._blocks = blocks
        self._context = copy_context()  # so that the caller's tracing span is the transfer's, too
        self._state = HandleState.PENDING
        self._error: Exception | None = None
        self._report: TransferReport | None = None
        self._task: CacheTask | None = None
        self._waiters: list[Signal] | None = None

    def poll(self) -> HandleState:
        """Return the state."""
        return self._state

    def done(self) -> bool:
        """Return True if it has ended, with any outcome."""
        return self._state not in _OPEN

    def exception(self) -> Exception | None:
        """Return why it failed; None while it runs, if it succeeded, and if it was cancelled."""
        return self._error

    def failed_blocks(self) -> list[int]:
        """Return the destination blocks that must not be used because it failed or was cancelled: all of them or none.

        If checksums found damaged blocks, return only those. A slot is given by its number. Empty while the transfer
        runs, because nothing is known yet.
        """
        if isinstance(self._error, DataCorrupted):
            return list(self._error.blocks)
        return list(self._blocks) if self._state in {HandleState.FAILED, HandleState.CANCELLED} else []

    def report(self) -> TransferReport | None:
        """Return bytes, ranges and times if it succeeded; otherwise None."""
        return self._report

    def cancel(self) -> None:
        """Ask it to stop, without waiting. Its memory may be reused once it is done.

        Raises ForkError if it is running and this is a child of the process that submitted it.
        """
        if not self.done():
            self._start = None
            self._submissions.post(self._cancel)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, whatever the outcome, at most ``timeout`` seconds; return True if it has ended.

        An interrupt cancels the transfer, and is raised again once no more bytes can land.
        """
        return self.done() or self._submissions.call(lambda: self._join(timeout))

    # ---- on the loop ----

    def _begin(self) -> None:
        """Start the transfer, in the context of its caller."""
        self._context.run(self._begin_here)

    def _begin_here(self) -> None:
        start, self._start = self._start, None
        if start is None:  # cancelled or abandoned meanwhile
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
        """End it, once. Other threads see the state last, when everything that belongs to it is in place."""
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
            # shielded: bytes may land until it has ended
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + LET_GO_SECONDS):
                await ended.wait()
            raise
        finally:
            waiters.remove(ended)
        return self.done()

    def __repr__(self) -> str:
        return f"<Handle {self.operation} {self._state}{'' if self.tag is None else f' {self.tag!r}'}>"


class Submissions:
    """The submitted transfers of one cluster, while it is initialised.

    Threads that submit or drain hold its lock for a few instructions; the data path never does.
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
        """Let the loop start it. Never waits.

        Raises:
            QueueFull: if ``limit`` handles are not drained yet.
            LLMException: with ``LLM_ENGINE_FINALIZED`` if it is closed.
            ForkError: if this is a child of the process to which it belongs.
        """
        self._thread.check_process()  # before the lock, which another thread may have held at the fork
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
            self.post(handle._begin)

    def drain(self, max_items: int | None = None) -> list[Handle]:
        """Return handles that have ended since the last call, oldest first, at most ``max_items``; each once.

        Raises ForkError if this is a child of the process to which they belong.
        """
        self._thread.check_process()  # before the lock, which another thread may have held at the fork
        count = len(self._ended_handles) if max_items is None else min(max_items, len(self._ended_handles))
        taken: list[Handle] = []
        try:
            for _ in range(count):
                taken.append(self._ended_handles.popleft())
        except IndexError:  # another thread drains at the same time
            pass
        if taken:
            with self._lock:
                self._undrained -= len(taken)
        return taken

    def post(self, function: Callable[[], object]) -> None:
        """Run a function on the loop, without waiting."""
        self._thread.post(function)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the loop, and wait for its result."""
        return self._thread.call(function)

    def abandon(self) -> None:
        """Fail the transfers that are left, because the engine has ended. Waits for the loop."""
        with self._lock:
            self._is_closed = True
        if not self._under_way:
            return
        try:
            self.post(self._abandon)  # runs even if the wait for it is interrupted
            self.call(anyio.lowlevel.checkpoint)
        except LLMException:  # the loop has ended, and nothing waits there
            self._abandon()

    # ---- on the loop ----

    def _ended(self, handle: Handle) -> None:
        self._under_way.discard(handle)
        self._ended_handles.append(handle)
        if not self._under_way:
            self._news.wake()

    async def close(self, seconds: float) -> None:
        """Refuse new transfers, let running ones finish for ``seconds``, and stop the rest."""
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
