"""Blocking calls of the vendor's libraries and of the file system, in separate threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from aiodatadist._concurrency import forks
from aiodatadist._concurrency.outlast import outlast
from aiodatadist._concurrency.threads import DaemonThread
from aiodatadist._counting import OF_PROCESS, Incident
from aiodatadist.errors import LLMException

logger = logging.getLogger(__name__)

T = TypeVar("T")


def _settling(future: asyncio.Future[T], call: Callable[..., T], args: tuple[Any, ...] = ()) -> Callable[[], None]:
    """Return a function that makes the call, on any thread, and settles the future on its loop."""
    loop = future.get_loop()

    def run() -> None:
        try:
            result = call(*args)
        except BaseException as error:
            settle, outcome = future.set_exception, error
        else:
            settle, outcome = future.set_result, result  # type: ignore[assignment]
        try:
            loop.call_soon_threadsafe(settle, outcome)
        except RuntimeError:  # the loop is closed: no caller waits any longer
            logger.debug("%r ended after its event loop", call)

    return run


def _no_thread(error: RuntimeError) -> LLMException:
    refused = LLMException(f"no thread can be started: {error}", hint="is there a limit on threads or memory?")
    refused.__cause__ = error
    return refused


def _start(
    call: Callable[..., T], args: tuple[Any, ...], threads: Executor | None = None, gives_back: bool = False
) -> tuple[asyncio.Future[T], concurrent.futures.Future[None] | None]:
    """Start the call; return its future, and its place in the queue for ``threads``, if they are given."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    run = _settling(future, call, args)
    if threads is not None:
        return future, threads.submit(run)
    thread = DaemonThread(run, "aiodatadist call")

    def not_begun(error: RuntimeError) -> None:
        if gives_back:
            words = "no thread can be started to release the device's resources: the event loop waits for the call"
            OF_PROCESS.add(Incident.NO_THREADS, logger, words)
            run()
        else:
            future.set_exception(_no_thread(error))

    try:
        begun_by = thread.start_soon(loop, not_begun)
    except RuntimeError as error:
        not_begun(error)
    else:
        future.add_done_callback(lambda _: begun_by.cancel())
    return future, None


def started_in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Start a blocking call in a new thread, and return its future.

    The call continues if its waiter gives up, and the process can end meanwhile. The future has an LLMException
    if no thread can be started.
    """
    return _start(call, ())[0]


class KeptThread:
    """A thread for short blocking calls of one event loop, one at a time: a new one for each would cost more than the call.

    It starts with the first call. A call that hangs keeps the thread, so calls that must not wait for each other need
    different threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: DaemonThread | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._last: asyncio.Future[Any] | None = None
        self._generation = forks.generation

    def start(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start a call, and return its future, as :func:`started_in_thread` does. The call before it must have returned."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._last = future
        self._jobs.put(_settling(future, call))
        if self._thread is None:
            self._begin(future)
        return future

    def _begin(self, first: asyncio.Future[Any]) -> None:
        def not_begun(error: RuntimeError) -> None:
            self._thread, self._jobs = None, queue.SimpleQueue()
            first.set_exception(_no_thread(error))

        self._thread = DaemonThread(self._work, self._name)
        try:
            begun_by = self._thread.start_soon(first.get_loop(), not_begun)
        except RuntimeError as error:
            not_begun(error)
        else:
            first.add_done_callback(lambda _: begun_by.cancel())

    def _work(self) -> None:
        jobs = self._jobs
        while (job := jobs.get()) is not None:
            job()

    async def aclose(self) -> None:
        """End the thread. If a call hangs in it, do not wait: the thread ends when that call returns."""
        thread, is_busy = self._thread, self._last is not None and not self._last.done()
        # A forked child does not have the thread, and would wait for it for ever.
        if thread is None or self._generation != forks.generation:
            return
        ends = None if is_busy else self.start(lambda: None)
        self._jobs.put(None)
        self._thread = None
        if ends is not None:
            await outlast(ends.done, lambda: asyncio.wait([ends]))
            thread.join()  # it has nothing left to do


async def in_thread(
    call: Callable[..., T],
    *args: Any,
    undo: Callable[[T], object] | None = None,
    on_cancel: Callable[[], object] | None = None,
    threads: Executor | None = None,
    gives_back: bool = False,
) -> T:
    """Run a blocking call in a thread and wait until it has ended, even if cancelled.

    A call into the vendor's library cannot be interrupted, and the memory it works on must not be released before it
    has returned. So a cancellation is delivered when the call has ended. There is no deadline, because nothing could be
    done at it.

    Args:
        undo: called with the result, in a thread, if the wait was cancelled, because the caller will not get the
            result.
        on_cancel: called at once when the wait is cancelled; may make ``call`` return early.
        threads: the threads to use, for short calls that are made often; by default each call has a new thread.
        gives_back: True if the call must be made: if no thread can be started, it runs on the event loop.

    Raises:
        LLMException: if no thread can be started; the call was not made.
    """
    future, queued = _start(call, args, threads, gives_back)
    try:
        await asyncio.wait([future])
    except asyncio.CancelledError:
        if queued is not None and queued.cancel():  # it waited for a thread, and never begins
            raise
        if on_cancel is not None:
            on_cancel()
        await _finish(future)
        if undo is not None and future.exception() is None:
            await _finish(_start(undo, (future.result(),), gives_back=True)[0])
        if future.exception() is not None:
            logger.debug("%r failed after its waiter was cancelled: %s", call, future.exception())
        raise
    return future.result()


async def _finish(future: asyncio.Future[Any]) -> None:
    """Wait until the future is done.

    The caller has a cancellation and raises it again; cancellations in the meantime add nothing to it.
    """
    await outlast(future.done, lambda: asyncio.wait([future]))
