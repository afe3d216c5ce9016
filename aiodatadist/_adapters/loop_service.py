"""The life of an adapter's object on an event loop in another thread, and the door to it for other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.abc

from aiodatadist._blocking import shared_loop
from aiodatadist._concurrency.resident import Misuse, Resident
from aiodatadist.errors import InternalError, LLMException, LLMStatusCode


class LoopService:
    """Resources and a task group that are open from :meth:`open` to :meth:`close`. Both are awaited on the same loop.

    Attributes:
        group: for tasks that end with it. Set once :meth:`open` has returned.
    """

    group: anyio.abc.TaskGroup

    def __init__(self, what: str) -> None:
        """Keep the noun for messages, for instance ``"value service"``."""
        self._what = what
        self._resident: Resident | None = None

    async def open(
        self, enter: Callable[[AsyncExitStack], Awaitable[object]], leave: Callable[[], object] = lambda: None
    ) -> None:
        """Open resources. Raises what ``enter`` raises, with everything closed.

        Args:
            enter: opens resources. What it puts on the stack is closed at the end, once all tasks of the group have
                ended.
            leave: called at the end, before the tasks of the group are cancelled.
        """
        resident = self._resident = Resident(
            f"aiodatadist {self._what}", self._refusal, what=self._what, unfinished=f"a {self._what} was not closed"
        )

        async def live(started: asyncio.Future[None]) -> None:
            async with AsyncExitStack() as stack:
                await enter(stack)  # before there is a group, which would wrap an error in an ExceptionGroup
                self.group = await stack.enter_async_context(anyio.create_task_group())
                started.set_result(None)
                await resident.stopping.wait()
                leave()
                self.group.cancel_scope.cancel()

        await resident.start(live)

    async def close(self) -> None:
        """Cancel all tasks, close what was opened, and raise what failed."""
        if self._resident is not None:
            await self._resident.stop()
            self._resident.result()

    @property
    def is_ending(self) -> bool:
        """True once :meth:`close` was called, or the loop ends."""
        return self._resident is None or self._resident.stopping.is_set()

    @property
    def error(self) -> BaseException | None:
        """The error that ended it, or None if it was closed in order. May be read from any thread."""
        return None if self._resident is None else self._resident.error

    def _refusal(self, misuse: Misuse, reason: str | None) -> Exception:
        return InternalError(f"{self._what}: {reason or misuse.value}")


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
        opened: the life; None before :meth:`open` has returned, and once :meth:`close` was called.
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
            self._opening = life
            try:
                opened: T = self.thread.call(opening)
                self.opened = life
            finally:
                self._opening = None
                if self._is_closed:
                    self._end()  # type: ignore[unreachable]  # mypy knows no signal handlers
        return opened

    def open_or_close(self, life: LifeT, opening: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Open the life; release the thread if that raises."""
        try:
            return self.open(life, opening)
        except BaseException:
            self.close()
            raise

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
