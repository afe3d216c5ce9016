"""The future that every call that moves bytes returns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from functools import partial
from typing import Any

import anyio

from aiodatadist._concurrency.coroutine import StartedCoroutine
from aiodatadist._concurrency.loop_time import LoopTime
from aiodatadist._concurrency.origin import Origin
from aiodatadist._counting.callbacks import guarded
from aiodatadist._device import RanAtOnce, TransferCompletion, TransferReport, TransferState
from aiodatadist._values import checks
from aiodatadist.errors import LLMException, LLMStatusCode

logger = logging.getLogger(__name__)


class CacheTask(StartedCoroutine[TransferReport]):
    """A transfer that has started: ``await`` it for its :class:`TransferReport`, give it to a task group, or poll it.

    Dropping it leaks nothing: the transfer continues, and its caches stay leased until it ends. A failure that no
    caller retrieved is logged, with the line that started the transfer (in asyncio's debug mode, the last ten that led
    there). Cancelling the task that awaits it cancels the transfer, and the cancellation is delivered only once no more
    bytes can land.

    It belongs to the event loop of its cluster. Elsewhere only its state can be read (:meth:`done`, :meth:`cancelled`,
    :meth:`exception`, :meth:`result`); everything else raises LLMException, in a forked child ForkError.

    Attributes:
        peer: the other cluster, or this one for copies.
    """

    __slots__ = ("_about", "_check_here", "_is_told", "_operation", "_origin", "_transfer", "_ways", "peer")

    def __init__(
        self,
        operation: str,
        peer: int,
        transfer: TransferCompletion,
        check_here: Callable[[], None],
        about: object = "",
        origin: Origin | None = None,
    ) -> None:
        """Follow a transfer.

        Args:
            check_here: raises if the caller is not on the cluster's event loop.
            about: what moves, to be shown, or a format and its arguments.
            origin: the line that started it, if it may fail.
        """
        self._about = about
        self._check_here = check_here
        self._is_told = False
        self._operation = operation
        self._origin = origin
        self._transfer = transfer
        self.peer: int = peer

    def __await__(self) -> Generator[Any, None, TransferReport]:
        self._check_here()
        self._is_told = True
        if self._transfer.state is TransferState.PENDING:
            yield from self._transfer.wait().__await__()
        elif self._transfer._holds_loop():
            yield
        return self.result()

    def done(self) -> bool:
        """Return True if it has ended, with any outcome."""
        return self._transfer.is_done

    def add_done_callback(self, callback: Callable[[CacheTask], object]) -> None:
        """Call ``callback`` on the event loop when the task ends, at once if it has ended. Exceptions from it are logged."""
        self._check_here()
        self._transfer.add_done_callback(lambda _: callback(self))

    def cancel(self) -> bool:
        """Ask it to stop; return False if it is done. Its memory may be reused only once it is done."""
        self._check_here()
        return self._transfer.cancel()

    def cancelled(self) -> bool:
        """Return True if it ended by cancellation."""
        return self._transfer.state is TransferState.CANCELLED

    def exception(self) -> LLMException | None:
        """Return why it failed; None while it runs, if it succeeded, and if it was cancelled."""
        self._is_told |= self._transfer.is_done
        return self._transfer.error

    def result(self) -> TransferReport:
        """Return the report of a finished transfer.

        Raises:
            LLMException: if it failed.
            asyncio.CancelledError: if it was cancelled.
            asyncio.InvalidStateError: if it is still running.
        """
        transfer = self._transfer
        self._is_told |= transfer.state is not TransferState.PENDING
        if transfer.state is not TransferState.DONE:
            if transfer.state is TransferState.PENDING:
                raise asyncio.InvalidStateError(f"{self!r} is not done")
            if transfer.error is not None:
                raise transfer.error
            raise asyncio.CancelledError(f"{self._operation} was cancelled")
        return TransferReport(transfer.nbytes, transfer.ranges, transfer.queue_seconds, transfer.transfer_seconds)

    async def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait for the end; return the first status that is not success, or success. Never raises for a failure.

        ``LLM_FAILED`` can also mean that it was cancelled: see :meth:`cancelled`. ``LLM_TIMEOUT`` means that it did not
        end in time; the transfer continues then.
        """
        return first_failure(await self.get_results(timeout_in_millis))

    async def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Wait like :meth:`synchronize`; return a status for each destination, in the order of the call.

        A cancelled destination has None: it neither failed nor is complete. Upstream has None if the end of the job
        left a destination like that.
        """
        self._check_here()
        if timeout_in_millis is not None:
            checks.integer(timeout_in_millis, "timeout_in_millis", checks.UINT32)
        seconds = None if timeout_in_millis is None else timeout_in_millis / 1000
        if not self.done():
            with anyio.move_on_after(seconds):
                await self._wait_quietly()
        elif self._transfer._holds_loop():
            await asyncio.sleep(0)
        if not self.done():
            return [LLMStatusCode.LLM_TIMEOUT] * len(self._transfer.results())
        self._is_told = True
        return [_status(state, error) for state, error in self._transfer.results()]

    async def progress(self) -> AsyncIterator[Any]:
        """Yield a :class:`~aiodatadist.LayerDone` for each layer of a layered transfer at each destination, as it arrives.

        Layers that have arrived before are included. Use it as ``async for done in task.progress()``; it ends with the
        task. Other transfers yield nothing.
        """
        self._check_here()
        layers = getattr(self._transfer, "progress", None)
        if layers is None:
            await self._wait_quietly()
            return
        async for done in layers():
            yield done

    async def _wait_quietly(self) -> None:
        """Wait until it is done. If the wait is cancelled, the transfer is not."""
        ended = anyio.Event()
        # not join(), which would cancel the transfer together with the waiting task
        self._transfer.add_done_callback(lambda _: ended.set())
        await ended.wait()

    def __repr__(self) -> str:
        """Return peer, key, blocks or slot, layers, bytes that landed, and state."""
        about = self._about
        if isinstance(about, tuple):
            about = about[0].format(*about[1:])
        about = f"{about}, " if about else ""
        transfer = self._transfer
        return f"<CacheTask {self._operation} peer {self.peer}: {about}{transfer.nbytes} bytes, {transfer.state.value}>"


class StartedTask(CacheTask):
    """A task that may fail, and reports a failure that no caller retrieves."""

    __slots__ = ()

    def __del__(self) -> None:
        if not self._is_told:
            self._transfer.drop(f"{self._operation} with cluster {self.peer}", self._origin)


class AtOnce:
    """The shared part of tasks that succeeded in the call that made them: transfers of one form between two caches.

    Args:
        about: what moves, as a format of the key and the number of blocks.
    """

    __slots__ = ("_about", "check_here", "loop_time", "operation", "peer")

    def __init__(
        self, operation: str, peer: int, check_here: Callable[[], None], loop_time: LoopTime, about: str
    ) -> None:
        self.operation: str = operation
        self.peer: int = peer
        self.check_here: Callable[[], None] = check_here
        self.loop_time: LoopTime = loop_time
        self._about = about

    def about_of(self, key: object, count: int) -> tuple[object, ...]:
        """Return what a transfer moves, which is formatted only if it is shown."""
        return self._about, key, count


class _Late:
    """A slot of the base class that is filled on first access."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = CacheTask.__dict__[name]

    def __get__(self, task: EndedTask | None, owner: type | None = None) -> Any:
        if task is None:  # accessed on the class
            return self
        try:
            return self._slot.__get__(task)
        except AttributeError:
            task.fill()
            return self._slot.__get__(task)

    def __set__(self, task: EndedTask, value: object) -> None:
        self._slot.__set__(task, value)


