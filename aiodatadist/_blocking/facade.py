"""Blocking calls made from awaitable ones, with the same parameters and errors, and upstream's return values."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import isawaitable, signature
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from aiodatadist._blocking.cache_task import CacheTask
from aiodatadist._cache import task as awaitable
from aiodatadist._concurrency.loop_thread import LoopThread

P = ParamSpec("P")
R = TypeVar("R")


class Facade(Protocol):
    """An object for other threads, over one that lives on the loop.

    To wrap another class, give it these two properties, and ``name = blocking(TheClass.name)`` for each call.
    """

    @property
    def _inner(self) -> Any:
        """The awaitable object."""

    @property
    def _thread(self) -> LoopThread:
        """The thread of the loop. Raises RuntimeError if there is none."""


class TransferFacade(Facade, Protocol):
    """A facade that moves bytes."""

    def _watched(self, task: awaitable.CacheTask) -> awaitable.CacheTask:
        """Count the outcome of the task; return the task."""


@overload
def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]: ...
@overload
def blocking(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]: ...
def blocking(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs the inner object's method of this name on the loop, and waits for it."""
    name = method.__name__  # by name, because the inner object's class may override the function

    @wraps(method)
    def call(self: Facade, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner

        async def run() -> Any:
            result = getattr(inner, name)(*args, **kwargs)
            return await result if isawaitable(result) else result

        return self._thread.call(run)

    return call


def moving(method: Callable[Concatenate[Any, P], awaitable.CacheTask]) -> Callable[Concatenate[Any, P], None]:
    """Return a method that waits until all bytes have landed, and returns None, as upstream."""
    name = method.__name__

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        facade: TransferFacade = self
        inner = facade._inner

        async def run() -> None:
            await facade._watched(getattr(inner, name)(*args, **kwargs))

        facade._thread.call(run)

    call.__signature__ = signature(method).replace(return_annotation="None")  # type: ignore[attr-defined]
    return call


def starting(method: Callable[Concatenate[Any, P], awaitable.CacheTask]) -> Callable[Concatenate[Any, P], CacheTask]:
    """Return a method that returns once the transfer has started, with a task to poll or wait for, as upstream.

    An interrupt before the caller has that task stops the transfer, and is raised again once no more bytes can land.
    """
    name = method.__name__

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> CacheTask:
        facade: TransferFacade = self
        inner = facade._inner

        begun: list[CacheTask] = []

        async def run() -> awaitable.CacheTask:
            task: awaitable.CacheTask = getattr(inner, name)(*args, **kwargs)
            begun.append(CacheTask(facade._thread, task))
            return facade._watched(task)

        try:
            facade._thread.call(run)
            return begun[0]
        except BaseException:
            for task in begun:
                task._stop()
            raise

    return call
