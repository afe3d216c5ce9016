"""Code of callers that runs in the middle of our own: callbacks, observers, synchronizers, models, pools.

An error in such code ends only the call for which it ran. That includes CancelledError, which would cancel our task,
StopIteration, which no future can hold, KeyboardInterrupt and SystemExit, which would end the event loop, and
exceptions of other libraries that do not derive from Exception. An exception from a signal handler that ran in the
middle of such code concerns the whole process instead: it is raised again from the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import threading
from asyncio import _get_running_loop  # get_running_loop() raises where there is none, which is fine here
from collections.abc import Awaitable, Callable
from traceback import walk_tb
from types import CodeType
from typing import Any, TypeVar

T = TypeVar("T")

MOST_WORDS = 300
"""The longest repr of a caller's value in a log line, in characters."""


class Raised(Exception):
    """Code of the caller's raised an exception. The message names it, and it is the cause."""


def guarded(call: Callable[[], T], logger: logging.Logger, words: str, *args: object) -> T | None:
    """Call it and return its result. If it raises, log the exception with these words and return None.

    The ``%s`` in the words are filled with what :func:`shown` makes of the arguments.
    """
    try:
        return call()
    except BaseException as error:
        log_raised(error, logger, words, *args)
    return None


def log_raised(error: BaseException, logger: logging.Logger, words: str, *args: object) -> None:
    """Log what code of the caller's raised, with these words, as :func:`guarded` does."""
    _raised(error)
    told = [each if isinstance(each, str) else shown(each) for each in args]
    logger.exception(words, *told, exc_info=error)


def attempt(call: Callable[[], T]) -> T:
    """Call it, on the event loop or in a thread. If it raises anything, raise Raised instead."""
    try:
        return call()
    except BaseException as error:
        raise _raised(error) from error


def _raised(error: BaseException) -> Raised:
    """Return the Raised that takes an error's place.

    If a signal handler raised the error, the event loop raises it again.
    """
    loop = _get_running_loop()
    if loop is not None and is_interrupt(error):
        loop.call_soon(_raise, error)
    return Raised("was cancelled" if isinstance(error, asyncio.CancelledError) else f"raised {shown(error)}")


async def attempt_awaiting(call: Callable[[], Awaitable[Any]]) -> Any:
    """Call it and await its result, in a separate task, so that cancellation inside it does not reach this task.

    Raises Raised in place of whatever it raises, including CancelledError, unless this was cancelled from outside.
    """

    async def run() -> Any:
        """Turn what is raised into Raised inside the task: a task's step would raise SystemExit from the event loop."""
        own = asyncio.current_task()  # ``task`` is not assigned yet if the task starts eagerly
        try:
            return await call()
        except BaseException as error:
            if is_delivered(error, own) and not is_interrupt(error):
                raise
            raise _raised(error) from error

    task = asyncio.ensure_future(run())
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task.cancelled():
        raise Raised("was cancelled")
    return task.result()


def is_delivered(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Return True if an error from the caller's code, awaited in this task, only passed through that code.

    Such an error is an interrupt, a cancellation of the task from outside, or the end of a coroutine that is never
    resumed. It must be raised again.
    """
    if isinstance(error, asyncio.CancelledError):
        return task is None or task.cancelling() > 0
    return is_interrupt(error) or (isinstance(error, GeneratorExit) and current_task() is not task)


def is_interrupt(error: BaseException) -> bool:
    """Return True if a signal handler raised this KeyboardInterrupt or SystemExit, or may have.

    Python's own handler of SIGINT leaves no trace in the error. So while that one is in force, any KeyboardInterrupt in the
    main thread counts. ``asyncio.run`` replaces it.
    """
    is_kind = isinstance(error, (KeyboardInterrupt, SystemExit))
    if not is_kind or threading.current_thread() is not threading.main_thread():
        return False
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    if isinstance(error, KeyboardInterrupt) and signal.default_int_handler in handlers:
        return True
    codes = {_code_of(handler) for handler in handlers} - {None}
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


def _code_of(handler: object) -> CodeType | None:
    """Return the code of a function, method or partial; None for anything else."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(getattr(handler, "__func__", handler), "__code__", None)


def current_task() -> asyncio.Task[Any] | None:
    """Return the running task; None if there is none, or no event loop."""
    return None if _get_running_loop() is None else asyncio.current_task()


def shown(value: object) -> str:
    """Return the repr of a value, shortened. A repr that raises is replaced by the type's name."""
    try:
        words = repr(value)
    except BaseException:  # it is the caller's code, too
        words = f"<{type(value).__name__}, whose repr raises>"
    return words if len(words) <= MOST_WORDS else f"{words[:MOST_WORDS]}..."


def _raise(error: BaseException) -> None:
    raise error
