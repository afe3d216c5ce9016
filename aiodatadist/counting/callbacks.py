"""Code of the caller's that runs in the middle of our own: callbacks, observers, synchronizers, models, pools.

Whatever such code raises ends no more than the call it was made for. That includes CancelledError, which would cancel our
task, StopIteration, which no future can hold, and exceptions of other libraries that are no Exception. KeyboardInterrupt
and SystemExit are raised again from the event loop, if the code runs there.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import _get_running_loop  # get_running_loop() raises where there is none, which is fine here
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

MOST_WORDS = 300
"""Characters of what a value of the caller's says of itself."""


class Raised(Exception):
    """Code of the caller's raised. The message names what, which is the cause."""


def guarded(call: Callable[[], T], logger: logging.Logger, words: str, *args: object) -> T | None:
    """Call it and return its result. If it raises, log that with these words and return None. Their ``%s`` are filled with
    what :func:`shown` makes of the arguments."""
    try:
        return attempt(call)
    except Raised as raised:
        told = [each if isinstance(each, str) else shown(each) for each in args]
        logger.exception(words, *told, exc_info=raised.__cause__)
    return None


def attempt(call: Callable[[], T]) -> T:
    """Call it, on the event loop or in a thread. Raises Raised in place of whatever it raises."""
    try:
        return call()
    except BaseException as error:
        loop = _get_running_loop()
        if loop is not None and isinstance(error, (KeyboardInterrupt, SystemExit)):
            loop.call_soon(_raise, error)
        raise Raised(f"raised {shown(error)}") from error


async def attempt_awaiting(call: Callable[[], Awaitable[Any]]) -> Any:
    """Call it and await what it returns, in a task of its own: what it does with cancellation stays its own affair.

    Raises Raised: whatever it raises, also CancelledError, unless this was cancelled from outside.
    """
    task: asyncio.Future[Any] = attempt(lambda: asyncio.ensure_future(call()))
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task.cancelled():
        raise Raised("was cancelled")
    error = task.exception()
    if error is not None:
        raise Raised(f"raised {shown(error)}") from error
    return task.result()


def is_delivered(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Whether what code of the caller's let pass, awaited in this task, is not its own: an interrupt, a cancellation of the
    task from outside, or the end of a coroutine that is never resumed. Such an error must be raised again."""
    if isinstance(error, asyncio.CancelledError):
        return task is None or task.cancelling() > 0
    is_interrupt = isinstance(error, (KeyboardInterrupt, SystemExit))
    return is_interrupt or (isinstance(error, GeneratorExit) and current_task() is not task)


def current_task() -> asyncio.Task[Any] | None:
    """Return the running task; None if there is none, or no event loop."""
    return None if _get_running_loop() is None else asyncio.current_task()


def shown(value: object) -> str:
    """Return its repr, shortened; a repr that raises is left out."""
    try:
        words = repr(value)
    except BaseException:  # it is the caller's code, too
        words = f"<{type(value).__name__}, whose repr raises>"
    return words if len(words) <= MOST_WORDS else f"{words[:MOST_WORDS]}..."


def _raise(error: BaseException) -> None:
    raise error
