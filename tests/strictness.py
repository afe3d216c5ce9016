"""A stricter anyio, like the one before 4.12 beside ``sniffio``: it refuses to be used outside a task."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

from anyio._core import _eventloop

OFFENCES: list[str] = []
"""Where anyio was used in a callback of a running loop, since :func:`taken`: most of these would only be logged."""

_current: Callable[[], str | None] | None = getattr(_eventloop, "current_async_library", None)


def _library() -> str | None:
    if asyncio._get_running_loop() is None or asyncio.current_task() is not None:
        return _current() if _current is not None else None
    OFFENCES.append("".join(traceback.format_stack(limit=12)[:-1]))
    return None


def install() -> None:
    """Make this process strict from now on. An anyio that has no such function is as strict by itself."""
    module: Any = _eventloop
    if _current is not None:
        module.current_async_library = _library


def taken() -> list[str]:
    """Return the offences found since the last call."""
    found = OFFENCES.copy()
    OFFENCES.clear()
    return found
