"""A user's ModelRunner without an event loop: called in a worker thread, with results and exceptions handed over."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from aiodatadist import legacy
from aiodatadist._concurrency.loop_thread import LoopThread
from aiodatadist.legacy import KvCache, ModelRunner

T = TypeVar("T")

METHODS: Final = ("run_model", "on_cache_allocated", "on_cache_deallocated")


@dataclass(frozen=True, slots=True)
class Given:
    """The inputs of a runner from the caller of ``predict``, and that caller's context variables."""

    inputs: Any
    kwargs: Mapping[str, Any]
    context: Context = field(default_factory=copy_context)


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of ``run_model``, wrapped so that an awaitable result is not awaited on the way."""

    value: Any


class Escaped(Exception):
    """A SystemExit, KeyboardInterrupt or the like of a runner's: it ends the caller, not the event loop."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error = error


class _Here(threading.local):
    """The runner's method that this thread runs, and its cluster."""

    owner: object = None
    method: str | None = None


_here = _Here()


def inside(owner: object) -> str | None:
    """Return the method of a runner of ``owner``'s that this thread runs, or None."""
    return _here.method if _here.owner is owner else None


class Runner(ModelRunner):
    """The engine's runner for a user's. Raises TypeError if one of the user's methods is ``async def``."""

    def __init__(self, inner: ModelRunner, owner: object) -> None:
        for name in METHODS:
            if inspect.iscoroutinefunction(getattr(inner, name)):
                raise TypeError(
                    f"{type(inner).__name__}.{name} is async def: a plain function is needed here; "
                    "aiodatadist.legacy awaits"
                )
        self._inner = inner
        self._owner = owner

    def run_model(self, kv_cache: KvCache, input_tensors: Given, **kwargs: Any) -> Answer:
        run = partial(self._inner.run_model, kv_cache, input_tensors.inputs, **input_tensors.kwargs)
        return Answer(self._call("run_model", partial(input_tensors.context.run, run)))

    def on_cache_allocated(self, kv_cache: KvCache) -> None:
        self._call("on_cache_allocated", partial(self._inner.on_cache_allocated, kv_cache))

    def on_cache_deallocated(self, kv_cache: KvCache) -> None:
        self._call("on_cache_deallocated", partial(self._inner.on_cache_deallocated, kv_cache))

    def _call(self, method: str, function: Callable[[], Any]) -> Any:
        """Call the user's function, in the worker thread, which exists for this call only."""
        _here.owner, _here.method = self._owner, method
        try:
            return function()
        except Exception:
            raise
        except BaseException as error:
            raise Escaped(error) from error


def call(thread: LoopThread, function: Callable[[], Awaitable[T]]) -> T:
    """Run a function on the loop, as :meth:`LoopThread.call` does; raise what its runner raises."""
    try:
        return thread.call(function)
    except Escaped as escaped:
        error = escaped.error
    try:
        raise error
    finally:
        del error  # breaks the cycle: the error's traceback has this frame


def runner_for(model_runner: Any, owner: object) -> Any:
    """Return the engine's runner. An object that is no runner is returned as it is, for ``add_model`` to refuse."""
    return Runner(model_runner, owner) if isinstance(model_runner, legacy.ModelRunner) else model_runner
