"""An event loop in a separate thread, for callers that have none.

Who owns what
    The maker of a :class:`LoopThread` ends it with :meth:`LoopThread.join`. The thread owns the loop, and one task
    group on it; every :meth:`LoopThread.call` is a task of that group. The thread is a daemon: a process that never
    joins it can end all the same, and its peers see its connections close.

What cancellation means
    An interrupt (KeyboardInterrupt, or whatever else a signal handler raises) of a thread that waits in ``call``
    cancels the call's scope on the loop. The interrupt is raised again when the call has ended, or after
    ``OUTLAST_SECONDS`` if it does not end; the call then continues in the thread. Further interrupts in the meantime
    are dropped. A call that the loop had not begun never begins. ``join`` lets calls end for ``last_calls`` seconds,
    then cancels them; if interrupted, it waits for ``OUTLAST_SECONDS`` at most. A call is settled in every case.

What it guards
    It refuses calls in a child of its process, on its own thread, and after its end, with what ``refuse`` makes of an
    :class:`Unusable`: each interface has its own exceptions and words.

Why not anyio's ``BlockingPortal``
    It wakes the loop with ``call_soon_threadsafe`` for each call. asyncio then writes to a socket and releases the
    interpreter lock, so a submission waits for the loop's turn. Here posts of many threads share one wake-up, and the
    lock is kept. A portal begins all calls that have come; here the loop looks after other work after eight. An
    interrupted ``BlockingPortal.call`` returns while its task still runs, which for a transfer is too early, and a
    portal has no guard against forks. ``BlockingPortalProvider`` counts its users as
    ``aiodatadist._blocking.shared_loop`` does, but starts only portals.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import threading
import time
from asyncio import _get_running_loop  # get_running_loop() raises where there is none, which is fine here
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import anyio

from aiodatadist._concurrency.scope import Scope
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._concurrency.threads import DaemonThread
from aiodatadist._counting import OF_PROCESS, Incident
from aiodatadist._counting.callbacks import is_delivered

logger = logging.getLogger(__name__)

T = TypeVar("T")

new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
"""Makes the thread's loop: the loop of the process's policy, for instance uvloop's."""
LOOK_UP_SECONDS = 0.2
"""Seconds within which an interrupt is noticed."""
OUTLAST_SECONDS = 60.0
"""Seconds for which an interrupted thread waits for the call that it cancelled.

A server that does not answer, or a device that does not stop, could hold the call up for ever.
"""
PORTION = 8
"""Functions that the loop runs before it looks after other work: beginning a transfer takes some 50 us."""

_wake: Callable[[int, int], int] = ctypes.PyDLL(None).eventfd_write
"""Writes to an eventfd and keeps the interpreter lock.

``os.eventfd_write`` releases it, and a submission would then wait for the loop's turn.
"""


class Unusable(Enum):
    """The reasons why a call is refused, or did not end by itself."""

    NOT_STARTED = "no thread can be started"
    FORKED = "this is a child of the process that started the thread"
    OWN_THREAD = "the caller is on the loop's own thread, which would wait for itself"
    OVER = "the loop has ended"
    NOT_BEGUN = "the call was stopped before it began"
    STOPPED = "the call was stopped, because it was cancelled"


Refuse = Callable[[Unusable], Exception]


class _Settled:
    """A result that the loop's thread settles and one other thread waits for, whatever interrupts that thread.

    It is not a ``concurrent.futures.Future``: that one's condition is Python code, and an interrupt in the wrong place
    of it leaves its lock taken for ever. The loop's thread would wait on that lock. The thread that settles never waits
    for the lock here.

    Attributes:
        is_over: True once it is settled.
        error: the exception with which it is settled; None if it has a result, or is not settled yet.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._result: Any = None
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Settle it, on the loop's thread. Has no effect if it is settled."""
        if not self.is_over:
            self._result, self.error = result, error
            self.is_over = True
            self._lock.release()

    def wait(self, seconds: float = math.inf) -> None:
        """Wait until it is settled, or for ``seconds``.

        The main thread wakes up now and then. A signal that came after the interpreter's last check, and before the
        thread began to wait, would otherwise be noticed only at the end.
        """
        is_main = threading.current_thread() is threading.main_thread()
        slice_seconds = LOOK_UP_SECONDS if is_main or seconds < math.inf else -1
        until = time.monotonic() + seconds
        while not self.is_over and time.monotonic() < until:
            self._lock.acquire(timeout=slice_seconds)

    def outlast(self) -> None:
        """Wait until it is settled, or for ``OUTLAST_SECONDS``, whatever number of interrupts come."""
        until = time.monotonic() + OUTLAST_SECONDS
        while not self.is_over and (left := until - time.monotonic()) > 0:
            with suppress(BaseException):  # whatever a signal handler raises
                self.wait(left)

    def result(self) -> Any:
        """Return the result with which it is settled, or raise the exception."""
        if self.error is not None:
            raise self.error
        return self._result


