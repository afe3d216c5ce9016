"""The door to a life on an event loop in another thread: whatever threads open and close it, each life is closed once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from aiodatadist._blocking import shared_loop
from aiodatadist.errors import LLMException, LLMStatusCode


class Life(Protocol):
    """The part of an object on the event loop."""

    @property
    def close(self) -> Callable[[], Coroutine[Any, Any, None]]:
        """Close everything. Awaited on the loop."""


LifeT = TypeVar("LifeT", bound=Life)
T = TypeVar("T")


class LoopDoor(Generic[LifeT]):
    """The loop's thread, and the life there while it is open. Only :meth:`open` and :meth:`close` wait.

    If one thread closes while another one opens, it waits until the life is open, and closes it. If a signal handler of the
    thread that opens closes, :meth:`open` closes the life as soon as it is open.

    Attributes:
        thread: the loop thread that the process shares, or a separate one.
        opened: the life; None before it is open, and once :meth:`close` was called.
    """

    def __init__(self, what: str, own_thread: str | None = None) -> None:
        """Keep the name for errors, for instance ``"ValueService"``; start a thread of this name if there is one."""
        self.opened: LifeT | None = None
        self._what = what
        self._opening: LifeT | None = None
        self._is_closed = False
        self._lock = threading.RLock()  # reentrant: a signal handler of the thread that holds it may close, too
        if own_thread is None:
            self.thread = shared_loop.acquire()
            self._give_back: Callable[[], None] = partial(shared_loop.release, self.thread)
        else:
            self.thread = shared_loop.separate(own_thread)
            self._give_back = self.thread.join

    def open(self, life: LifeT, opening: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Open the life; return the result of ``opening``, or raise its error.

        Raises LLMException if it is open, or was closed.
        """
        self.thread.check_usable()  # before the lock: its holder may wait for the loop's own thread
        with self._lock:
            if self._is_closed or self.opened is not None:
                raise self._refusal()

            async def open_life() -> T:
                result = await opening()
                self.opened = life  # here, because an interrupt may come before the caller's thread has the result
                return result

            self._opening = life
            try:
                return self.thread.call(open_life)
            finally:
                self._opening = None
                if self._is_closed:
                    self._end()  # type: ignore[unreachable]  # mypy knows no signal handlers

    def open_or_close(self, life: LifeT, opening: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Open the life; release the thread if that raises."""
        try:
            return self.open(life, opening)
        except BaseException:
            if self.thread.is_here and self.opened is None is self._opening:  # refused; nothing waits for this thread
                self._close()
            else:
                self.close()
            raise

    @property
    def is_closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._is_closed

    @property
    def life(self) -> LifeT:
        """The life. Raises LLMException if there is none."""
        life = self.opened  # once: another thread may close it
        if life is None:
            raise self._refusal()
        return life

    def _refusal(self) -> LLMException:
        state = "closed" if self._is_closed else "not open" if self.opened is None else "open already"
        return LLMException(f"this {self._what} is {state}", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)

    def close(self) -> None:
        """Close the life, and release the thread. May be called twice.

        Raises LLMException on the loop's own thread, which would wait for itself; then nothing is closed.
        """
        if not self._is_closed:  # a second caller need not wait for the first one
            self.thread.check_usable()
            with self._lock:
                self._close()

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._opening is None:  # otherwise a signal handler closes, and open() ends it
            self._end()

    def _end(self) -> None:
        life, self.opened = self.opened, None
        try:
            if life is not None:
                self.thread.call(life.close)
        finally:
            self._give_back()
