"""ModelRunner: the user's own model, awaited whether it is written to be awaited or not."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any

from aiodatadist.concurrency.blocking_calls import in_thread
from aiodatadist.counting.callbacks import is_delivered, shown
from aiodatadist.legacy.kv_cache import KvCache


class ModelRunner:
    """Base of the user's: overrides :meth:`run_model`, and the other two where that is of use.

    Each may be a plain function, which is called in a thread because it may block, or ``async def``.
    """

    def run_model(self, kv_cache: KvCache, input_tensors: Any, **kwargs: Any) -> Any:
        """Run the model over ``kv_cache``; what it returns is what ``predict`` returns.

        Args:
            kv_cache: slot ``i`` belongs to the i-th request. On PROMPT it is made for this call; on DECODER it is always the
                same one.
            input_tensors, kwargs: as they were given to ``predict`` or ``preload_prompt_prefix``.

        Nothing in here may keep ``kv_cache`` or arrays over it for longer than the call, on PROMPT. Where ``predict`` is
        cancelled, ``async def`` is cancelled with it; a thread cannot be, and is waited for.
        """
        raise NotImplementedError(f"{type(self).__name__} must override run_model()")

    def on_cache_allocated(self, kv_cache: KvCache) -> Any:
        """The cache of a model on DECODER is there. What this raises ends ``add_model``, and the cache."""

    def on_cache_deallocated(self, kv_cache: KvCache) -> Any:
        """It is about to go. What this raises is logged."""


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Await a function of the user's: a coroutine function here, any other in a thread, and what that returns if need be.

    A cancellation is delivered when the function is over: until then it may touch the cache. A CancelledError that the
    function raises by itself becomes a RuntimeError: the caller was not cancelled.
    """

    async def awaited(awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        except asyncio.CancelledError as error:
            if is_delivered(error, asyncio.current_task()):
                raise
            raise RuntimeError(f"{function!r} raised {shown(error)}") from error

    if inspect.iscoroutinefunction(function):
        return await awaited(function(*args, **kwargs))

    def run() -> Any:
        try:
            return function(*args, **kwargs)
        except (
            StopIteration,
            asyncio.CancelledError,
        ) as error:  # no future can hold the one, and the other would cancel
            raise RuntimeError(f"{function!r} raised {shown(error)}") from error

    result = await in_thread(copy_context().run, run)
    return await awaited(result) if inspect.isawaitable(result) else result
