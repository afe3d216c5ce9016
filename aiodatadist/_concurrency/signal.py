"""Signals for tasks that wait for something to happen. They can be made and set outside tasks.

anyio's own event looks for the async library when it is made. With ``sniffio`` installed, and before anyio 4.12, it
finds it only in tasks; so this one makes anyio's when a task first waits.

Who owns what
    The owner makes the signal and sets it, in a callback or in a task, on one loop; any number of tasks of that loop
    wait. Another thread must post to the loop instead: nothing here may be called off it. The tasks own their waits:
    cancelling one changes nothing for the others, or for the signal.

Two uses
    :meth:`Signal.set` reports something that happens once and stays so: a link is closed, a question answered.
    :meth:`Signal.wake` reports that something has changed: tasks that wait now continue, look, and wait again if that
    was not what they wait for. As a task looks and waits without an await in between, it cannot miss a change.
"""

from __future__ import annotations

import anyio


class Signal:
    """A signal, not set when it is made. Once set, it never becomes unset."""

    __slots__ = ("_inner", "_is_set")

    def __init__(self) -> None:
        self._inner: anyio.Event | None = None
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Set the signal. May be called anywhere on the loop, and more than once."""
        self._is_set = True
        if self._inner is not None:
            self._inner.set()

    def wake(self) -> None:
        """Let the tasks that wait now continue, but no later ones."""
        if self._inner is not None and not self._is_set:
            self._inner.set()
            self._inner = None

    async def wait(self) -> None:
        """Wait until the signal is set, or for the next :meth:`wake`. Always a checkpoint."""
        if self._inner is None:
            self._inner = anyio.Event()
            if self._is_set:
                self._inner.set()
        await self._inner.wait()
