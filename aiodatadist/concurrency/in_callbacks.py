"""Cancel scopes, events and tasks that can be made and used where no task is: in callbacks of the event loop.

anyio's own look for the async library where they are made. With ``sniffio`` installed, and before anyio 4.12, they find it in
tasks only; so these make anyio's when a task first needs them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc

logger = logging.getLogger(__name__)


class Scope:
    """A cancel scope. Before a task enters it, and from callbacks, it may be cancelled and given a deadline."""

    __slots__ = ("_deadline", "_inner", "_is_cancelled")

    def __init__(self) -> None:
        self._inner: anyio.CancelScope | None = None
        self._is_cancelled = False
        self._deadline = math.inf

    def cancel(self) -> None:
        """Stop what runs within, or what will, at its first await."""
        self._is_cancelled = True
        if self._inner is not None:
            self._inner.cancel()

    @property
    def cancel_called(self) -> bool:
        """It was cancelled, or its deadline has passed."""
        return self._is_cancelled or (self._inner is not None and self._inner.cancel_called)

    @property
    def cancelled_caught(self) -> bool:
        """What ran within ended early, because of this scope."""
        return self._inner is not None and self._inner.cancelled_caught

    @property
    def deadline(self) -> float:
        """By the event loop's clock."""
        return self._deadline

    @deadline.setter
    def deadline(self, value: float) -> None:
        self._deadline = value
        if self._inner is not None:
            self._inner.deadline = value

    def __enter__(self) -> Self:
        self._inner = anyio.CancelScope(deadline=self._deadline)
        self._inner.__enter__()
        if self._is_cancelled:
            self._inner.cancel()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return None if self._inner is None else self._inner.__exit__(kind, error, trace)


class Event:
    """Something that happens once, for tasks that wait for it."""

    __slots__ = ("_inner", "_is_set")

    def __init__(self) -> None:
        self._inner: anyio.Event | None = None
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """It happened. May be called anywhere on the loop, and more than once."""
        self._is_set = True
        if self._inner is not None:
            self._inner.set()

    async def wait(self) -> None:
        """Until it has happened. A checkpoint in any case."""
        if self._inner is None:
            self._inner = anyio.Event()
            if self._is_set:
                self._inner.set()
        await self._inner.wait()


class Spawner:
    """Starts tasks of a task group, also from callbacks: then one tick later, by a task that does nothing else."""

    def __init__(self, group: anyio.abc.TaskGroup) -> None:
        self._group = group
        self._starters: set[asyncio.Task[None]] = set()

    def start_soon(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any, name: object = None) -> None:
        """As the group's own. What is started from a callback in the tick in which the group ends never begins."""
        if asyncio.current_task() is not None:
            self._group.start_soon(function, *args, name=name)
            return
        starter = asyncio.get_running_loop().create_task(self._start(function, args, name))
        self._starters.add(starter)
        starter.add_done_callback(self._starters.discard)

    async def _start(
        self, function: Callable[..., Coroutine[Any, Any, Any]], args: tuple[Any, ...], name: object
    ) -> None:
        try:
            self._group.start_soon(function, *args, name=name)
        except RuntimeError:  # the group has ended meanwhile
            logger.debug("%r was not started: its task group has ended", function)
