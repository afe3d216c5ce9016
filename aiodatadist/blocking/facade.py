"""Blocking calls made of awaitable ones: the same parameters and errors, and a return value where upstream has one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import isawaitable, signature
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from aiodatadist.blocking.cache_task import CacheTask
from aiodatadist.cache import task as awaitable
from aiodatadist.concurrency.loop_thread import LoopThread

P = ParamSpec("P")
R = TypeVar("R")


class Facade(Protocol):
    """What lives on the loop, for those who do not.

    To wrap a further class, give it these two and ``name = blocking(TheClass.name)`` for each call.
    """

    @property
    def _inner(self) -> Any:
        """The awaitable one."""

    @property
    def _thread(self) -> LoopThread:
        """Where it lives. Raises RuntimeError: it does not live."""


class TransferFacade(Facade, Protocol):
    """One that moves bytes."""

    def _watched(self, task: awaitable.CacheTask) -> awaitable.CacheTask:
        """Count what becomes of it."""


@overload
def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]: ...
@overload
def blocking(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]: ...
def blocking(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs the inner object's of this name on the loop, and waits for it."""
    name = method.__name__  # not the function itself: the inner object's class may override it

    @wraps(method)
    def call(self: Facade, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner

        async def run() -> Any:
            result = getattr(inner, name)(*args, **kwargs)
            return await result if isawaitable(result) else result

        return self._thread.call(run)

    return call


def moving(method: Callable[Concatenate[Any, P], awaitable.CacheTask]) -> Callable[Concatenate[Any, P], None]:
    """A method that waits until all bytes are there, and returns None, as upstream."""
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
    """A method that returns when it has begun, with a task to ask or to wait for, as upstream.

    An interrupt before the caller has that task stops the transfer, and is re-raised when no byte can land any more.
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
