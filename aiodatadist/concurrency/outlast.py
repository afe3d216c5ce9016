"""After a cancellation: wait for the end of what cannot simply be left, in one place."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import anyio


async def outlast(
    is_over: Callable[[], bool], wait: Callable[[], Awaitable[object]], seconds: float = math.inf
) -> bool:
    """Until something has ended, whatever else is cancelled meanwhile; False: it has not within so many seconds.

    The caller has a cancellation in hand, has asked what it waited for to end, and re-raises the cancellation afterwards: a
    cancelled task goes on only when no byte can land any more, or nothing is left to be given back. Cancellations that come
    meanwhile are the same news. That includes ``Task.cancel``, which no cancel scope keeps off.

    Args:
        is_over: asked before each wait.
        wait: returns, or is cancelled, when it may be worth to ask again.
    """
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + seconds):
        while not is_over():
            try:
                await wait()
            except asyncio.CancelledError:
                if anyio.current_effective_deadline() <= anyio.current_time():
                    break
    return is_over()


async def outlast_future(future: asyncio.Future[Any], seconds: float = math.inf) -> bool:
    """The same for a future or a task of this loop, which is not cancelled; what it raises stays in it."""
    return await outlast(future.done, lambda: asyncio.wait([future]), seconds)
