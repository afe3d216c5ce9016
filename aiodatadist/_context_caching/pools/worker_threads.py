"""Blocking calls of an engine, in a few threads of the pool's own.

Such a call cannot be stopped. If its caller gives up, it continues, and keeps its thread and the memory that it works
on until it returns. So that a hanging peer does not take all threads, each peer has a share of them; if only abandoned
calls use a share, further calls are refused at once.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio

from aiodatadist._concurrency.threads import DaemonThread
from aiodatadist._context_caching.pools.contract import PoolUnreachable

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TooManyHang(Exception):
    """All threads that this peer may use are taken by hanging calls."""


@dataclass(eq=False)
class _Share:
    permits: anyio.Semaphore
    abandoned: int = 0


async def _until_done(future: asyncio.Future[Any], work: Callable[[], Awaitable[object]]) -> None:
    """Await the work, but only until the future is done."""
    with anyio.CancelScope() as scope:

        def stop(_: object) -> None:
            scope.cancel()

        future.add_done_callback(stop)
        try:
            await work()
        finally:
            future.remove_done_callback(stop)


class WorkerThreads:
    """Threads for blocking calls. They start when they are first needed.

    Args:
        threads: most threads.
        share: most threads that one peer may use.
    """

    def __init__(self, threads: int, share: int) -> None:
        self._limit = threads
        self._share = share
        self._permits = anyio.Semaphore(threads, fast_acquire=True)
        self._shares: defaultdict[str, _Share] = defaultdict(lambda: _Share(anyio.Semaphore(share, fast_acquire=True)))
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ended = 0
        self._all_ended = anyio.Event()
        self._waiting: set[anyio.CancelScope] = set()
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self.running = 0
        self.abandoned = 0

    async def run(
        self,
        peer: str,
        call: Callable[[], T],
        over: Callable[[], object],
        look: Callable[[], Awaitable[object]] | None = None,
        every: float = 0.5,
    ) -> T:
        """Return or raise what ``call`` returns or raises.

        Args:
            over: called once, on the event loop, when the call has returned or was never made; perhaps after a
                cancelled wait.
            look: awaited whenever another ``every`` seconds have passed without a return. An exception from it ends the
                wait.

        Raises:
            TooManyHang: if too many calls hang. Nothing was started.
            PoolUnreachable: if the threads are closed. Nothing was started.
        """
        share = self._shares[peer]
        try:
            if share.abandoned >= self._share or self.abandoned >= self._limit:
                raise TooManyHang(f"{share.abandoned} calls to {peer}, {self.abandoned} in all, hang in the engine")
            await self._admit(share)
        except BaseException:
            over()
            raise
        future = self._start(call)
        try:
            while not (await asyncio.wait([future], timeout=every if look is not None else None))[0]:
                assert look is not None
                await _until_done(future, look)
        except BaseException:  # cancelled, or the look failed: the call itself continues
            if not future.done():
                share.abandoned += 1
                self.abandoned += 1
                future.add_done_callback(lambda _: self._forgive(share))
            raise
        finally:
            if future.done():
                self._finish(share, future, over)
            else:
                future.add_done_callback(lambda done: self._finish(share, done, over))
        return future.result()

    async def _admit(self, share: _Share) -> None:
        """Wait for the share's turn and a thread. Raises PoolUnreachable if the threads are closed, also meanwhile."""
        self._check_open()
        with anyio.CancelScope() as wait:
            self._waiting.add(wait)
            try:
                await share.permits.acquire()
                try:
                    await self._permits.acquire()
                except BaseException:  # cancelled by the caller, or by aclose()
                    share.permits.release()
                    raise
            finally:
                self._waiting.discard(wait)
        if self._is_closed and not wait.cancelled_caught:
            share.permits.release()
            self._permits.release()
        self._check_open()

    def _check_open(self) -> None:
        if self._is_closed:
            raise PoolUnreachable("this pool is closed")

    def _start(self, call: Callable[[], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            settle: Callable[..., None]
            try:
                settle, outcome = future.set_result, call()
            except BaseException as error:
                settle, outcome = future.set_exception, error  # type: ignore[assignment]
            self._tell(settle, outcome)

        self.running += 1
        self._jobs.put(job)
        if len(self._threads) < min(self._limit, self.running):
            thread = DaemonThread(self._work, "aiodatadist engine call")
            self._threads.append(thread)
            thread.start()
        return future

    def _forgive(self, share: _Share) -> None:
        share.abandoned -= 1
        self.abandoned -= 1

    def _finish(self, share: _Share, future: asyncio.Future[Any], over: Callable[[], object]) -> None:
        self.running -= 1
        share.permits.release()
        self._permits.release()
        if (error := future.exception()) is not None:
            logger.debug("a call of the engine raised %r", error)
        over()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self._tell(self._thread_ended)

    def _tell(self, what: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(what, *args)
        except RuntimeError:  # the loop is closed: no caller waits any longer
            logger.debug("a call of the engine returned after its event loop")

    def _thread_ended(self) -> None:
        self._ended += 1
        if self._ended == len(self._threads):
            self._all_ended.set()

    async def aclose(self, seconds: float) -> bool:
        """End the threads; return True if all ended in time. Threads with hanging calls end when these return.

        Calls that wait for a thread are refused.
        """
        self._is_closed = True
        for wait in list(self._waiting):
            wait.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        if self._threads:
            # shielded: the caller frees memory afterwards that these threads may still use
            with anyio.move_on_after(seconds, shield=True):
                await self._all_ended.wait()
            if not self._all_ended.is_set():
                return False
        for thread in self._threads:
            thread.join()  # returns at once: each thread has reported its end
        return True
