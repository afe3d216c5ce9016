"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiodatadist.context_caching.errors import EmsInternalError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LoopThread:
    """Started when it is made, ended and joined by :meth:`stop`. A daemon: a process that forgets it can end all the same."""

    _problem: OSError | None = None

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._stopping: asyncio.Event
        self._asked: set[concurrent.futures.Future[Any]] = set()
        self._lock = threading.RLock()  # guards the set and its end; a signal handler may post while its thread has it
        self._is_over = False
        self._has_warned = False
        self._name = name
        self._pid = os.getpid()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name=name, daemon=True)
        self._thread.start()
        ready.wait()
        if self._problem is not None:
            self._thread.join()
            raise EmsInternalError(f"{name} has no event loop: {self._problem}") from self._problem

    def _run(self, ready: threading.Event) -> None:
        try:
            asyncio.run(self._serve(ready))
        except OSError as problem:
            self._problem = problem
        finally:
            ready.set()
        with self._lock:
            self._is_over = True
            asked, self._asked = self._asked, set()
        for future in asked:  # whose task never began
            future.cancel()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        await self._stopping.wait()

    @property
    def is_current(self) -> bool:
        """Called from the loop's own thread."""
        return threading.current_thread() is self._thread

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine there, and wait for its result. Interrupted, it is cancelled.

        Raises:
            RuntimeError: called from the loop's own thread, which would wait for itself; or the loop has ended.
        """
        self.check_may_wait()
        coroutine = work()
        with self._lock:
            if self._is_over:
                coroutine.close()
                raise RuntimeError(f"{self._name} has ended")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._asked.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError(f"{self._name} has ended") from None
        except BaseException:
            future.cancel()
            raise
        finally:
            with self._lock:
                self._asked.discard(future)

    def post(self, call: Callable[[], object]) -> None:
        """Call it there some time. Nothing happens if the loop has ended."""
        with self._lock:
            if not self._is_over:
                self._loop.call_soon_threadsafe(call)

    def finish_turn(self) -> None:
        """Wait until what runs there now, and what was asked for before, has had its turn; for a second at most."""
        over = threading.Event()
        self.post(over.set)
        over.wait(1.0)

    def check_process(self) -> None:
        """Raises EmsInternalError: this is a child of the process that has the thread."""
        if self._pid != os.getpid():
            raise EmsInternalError("Ems.init was called before a fork: start processes with spawn")

    def check_may_wait(self) -> None:
        """Blocking is wrong on the loop's own thread, and no good idea on another loop's.

        Raises:
            RuntimeError: this is the loop's own thread.
            EmsInternalError: this is a child of the process that has it.
        """
        self.check_process()
        if self.is_current:
            raise RuntimeError(f"{self._name} cannot wait for itself: await it instead")
        if not self._has_warned and _is_on_a_loop():
            self._has_warned = True
            logger.warning("a blocking call of ContextCaching stops an event loop: ContextCache has the same to await")

    def stop(self) -> None:
        """End the loop, cancel what is left, and join the thread. May be called twice."""
        self.post(self._stopping.set)
        self._thread.join()


def _is_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
