"""Blocking calls of the vendor's libraries, in separate threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from aiodatadist._concurrency.outlast import outlast
from aiodatadist._concurrency.threads import DaemonThread
from aiodatadist._counting import OF_PROCESS, Incident
from aiodatadist.errors import LLMException

logger = logging.getLogger(__name__)

T = TypeVar("T")


def _start(
    call: Callable[..., T], args: tuple[Any, ...], threads: Executor | None = None, gives_back: bool = False
) -> tuple[asyncio.Future[T], concurrent.futures.Future[None] | None]:
    """Start the call; return its future, and its place in the queue for ``threads``, if they are given."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

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

    if threads is not None:
        return future, threads.submit(run)
    thread = DaemonThread(run, "aiodatadist call")

    def not_begun(error: RuntimeError) -> None:
        if gives_back:
            words = "no thread can be started to release the device's resources: the event loop waits for the call"
            OF_PROCESS.add(Incident.NO_THREADS, logger, words)
            run()
        else:
            refused = LLMException(f"no thread can be started: {error}", hint="is there a limit on threads or memory?")
            refused.__cause__ = error
            future.set_exception(refused)

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
