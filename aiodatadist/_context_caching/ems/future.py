"""The results of ``async_save`` and ``async_load``: transfers on another thread's loop, awaitable from anywhere."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from aiodatadist._concurrency.coroutine import StartedCoroutine
from aiodatadist._concurrency.loop_thread import LOOK_UP_SECONDS, LoopThread
from aiodatadist._concurrency.outlast import outlast_future
from aiodatadist._context_caching.awaited import half_of
from aiodatadist._context_caching.ems.argument_names import upstreams_names
from aiodatadist._context_caching.errors import EmsException, EmsInternalError
from aiodatadist._context_caching.results import CcResult
from aiodatadist._context_caching.transfer.handle import QUIESCE_SECONDS, BlockTransfer

P = ParamSpec("P")
S = TypeVar("S")


class CcFuture(StartedCoroutine[CcResult]):
    """A running save or load. Dropping it leaks nothing."""

    def __init__(self, thread: LoopThread, transfer: BlockTransfer) -> None:
        """Follow the transfer. Called on the thread's loop."""
        self._thread = thread
        self._transfer = transfer
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        # not the future's done(): an interrupt inside it can leave its lock locked for ever
        self._is_over = False
        self._over = threading.Lock()
        self._over.acquire()
        transfer.add_done_callback(self._settle)

    def _settle(self, _: BlockTransfer) -> None:
        """Mark the transfer as ended. Runs on the loop, which must not wait for a lock of an interrupted caller."""
        self._is_over = True
        self._over.release()
        self._ended.set_result(None)

    def _wait_over(self, seconds: float = math.inf) -> None:
        until = time.monotonic() + seconds
        while not self._is_over and time.monotonic() < until:
            if self._over.acquire(timeout=LOOK_UP_SECONDS):
                self._over.release()  # for the next thread that waits

    def done(self) -> bool:
        """Return True if it has ended, with any outcome. Never waits.

        Raises EmsInternalError in a child of the process that started it.
        """
        self._thread.check_process()
        return self._is_over

    def cancel(self) -> None:
        """Ask it to stop. Its memory is in use until it is done."""
        with suppress(EmsException):  # the loop has ended, and the transfer with it; or both are the parent process's
            self._thread.post(self._transfer.cancel)

    def result(self) -> CcResult:
        """Wait until it has ended; return its result. An interrupt cancels it, and it is still waited for.

        Raises:
            EmsException: if it failed or was cancelled.
            RuntimeError: if called on the loop that carries it out, which would wait for itself.
        """
        if not self.done():
            self._thread.check_may_wait()
            try:
                self._wait_over()
            except BaseException:
                self.stop()
                raise
        return self._outcome()

    def stop(self) -> None:
        """Cancel it, and wait until no more bytes can land."""
        self.cancel()
        self._wait_over(QUIESCE_SECONDS)

    def _outcome(self) -> CcResult:
        try:
            with upstreams_names():
                return self._transfer.result()
        except asyncio.CancelledError:
            raise EmsInternalError("the transfer was cancelled: by cancel(), or by Ems.shutdown()") from None

    def __await__(self) -> Generator[Any, None, CcResult]:
        yield from self._wait().__await__()
        return self._outcome()

    async def _wait(self) -> None:
        """Wait for the end, on any loop. If cancelled, cancel the transfer and continue once it has ended."""
        ended = asyncio.wrap_future(self._ended)
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            self.cancel()
            await outlast_future(ended, QUIESCE_SECONDS)
            raise

    def __repr__(self) -> str:
        return f"<CcFuture {self._transfer!r}>"


def waiting(start: Callable[Concatenate[S, P], CcFuture], doc: str) -> Callable[Concatenate[S, P], CcResult]:
    """Return the call ``x`` that starts a transfer with ``async_x`` and waits for its result; ``doc`` is its docstring."""
    begin = start.__name__

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> CcResult:
        future: CcFuture = getattr(self, begin)(*args, **kwargs)
        return future.result()

    return half_of(start, call, begin.removeprefix("async_"), doc)
