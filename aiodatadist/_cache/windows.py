"""Windows: the memory of an allocated cache as objects of Python, which keep the cache from being deallocated."""

from __future__ import annotations

import asyncio
import ctypes
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiodatadist._cache.table import Entry
from aiodatadist._device import Memory
from aiodatadist._values.descriptors import Cache


def windows(entry: Entry, memory: Memory) -> list[Any]:
    """Return a writable buffer per tensor of a cache. While one of them is alive, so is ``entry.views()``."""
    token = entry.views() or _Token()
    entry.views = weakref.ref(token)
    view = memory.view()
    return [_window(view, address - memory.address, entry.nbytes, token) for address in entry.addresses]


def call_when_gone(token: object, loop: asyncio.AbstractEventLoop, call: Callable[[Cache], None], cache: Cache) -> None:
    """Call back on the loop when the last window is gone, unless the interpreter ends first."""
    weakref.finalize(token, _tell, loop, call, cache).atexit = False


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[Cache], None], cache: Cache) -> None:
    """Call back on the loop, from whatever thread the garbage collector runs in."""
    with suppress(RuntimeError):  # the loop is closed, and so is the device with its memory
        loop.call_soon_threadsafe(call, cache)


class _Token:
    """An object that lives as long as one window of a cache."""


def _window(view: memoryview, offset: int, nbytes: int, token: object) -> Any:
    """Return bytes of ``view`` as an object that keeps it, and ``token``, alive."""
    kind = type("Window", (ctypes.c_char * nbytes,), {})
    window = kind.from_buffer(view, offset)  # type: ignore[attr-defined]
    window.token = token
    return window
