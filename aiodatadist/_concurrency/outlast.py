"""Waiting after a cancellation for the end of work that cannot simply be left, in one place."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import anyio


async def outlast(
    is_over: Callable[[], bool], wait: Callable[[], Awaitable[object]], seconds: float = math.inf
) -> bool:
    """Wait until something has ended, whatever is cancelled in the meantime; return False if it has not ended in time.

    The caller has been cancelled, has asked its work to end, and raises the cancellation again afterwards. A cancelled
    task continues only when no byte can land any longer, and nothing is left to release. Further cancellations in the
    meantime add nothing. That includes ``Task.cancel``, which no cancel scope keeps off.

    Args:
        is_over: called before each wait.
        wait: returns, or is cancelled, when it may be worth calling ``is_over`` again.
        seconds: the time limit.
    """
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + seconds):
        while not is_over():
            try:
                await wait()
            except asyncio.CancelledError:
                # otherwise this was another Task.cancel, which adds nothing
                if anyio.current_effective_deadline() <= anyio.current_time():
                    break
    return is_over()


async def outlast_future(future: asyncio.Future[Any], seconds: float = math.inf) -> bool:
    """Wait likewise for a future or task of this loop, which is not cancelled; what it raises stays in it."""
    return await outlast(future.done, lambda: asyncio.wait([future]), seconds)