class _Call:
    """A call on its way to the loop and back. Its caller waits for :attr:`settled`."""

    def __init__(self, function: Callable[[], Awaitable[Any]], refuse: Refuse) -> None:
        self.settled = _Settled()
        self._refuse = refuse
        self._function = function
        self._scope: Scope | None = None

    def start(self, tasks: Spawner) -> None:
        if not self.settled.is_over:
            self._scope = Scope()
            tasks.start_soon(self._run, self._scope)

    async def _run(self, scope: Scope) -> None:
        """Run the call in a task of the loop's.

        If the called code was cancelled by something other than this task's owner, no other call is cancelled.
        """
        task = asyncio.current_task()
        try:
            with scope:
                self.settled.settle(await self._function(), None)
        except asyncio.CancelledError as error:
            if is_delivered(error, task):
                raise
        except BaseException as error:  # from the caller's code: raised in its thread, and ends no other call
            if isinstance(error, GeneratorExit) and is_delivered(error, task):
                raise
            self.settled.settle(None, error)
        finally:
            if not self.settled.is_over:
                self.fail(self._refuse(Unusable.STOPPED))

    def cancel(self) -> None:
        """End the call as soon as that is safe. A call that has not begun never begins."""
        if self._scope is None:
            self.fail(self._refuse(Unusable.NOT_BEGUN))
        else:
            self._scope.cancel()

    def fail(self, error: BaseException) -> None:
        """Settle the call with an error. Has no effect if it is settled."""
        self.settled.settle(None, error)


