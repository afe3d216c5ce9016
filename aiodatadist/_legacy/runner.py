"""The ModelRunner: a user's model, awaited whether it is a coroutine function or not."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any

from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._counting.callbacks import is_delivered, shown
from aiodatadist._legacy.kv_cache import KvCache


class ModelRunner:
    """Base of users' models: override :meth:`run_model`, and the other two methods if they are useful.

    Each may be a plain function, which is called in a thread because it may block, or ``async def``.
    """

    def run_model(self, kv_cache: KvCache, input_tensors: Any, **kwargs: Any) -> Any:
        """Run the model over ``kv_cache``; ``predict`` returns the result.

        Args:
            kv_cache: slot ``i`` belongs to the i-th request. On PROMPT it is made for this call; on DECODER it is
                always the same one.
            input_tensors, kwargs: as given to ``predict`` or ``preload_prompt_prefix``.

        On PROMPT neither ``kv_cache`` nor arrays over it may be kept after the call. If ``predict`` is cancelled,
        ``async def`` is cancelled with it; a thread cannot be cancelled, and is waited for.
        """
        raise NotImplementedError(f"{type(self).__name__} must override run_model()")

    def on_cache_allocated(self, kv_cache: KvCache) -> Any:
        """Take note of a model's cache on DECODER. An exception fails ``add_model``, and the cache is released."""

    def on_cache_deallocated(self, kv_cache: KvCache) -> Any:
        """Take note that the cache is about to be released. Exceptions from this are logged."""


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Await a user's function: a coroutine function here, any other in a thread, and then its result if that is awaitable.

    A cancellation is delivered once the function has returned: until then it may touch the cache. A CancelledError that
    the function itself raises becomes a RuntimeError: the caller was not cancelled.
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
