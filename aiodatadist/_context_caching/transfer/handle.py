"""The handle of a running save or load."""

from __future__ import annotations

import asyncio
import logging
import os
from asyncio import _get_running_loop  # get_running_loop() raises where there is none, which is fine here
from collections.abc import Callable, Generator
from typing import Any, Self

import anyio.lowlevel

from aiodatadist._concurrency import forks
from aiodatadist._concurrency.completion import Completion, TransferState
from aiodatadist._concurrency.coroutine import StartedCoroutine
from aiodatadist._concurrency.origin import Origin, log_unretrieved
from aiodatadist._concurrency.scope import Scope
from aiodatadist._context_caching.errors import EmsException, EmsInternalError, EmsInvalidArgument, fork_refusal
from aiodatadist._context_caching.results import CcResult
from aiodatadist._device import StreamLimits, give_way

logger = logging.getLogger(__name__)

QUIESCE_SECONDS = 2 * StreamLimits().quiesce
"""Seconds in which a device must release memory after a cancellation: twice the limit of its stream."""


class BlockTransfer(Completion, StartedCoroutine[CcResult]):
    """A save or load that has started: ``await`` it for its :class:`CcResult`, give it to a task group, or poll it.

    It ends once no more bytes can land, whatever the outcome. Dropping it leaks nothing; a failure that no caller
    retrieved is logged, with the line that started the transfer. Cancelling the task that awaits it cancels the
    transfer, and the cancellation is delivered only once the transfer has ended. It belongs to the event loop on which
    it was started: awaiting or cancelling it on another loop raises EmsInvalidArgument, and in a forked child
    EmsInternalError.

    Attributes:
        seconds: time limit that the caller gave, infinite without one.
        is_asked_to_stop: True if it was cancelled.
        what: the call that started it, for the log.
    """

    quiesce_seconds: float = QUIESCE_SECONDS

    def __init__(self, what: str, seconds: float) -> None:
        self._error: EmsException | None = None
        self._is_told = False
        self._origin = Origin()
        super().__init__()
        self.seconds = seconds
        self._scope = Scope()  # of the task that carries it out
        self.is_asked_to_stop: bool = False
        self.what = what
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._result: CcResult | None = None

    def __await__(self) -> Generator[Any, None, CcResult]:
        self._check_loop()
        self._is_told = True
        yield from (give_way() if self.is_done else self.join()).__await__()
        return self.result()

    def __del__(self) -> None:
        if self._error is not None and not self._is_told:
            log_unretrieved(logger, self.what, self._error, self._origin)

    def done(self) -> bool:
        """Return True if it has ended, with any outcome."""
        return self.is_done

    def cancelled(self) -> bool:
        """Return True if it ended by cancellation."""
        return self.is_cancelled

    def _cancel(self) -> bool:
        self._check_loop()
        self.is_asked_to_stop = True
        self._scope.cancel()
        return True

    @property
    def error(self) -> EmsException | None:
        """The reason of its failure, for counters. Callers get it from :meth:`result`."""
        return self._error

    @property
    def outcome(self) -> CcResult | None:
        """The result, for counters; None if it failed or was cancelled."""
        return self._result

    def result(self) -> CcResult:
        """Return the result.

        Raises:
            EmsTimeout, EmsIoError, EmsInternalError: if it failed; ``partial`` is the result up to the failure.
            asyncio.CancelledError: if it was cancelled.
            asyncio.InvalidStateError: if it is still running.
        """
        if not self.done():
            raise asyncio.InvalidStateError(f"{self!r} is not done")
        self._is_told = True
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise asyncio.CancelledError(f"{self.what} was cancelled")
        return self._result

    async def quiesced(self) -> None:
        """Wait until its memory is the caller's again. Cancels nothing, and does not raise if the transfer failed.

        Raises:
            EmsInternalError: if the device never released the memory: it must not be used again.
        """
        self._check_loop()
        await (anyio.lowlevel.checkpoint() if self.is_done else self._settled())
        if self.state is TransferState.STUCK:
            raise EmsInternalError(f"{self.what}: the device did not release the memory")

    def _check_loop(self) -> None:
        if self._pid != os.getpid():
            raise fork_refusal(f"{self.what} was started", forks.since(self._pid))
        running = _get_running_loop()
        if running is not self._loop:
            where = "there is no event loop here" if running is None else "this is another event loop"
            raise EmsInvalidArgument(f"{where}: use {self.what} on the one that started it")

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call ``callback`` on the loop when this ends, at once if it has ended. Exceptions from it are logged."""
        if self.is_done:
            self._tell(callback)
        else:
            super().add_done_callback(callback)

    def _finish(self, result: CcResult | None, error: EmsException | None, *, is_stuck: bool = False) -> None:
        """End the transfer, once. Neither result nor error means that it was cancelled."""
        if self.is_done:
            return
        self._result, self._error = result, error
        if is_stuck:
            self._end(TransferState.STUCK)
        elif error is not None:
            self._end(TransferState.FAILED)
        else:
            self._end(TransferState.CANCELLED if result is None else TransferState.DONE)

    def _unanswered(self) -> None:
        """Do nothing: the task that carries it out continues, and ends it."""

    def _let_go(self) -> None:
        """Do nothing: loans belong to the transfer's task, and slots to the cache."""

    def _what(self) -> str:
        return self.what

    def __repr__(self) -> str:
        state = "running" if not self.done() else "cancelled" if self.cancelled() else "done"
        return f"<Transfer {self.what} {state}>"