class LoopThread:
    """A running event loop. :meth:`call` waits for it, :meth:`post` does not; any other thread may use both.

    Args:
        name: the name of the thread.
        refuse: makes the exception that is raised if the loop cannot be used.
        warn: called before each wait of a thread that runs an event loop itself, which the wait stops.
        last_calls: seconds that calls under way have for ending by themselves in :meth:`join`.

    Attributes:
        pid: the process that it runs in.

    Raises:
        OSError: if no event loop can be made.

    If no thread can be started, it raises what ``refuse`` makes of NOT_STARTED.
    """

    def __init__(self, name: str, refuse: Refuse, warn: Callable[[], object], last_calls: float) -> None:
        self.pid: int = os.getpid()
        self._refuse = refuse
        self._warn = warn
        self._last_calls = last_calls
        self._calls: set[_Call] = set()
        self._posted: deque[Callable[[], object]] = deque()
        self._is_over = False
        # reentrant: a signal handler or finalizer of the thread that holds it may post, too
        self._lock = threading.RLock()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._tasks: Spawner
        self._stopping: anyio.Event
        started = _Settled()
        self._thread = DaemonThread(self._run, name, (started,))
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._bell)
            raise refuse(Unusable.NOT_STARTED) from error
        try:
            started.wait()
            started.result()
        except BaseException:  # an interrupt may come after the thread has started
            started.outlast()
            if started.is_over and started.error is None:
                self.join()
            raise

    def _run(self, started: _Settled) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(self._serve(started))
        except BaseException as error:
            if started.is_over:
                logger.exception("the event loop of %s failed", self._thread.name)
            else:
                started.settle(None, error)
        finally:
            with self._lock:  # no thread rings any longer
                self._is_over = True
                os.close(self._bell)
            for call in list(self._calls):
                if not call.settled.is_over:
                    call.fail(self._refuse(Unusable.OVER))

    async def _serve(self, started: _Settled) -> None:
        loop = asyncio.get_running_loop()
        self._stopping = anyio.Event()
        loop.add_reader(self._bell, self._answer)
        try:
            async with anyio.create_task_group() as group:
                self._tasks = Spawner(group)
                started.settle(None, None)
                await self._stopping.wait()
                group.cancel_scope.deadline = anyio.current_time() + self._last_calls
        finally:
            loop.remove_reader(self._bell)

    def _answer(self) -> None:
        """Run what was posted, because the bell rang."""
        os.eventfd_read(self._bell)
        self._run_posted()

    def _run_posted(self) -> None:
        """Run posted functions in order, a portion at a time; the rest once other work has had its turn."""
        for _ in range(PORTION):
            if not self._posted:
                return
            function = self._posted.popleft()
            try:
                function()
            except Exception:
                OF_PROCESS.add(Incident.DEFECT, logger, "%r failed", function, level=logging.ERROR, exc_info=True)
        asyncio.get_running_loop().call_soon(self._run_posted)

    def check_process(self) -> None:
        """Check that this is the process of the loop; otherwise raise what ``refuse`` makes of FORKED."""
        if self.pid != os.getpid():
            raise self._refuse(Unusable.FORKED)

    @property
    def is_here(self) -> bool:
        """True if the caller is on the loop's own thread."""
        return threading.get_ident() == self._thread.ident

    def check_usable(self) -> None:
        """Check that this process and thread can wait for the loop.

        Otherwise raise what ``refuse`` makes of FORKED or OWN_THREAD.
        """
        self.check_process()
        if self.is_here:
            raise self._refuse(Unusable.OWN_THREAD)

    def check_may_wait(self) -> None:
        """Check the same as :meth:`check_usable`, and warn a thread that runs an event loop."""
        self.check_usable()
        if _get_running_loop() is not None:
            self._warn()

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await ``function()`` on the loop, in the caller's context; return or raise what it returns or raises.

        KeyboardInterrupt, and whatever else a signal handler raises here, cancels the call. It is raised again when the
        call has ended, or after ``OUTLAST_SECONDS``.

        Raises what ``refuse`` makes of FORKED, OWN_THREAD, OVER, NOT_BEGUN or STOPPED.
        """
        self.check_may_wait()
        call = _Call(function, self._refuse)
        self._calls.add(call)
        try:
            self.post(partial(copy_context().run, self._start, call))
            call.settled.wait()
        except BaseException:  # from a signal handler, while the call runs
            # If the bell cannot be rung, the loop has ended, and the call with it.
            if not call.settled.is_over and self._ring(call.cancel):
                call.settled.outlast()
            raise
        else:
            return call.settled.result()  # type: ignore[no-any-return]
        finally:
            self._calls.discard(call)

    def _start(self, call: _Call) -> None:
        """Start the call on the loop. If that fails, the caller gets the error, because it waits for the call."""
        try:
            call.start(self._tasks)
        except BaseException as error:
            call.fail(error)
            raise

    def post(self, function: Callable[[], object]) -> None:
        """Run ``function()`` on the loop soon, in the order of the posts. Does not wait; many posts share one wake-up.

        Raises what ``refuse`` makes of FORKED or OVER.
        """
        self.check_process()
        if not self._ring(function):
            raise self._refuse(Unusable.OVER)

    def _ring(self, function: Callable[[], object]) -> bool:
        """Post the function; return False if the loop has ended, so that it will not run."""
        # before the bell rings, because the loop may answer at once
        self._posted.append(function)
        with self._lock:
            if not self._is_over:
                _wake(self._bell, 1)
            return not self._is_over

    def join(self) -> None:
        """End the loop once the calls under way have ended, and wait for the thread.

        An interrupt is raised afterwards, or after ``OUTLAST_SECONDS``. May be called twice. Raises what ``refuse``
        makes of FORKED or OWN_THREAD.
        """
        self.check_usable()
        self._ring(self._stopping.set)
        interrupt: BaseException | None = None
        until = math.inf
        while self._thread.is_alive() and time.monotonic() < until:
            try:
                self._thread.join(None if until == math.inf else until - time.monotonic())
            except BaseException as error:  # whatever a signal handler raises
                until = min(until, time.monotonic() + OUTLAST_SECONDS)
                interrupt = error
        if interrupt is not None:
            raise interrupt
