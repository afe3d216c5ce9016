"""The CacheTask that upstream's transfer_cache_async returns: ask it, or wait for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import anyio

from aiodatadist.cache import task as awaitable
from aiodatadist.concurrency.loop_thread import LoopThread
from aiodatadist.errors import LLMException, LLMStatusCode

LET_GO_MILLISECONDS = 30_000
"""Milliseconds that a cancelled transfer has for ending; it is bounded by its own deadlines, which are shorter."""


class CacheTask:
    """A layered transfer under way. Dropping it leaks nothing: the transfer goes on."""

    def __init__(self, thread: LoopThread, inner: awaitable.CacheTask) -> None:
        self._thread = thread
        self._inner = inner

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait; the first destination's failure, or success. ``LLM_TIMEOUT`` when the wait is over first.

        ``LLM_FAILED`` also if it was cancelled: :meth:`cancelled` says so. An interrupt cancels the transfer, and is
        re-raised when no byte can land any more.
        """
        return awaitable.first_failure(self.get_results(timeout_in_millis))

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Wait like :meth:`synchronize`, and return one status per destination, in the order in which they were given. None
        stands for a destination that was cancelled."""
        return self._thread.call(lambda: self._wait(timeout_in_millis))

    async def _wait(self, timeout_in_millis: int | None) -> list[LLMStatusCode | None]:
        try:
            return await self._inner.get_results(timeout_in_millis)
        except asyncio.CancelledError:
            await self._end()
            raise

    async def _end(self) -> None:
        self._inner.cancel()
        with anyio.CancelScope(shield=True):
            await self._inner.get_results(LET_GO_MILLISECONDS)

    def _stop(self) -> None:
        """Cancel it, and wait until no byte can land any more."""
        with suppress(LLMException):  # the loop is over, and the transfer with it
            self.cancel()  # no further interrupt prevents that
            self._thread.call(self._end)

    def done(self) -> bool:
        """It has ended, one way or another."""
        return self._inner.done()

    def cancel(self) -> None:
        """Ask it to stop, without waiting. Its memory is free to use when it is done.

        Raises ForkError: it is under way, and this is a child of the process that began it.
        """
        if not self.done():
            self._thread.post(self._inner.cancel)

    def cancelled(self) -> bool:
        return self._inner.cancelled()

    def exception(self) -> LLMException | None:
        """Why it failed; None while it runs, when it succeeded, and when it was cancelled."""
        return self._inner.exception()

    def __repr__(self) -> str:
        return f"<blocking {self._inner!r}>"
