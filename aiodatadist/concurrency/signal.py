"""Something that happens, for tasks that wait for it; it may be told, and made, where no task is.

anyio's own event looks for the async library where it is made. With ``sniffio`` installed, and before anyio 4.12, it finds
it in tasks only; so this one makes anyio's when a task first waits.

Who owns what
    Its owner makes it and tells it, in a callback or in a task, on one loop; any number of tasks of that loop wait. Another
    thread posts to the loop instead: nothing here may be called off it. The tasks own their waits: one that is cancelled
    changes nothing for the others, nor for the signal.

Two uses
    :meth:`Signal.set` tells what happens once and stays so: a link is closed, a question answered. :meth:`Signal.wake` tells
    that something has changed: tasks that wait now go on, look, and wait again if that was not what they wait for. As a task
    looks and waits without an await between, it cannot miss one.
"""

from __future__ import annotations

import anyio


class Signal:
    """Not set when it is made. A signal that is set never becomes unset."""

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

    def wake(self) -> None:
        """Let the tasks that wait now go on, and no later ones."""
        if self._inner is not None and not self._is_set:
            self._inner.set()
            self._inner = None

    async def wait(self) -> None:
        """Until it is set, or the next :meth:`wake`. A checkpoint in any case."""
        if self._inner is None:
            self._inner = anyio.Event()
            if self._is_set:
                self._inner.set()
        await self._inner.wait()
