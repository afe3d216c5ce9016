"""A cancel scope that can be made, cancelled and given a deadline outside tasks: in callbacks of the event loop.

anyio's own scope looks for the async library when it is made. With ``sniffio`` installed, and before anyio 4.12, it
finds it only in tasks; so this one makes anyio's when a task enters it.

Who owns what
    The object that may have to stop a task makes the scope and hands it to that task, which enters it. A later task may
    enter it again, once the first one has left it. The scope can be cancelled from anywhere on its loop, before and
    after that; it belongs to no other thread.

What cancellation means
    The body ends at its next await, and the scope's own cancellation stays within the scope: ``cancelled_caught``. A
    scope that was cancelled before it was entered cancels the body at its first await.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Self

import anyio


class Scope:
    """A cancel scope. Before a task enters it, and from callbacks, it can be cancelled and given a deadline."""

    __slots__ = ("_deadline", "_inner", "_is_cancelled")

    def __init__(self) -> None:
        self._inner: anyio.CancelScope | None = None
        self._is_cancelled = False
        self._deadline = math.inf

    def cancel(self) -> None:
        """Stop what runs within; or what will run, at its first await."""
        self._is_cancelled = True
        if self._inner is not None:
            self._inner.cancel()

    @property
    def cancel_called(self) -> bool:
        """True if it was cancelled, or its deadline has passed."""
        return self._is_cancelled or (self._inner is not None and self._inner.cancel_called)

    @property
    def cancelled_caught(self) -> bool:
        """True if what ran within ended early, because of this scope."""
        return self._inner is not None and self._inner.cancelled_caught

    @property
    def deadline(self) -> float:
        """The deadline, by the event loop's clock."""
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
