"""Objects that have started and can be awaited, in the form of the coroutine that asyncio and anyio expect."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, TypeVar

T_co = TypeVar("T_co", covariant=True)


class StartedCoroutine(Coroutine[Any, Any, T_co]):
    """A coroutine around ``__await__`` of a subclass.

    It can be passed to ``TaskGroup.create_task``, ``asyncio.create_task`` and ``start_soon``. Unlike a coroutine of
    ``async def`` it has started already, and any number of tasks may run it or await it: each gets its own iterator of
    ``__await__``. If a task is cancelled before it began to run this, the work is cancelled all the same.
    """

    __slots__ = ()
    _ways: dict[asyncio.Task[Any] | None, Generator[Any, Any, T_co]]
    """The iterator of each task. A subclass has the slot; it is filled when it is first needed."""

    @abstractmethod
    def done(self) -> bool:
        """Return True if it has ended, successfully or not."""

    def send(self, value: Any, /) -> Any:
        way = self._way()
        if way is None:
            way = self._begin()
        return self._step(lambda: way.send(value))

    def throw(self, typ: Any, val: Any = None, tb: TracebackType | None = None, /) -> Any:
        error: BaseException = val if val is not None else typ if isinstance(typ, BaseException) else typ()
        way = self._way()
        if way is None:
            if self.done():
                raise error
            way = self._begin()
            self._step(lambda: way.send(None))  # to its first await, where a cancellation reaches it
        return self._step(lambda: way.throw(error))

    def close(self) -> None:
        """End the running task's iterator. The work that was started continues."""
        way = getattr(self, "_ways", {}).pop(_driver(), None)
        if way is not None:
            way.close()

    def _way(self) -> Generator[Any, Any, T_co] | None:
        return getattr(self, "_ways", {}).get(_driver())

    def _begin(self) -> Generator[Any, Any, T_co]:
        way = self.__await__()
        if not hasattr(self, "_ways"):
            self._ways = {}
        self._ways[_driver()] = way
        return way

    def _step(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except BaseException:  # StopIteration, too: the iterator has ended
            self._ways.pop(_driver(), None)
            raise


def _driver() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
