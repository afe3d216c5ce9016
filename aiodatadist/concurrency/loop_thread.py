"""One event loop in one background thread, for callers that have none."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import threading
import warnings
from asyncio import _get_running_loop  # get_running_loop() raises where there is none, which is fine here
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import anyio

from aiodatadist.concurrency.in_callbacks import Scope, Spawner
from aiodatadist.errors import DeviceError, ForkError, LLMException, LLMStatusCode, TransferError

logger = logging.getLogger(__name__)

T = TypeVar("T")

new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
"""What the thread runs: the loop of the process's policy, for instance uvloop's."""
LOOK_UP = 0.2
"""Seconds after which an interrupt is noticed at the latest."""
PORTION = 8
"""Functions that the loop runs before it looks after others: to begin a transfer takes some 50 us."""
LAST_CALLS = 30.0
"""Seconds that calls which are under way have for ending, when the last cluster is finalized."""

_wake: Callable[[int, int], int] = ctypes.PyDLL(None).eventfd_write
"""Keeps the interpreter lock, which ``os.eventfd_write`` lets go of: a submission would wait for the loop's turn."""


class _Call:
    """A call on its way over the loop and back. Its caller waits for :attr:`future`, which is always settled."""

    def __init__(self, function: Callable[[], Awaitable[Any]]) -> None:
        self.future: Future[Any] = Future()
        self._function = function
        self._scope: Scope | None = None

    def start(self, tasks: Spawner) -> None:
        if not self.future.done():
            self._scope = Scope()
            tasks.start_soon(self._run, self._scope)

    async def _run(self, scope: Scope) -> None:
        """In a task of the loop's. That what is called was cancelled from elsewhere is no reason to cancel others."""
        try:
            with scope:
                self._settle(await self._function(), None)
        except Exception as error:
            self._settle(None, error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
        finally:
            if not self.future.done():
                self._settle(None, TransferError("the call was stopped, because it was cancelled"))

    def cancel(self) -> None:
        """Make it end as soon as it safely can. If it never began it never will."""
        if self._scope is None:
            self._settle(None, TransferError("the call was stopped before it began"))
        else:
            self._scope.cancel()

    def fail(self, error: BaseException) -> None:
        """It cannot begin, or ends with this. Nothing happens if it is settled."""
        if not self.future.done():
            self.future.set_exception(error)

    def _settle(self, result: Any, error: Exception | None) -> None:
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class LoopThread:
    """A running event loop. :meth:`call` waits for it, :meth:`post` does not; both may be used from any other thread.

    It is a daemon: a process that never finalizes can end all the same, and its peers see its connections close.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._calls: set[_Call] = set()
        self._posted: deque[Callable[[], object]] = deque()
        self._is_over = False
        self._lock = threading.RLock()  # a signal handler, or a finalizer, of the thread that has it may post, too
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._tasks: Spawner
        self._stopping: anyio.Event
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="aiodatadist loop", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._bell)
            raise DeviceError("no thread can be started", hint="a limit of processes or memory is reached") from error
        try:
            started.result()
        except BaseException:  # an interrupt may have come when it had started already
            _outlast(started)
            if started.exception() is None:
                self.join()
            raise

    def _run(self, started: Future[None]) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(self._serve(started))
        except BaseException as error:
            logger.exception("the event loop of the blocking calls failed")
            if not started.done():
                started.set_exception(error)
        finally:
            with self._lock:  # no thread rings any more
                self._is_over = True
                os.close(self._bell)
            for call in list(self._calls):
                if not call.future.done():
                    call.future.set_exception(_over())

    async def _serve(self, started: Future[None]) -> None:
        loop = asyncio.get_running_loop()
        self._stopping = anyio.Event()
        loop.add_reader(self._bell, self._answer)
        try:
            async with anyio.create_task_group() as group:
                self._tasks = Spawner(group)
                started.set_result(None)
                await self._stopping.wait()
                group.cancel_scope.deadline = anyio.current_time() + LAST_CALLS
        finally:
            loop.remove_reader(self._bell)

    def _answer(self) -> None:
        """The bell rang."""
        os.eventfd_read(self._bell)
        self._run_posted()

    def _run_posted(self) -> None:
        """What lies there, in order; the rest when others have had their turn."""
        for _ in range(PORTION):
            if not self._posted:
                return
            function = self._posted.popleft()
            try:
                function()
            except Exception:
                logger.exception("%r failed", function)
        asyncio.get_running_loop().call_soon(self._run_posted)

    def check_process(self) -> None:
        """Raises ForkError: this is a child of the loop's process, and there is no loop here."""
        if self.pid != os.getpid():
            raise ForkError("this LLMDataDist was initialised before a fork", hint="start processes with spawn")

    def check_usable(self) -> None:
        """Raises ForkError, LLMException: this process, or this thread, cannot wait for the loop."""
        self.check_process()
        if threading.get_ident() == self._thread.ident:
            raise LLMException(
                "a blocking call on the thread that would have to carry it out",
                hint="from an async LayerSynchronizer await aiodatadist's own calls, or make it a plain function",
            )

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await ``function()`` on the loop; what it returns or raises.

        KeyboardInterrupt, and whatever else a signal handler raises here, cancels it, and is re-raised when it ended.

        Raises:
            LLMException: ``LLM_ENGINE_FINALIZED``: the loop is over.
        """
        self.check_usable()
        _warn_on_event_loop()
        call = _Call(function)
        self._calls.add(call)
        try:
            self.post(lambda: self._start(call))
            return _result_of(call.future)  # type: ignore[no-any-return]
        except BaseException:  # what it raised itself, or what a signal handler did while it runs
            if not call.future.done():
                with suppress(LLMException):  # the loop is over, and the call with it
                    self.post(call.cancel)
                    _outlast(call.future)
            raise
        finally:
            self._calls.discard(call)

    def _start(self, call: _Call) -> None:
        """On the loop. Whatever goes wrong, the caller, who waits for it, is told."""
        try:
            call.start(self._tasks)
        except BaseException as error:
            call.fail(error)
            raise

    def post(self, function: Callable[[], object]) -> None:
        """Run ``function()`` on the loop soon, in the order of the posts. Waits for nothing; many share one wake-up.

        Raises:
            ForkError: this is a child of the loop's process.
            LLMException: ``LLM_ENGINE_FINALIZED``: the loop is over.
        """
        self.check_process()
        self._posted.append(function)
        with self._lock:
            if self._is_over:
                raise _over()
            _wake(self._bell, 1)

    def join(self) -> None:
        """End the loop when the calls under way have ended, and wait for the thread. Interrupts are raised afterwards."""
        self.post(self._stopping.set)
        interrupt: BaseException | None = None
        while self._thread.is_alive():
            try:
                self._thread.join()
            except BaseException as error:  # whatever a signal handler raises
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _over() -> LLMException:
    return LLMException(
        "the last LLMDataDist of this process was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED
    )


def _result_of(future: Future[Any]) -> Any:
    """What it is settled with. The main thread looks up now and then: a signal that came after the interpreter's last look,
    and before the thread began to wait, would otherwise be noticed only afterwards."""
    seconds = LOOK_UP if threading.current_thread() is threading.main_thread() else -1
    settled = threading.Lock()
    settled.acquire()
    future.add_done_callback(lambda _: settled.release())
    while not settled.acquire(timeout=seconds):  # no TimeoutError is raised here: one that comes is a signal handler's
        pass
    return future.result()


def _outlast(future: Future[Any]) -> None:
    """Until it is settled, however often Ctrl-C is pressed: what it waits for ends in bounded time."""
    while not future.done():
        with suppress(BaseException):  # whatever a signal handler raises; not the future's own, which is returned
            future.exception()


class _Warned:
    """Whether it has been said that a blocking call was made on an event loop."""

    once = False


def _warn_on_event_loop() -> None:
    if _get_running_loop() is not None and not _Warned.once:
        _Warned.once = True
        warnings.warn(
            "a blocking call of aiodatadist stops the event loop of this thread until it returns: "
            "here aiodatadist.LLMDataDist can be awaited instead",
            RuntimeWarning,
            stacklevel=4,
        )


class _Shared:
    """The thread of the process: there while it is in use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: LoopThread | None = None
        self.users = 0


_shared = _Shared()
os.register_at_fork(after_in_child=_shared.__init__)  # type: ignore[misc]  # the child has no such thread, and an open lock


def acquire() -> LoopThread:
    """The process's loop thread, started if it is not running. Each caller gives it back with :func:`release`."""
    with _shared.lock:
        if _shared.thread is None:
            _shared.thread = LoopThread()
        _shared.users += 1
        return _shared.thread


def release(thread: LoopThread) -> None:
    """Give it back. The last one ends it, and waits for that."""
    with _shared.lock:
        _shared.users -= 1
        is_last = _shared.users == 0
        if is_last:
            _shared.thread = None
    if is_last:
        thread.join()