class EndedTask(CacheTask):
    """A task that had already succeeded when its call returned. Rarely used attributes are built on first access.

    A small transfer between two known caches takes 5.8 us. Building everything in the call was a large part of the 8.5
    us that it took before.
    """

    __slots__ = ("_common", "_count", "_key", "_report")

    _about: Any = _Late()
    _check_here: Any = _Late()
    _is_told: Any = _Late()
    _operation: Any = _Late()
    _origin: Any = _Late()
    _transfer: Any = _Late()
    peer: Any = _Late()

    def __init__(self, common: AtOnce, report: TransferReport, key: object, count: int) -> None:
        self._common = common
        self._report = report
        self._key = key
        self._count = count

    def fill(self) -> None:
        """Build the attributes of :class:`CacheTask`."""
        common = self._common
        about = common.about_of(self._key, self._count)
        super().__init__(common.operation, common.peer, self.completion, common.check_here, about)

    @property
    def completion(self) -> TransferCompletion:
        """The finished transfer."""
        return RanAtOnce(self._report, self._common.loop_time)

    def __await__(self) -> Generator[Any, None, TransferReport]:
        common = self._common
        common.check_here()
        if common.loop_time.is_over:
            yield
        return self._report

    def done(self) -> bool:
        return True

    def add_done_callback(self, callback: Callable[[CacheTask], object]) -> None:
        self._common.check_here()
        guarded(partial(callback, self), logger, "%s: a done callback failed", self._common.operation)

    def cancelled(self) -> bool:
        return False

    def exception(self) -> LLMException | None:
        return None

    def result(self) -> TransferReport:
        return self._report


def first_failure(results: Sequence[LLMStatusCode | None]) -> LLMStatusCode:
    """Return one status for all destinations: the first that is not success. A cancelled one counts as failed."""
    statuses = (LLMStatusCode.LLM_FAILED if result is None else result for result in results)
    return next((status for status in statuses if status is not LLMStatusCode.LLM_SUCCESS), LLMStatusCode.LLM_SUCCESS)


def _status(state: TransferState, error: LLMException | None) -> LLMStatusCode | None:
    if error is not None:
        return error.status_code
    return LLMStatusCode.LLM_SUCCESS if state is TransferState.DONE else None
