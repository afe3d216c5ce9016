"""Pairs of calls, of which one half is written: ``start_x`` starts a transfer, and ``x`` also waits for its result."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import update_wrapper
from inspect import signature
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from aiodatadist._context_caching.results import CcResult
from aiodatadist._context_caching.running import RunningTransfers
from aiodatadist._context_caching.transfer.handle import BlockTransfer


class Starter(Protocol):
    """An object with calls that start transfers."""

    _running: RunningTransfers


P = ParamSpec("P")
S = TypeVar("S", bound=Starter)
Call = TypeVar("Call", bound=Callable[..., Any])


def awaited(
    start: Callable[Concatenate[S, P], BlockTransfer], doc: str, *, check: Callable[[S], object] | None = None
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, CcResult]]:
    """Return the call that waits for its turn, starts a transfer with ``start``, and waits for the result.

    Args:
        start: named ``start_x``, with a keyword argument ``timeout``; the call is named ``x``. A subclass may override
            it.
        doc: the docstring of the call.
        check: raises if the object cannot be used for such a call, before the call waits for its turn.
    """
    parameters = signature(start).parameters
    wanted_name, timeout = list(parameters)[1], parameters["timeout"].default
    begin, name = start.__name__, start.__name__.removeprefix("start_")

    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> CcResult:
        if check is not None:
            check(self)
        wanted = args[0] if args else kwargs.get(wanted_name)
        given: Any = kwargs.get("timeout", timeout)
        seconds, left = await self._running.time_left(name, given, wanted)
        transfer: BlockTransfer = getattr(self, begin)(*args, **{**kwargs, "timeout": left})
        transfer.seconds = seconds
        return await transfer

    return half_of(start, call, name, doc)


def half_of(start: Callable[..., Any], call: Call, name: str, doc: str) -> Call:
    """Let the call look as if it were written beside ``start``: with its parameters, but its own name and result."""
    update_wrapper(call, start)
    call.__name__, call.__doc__ = name, doc
    call.__qualname__ = f"{start.__qualname__.rpartition('.')[0]}.{name}"
    call.__annotations__ = {**start.__annotations__, "return": "CcResult"}
    call.__signature__ = signature(start).replace(return_annotation="CcResult")  # type: ignore[attr-defined]
    return call
