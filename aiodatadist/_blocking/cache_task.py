"""The task that upstream's transfer_cache_async returns: poll it, or wait for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import anyio

from aiodatadist._cache import task as awaitable
from aiodatadist._concurrency.loop_thread import LoopThread
from aiodatadist.errors import LLMException, LLMStatusCode

LET_GO_MILLISECONDS = 30_000
"""Milliseconds in which a cancelled transfer must end. Its own deadlines are shorter."""


class CacheTask:
    """A running layered transfer. Dropping it leaks nothing: the transfer continues."""

    def __init__(self, thread: LoopThread, inner: awaitable.CacheTask) -> None:
        self._thread = thread
        self._inner = inner

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait for the end; return the first destination's failure, or success.

        Returns ``LLM_TIMEOUT`` if the transfer does not end in time. ``LLM_FAILED`` can also mean that it was
        cancelled: see :meth:`cancelled`. An interrupt cancels the transfer, and is raised again once no more bytes can
        land.
        """
        return awaitable.first_failure(self.get_results(timeout_in_millis))

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Wait like :meth:`synchronize`; return a status for each destination, in the order of the call.

        A cancelled destination has None.
        """
        return self._thread.call(lambda: self._wait(timeout_in_millis))

    async def _wait(self, timeout_in_millis: int | None) -> list[LLMStatusCode | None]:
        try:
            return await self._inner.get_results(timeout_in_millis)
        except asyncio.CancelledError:
            await self._end()
            raise

    async def _end(self) -> None:
        self._inner.cancel()
        with anyio.CancelScope(shield=True):  # bounded: bytes may land until the transfer has ended
            await self._inner.get_results(LET_GO_MILLISECONDS)

    def _stop(self) -> None:
        """Cancel it, and wait until no more bytes can land."""
        with suppress(LLMException):  # the loop has ended, and the transfer with it
            self.cancel()  # posted first: a further interrupt cannot prevent it
            self._thread.call(self._end)

    def done(self) -> bool:
        """Return True if it has ended, with any outcome."""
        return self._inner.done()

    def cancel(self) -> None:
        """Ask it to stop, without waiting. Its memory may be reused once it is done.

        Raises ForkError if it is running and this is a child of the process that started it.
        """
        if not self.done():
            self._thread.post(self._inner.cancel)

    def cancelled(self) -> bool:
        """Return True if it ended by cancellation."""
        return self._inner.cancelled()

    def exception(self) -> LLMException | None:
        """Return why it failed; None while it runs, if it succeeded, and if it was cancelled."""
        return self._inner.exception()

    def __repr__(self) -> str:
        return f"<blocking {self._inner!r}>"
