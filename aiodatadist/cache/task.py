"""The future that callers of everything that moves bytes get."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from functools import partial
from typing import Any

import anyio

from aiodatadist.cache.names import Key
from aiodatadist.concurrency.coroutine import StartedCoroutine
from aiodatadist.concurrency.loop_time import LoopTime
from aiodatadist.concurrency.origin import Origin
from aiodatadist.counting.callbacks import guarded
from aiodatadist.device import RanAtOnce, TransferCompletion, TransferReport, TransferState
from aiodatadist.errors import LLMException, LLMStatusCode
from aiodatadist.values import checks

logger = logging.getLogger(__name__)

BLOCKS = "{}, {} blocks, all layers"
"""What a transfer that took a shortcut says of itself, once it is asked: key and number of blocks."""


class CacheTask(StartedCoroutine[TransferReport]):
    """A transfer under way. It has started when you get it.

    ``await`` it for its :class:`TransferReport`, or give it to a task group; or keep it, and ask. Dropping it leaks nothing:
    the transfer goes on, its caches stay leased until it ends, and a failure that no caller asked for is logged, with the
    line that started it (in asyncio's debug mode, the last ten that led there). Cancelling the task that awaits it cancels
    the transfer, and the cancellation is delivered only when no byte can land any more.

    It belongs to the event loop of its cluster: elsewhere it can be asked how it is (:meth:`done`, :meth:`cancelled`,
    :meth:`exception`, :meth:`result`), and everything else raises LLMException, in a forked child ForkError.

    Attributes:
        peer: the other cluster, or our own for copies.
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
        """``check_here`` raises where the caller is not on the cluster's event loop. ``about``: what moves, to be shown, or a
        format and its arguments. ``origin``: who started it, if it may fail."""
        self._about = about
        self._check_here = check_here
        self._is_told = False
        self._operation = operation
        self._origin = origin
        self._transfer = transfer
        self.peer = peer

    def __await__(self) -> Generator[Any, None, TransferReport]:
        self._check_here()
        self._is_told = True
        if not self._transfer.is_done:
            yield from self._transfer.wait().__await__()
        elif self._transfer.holds_loop():
            yield
        return self.result()

    def done(self) -> bool:
        """It has ended, one way or another."""
        return self._transfer.is_done

    def add_done_callback(self, callback: Callable[[CacheTask], object]) -> None:
        """Call it on the event loop when the task has ended; at once if it has. What it raises is logged."""
        self._check_here()
        self._transfer.add_done_callback(lambda _: callback(self))

    def cancel(self) -> bool:
        """Ask it to stop; False if it is done. Its memory is free to use only once it is done."""
        self._check_here()
        return self._transfer.cancel()

    def cancelled(self) -> bool:
        return self._transfer.state is TransferState.CANCELLED

    def exception(self) -> LLMException | None:
        """Why it failed; None while it runs, when it succeeded, and when it was cancelled."""
        self._is_told |= self._transfer.is_done
        return self._transfer.error

    def result(self) -> TransferReport:
        """The report of a finished transfer.

        Raises:
            LLMException: it failed.
            asyncio.CancelledError: it was cancelled.
            asyncio.InvalidStateError: it still runs.
        """
        transfer = self._transfer
        self._is_told |= transfer.is_done
        if transfer.state is not TransferState.DONE:
            if not transfer.is_done:
                raise asyncio.InvalidStateError(f"{self!r} is not done")
            if transfer.error is not None:
                raise transfer.error
            raise asyncio.CancelledError(f"{self._operation} was cancelled")
        return TransferReport(transfer.nbytes, transfer.ranges, transfer.queue_seconds, transfer.transfer_seconds)

    async def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait for the end and return the first status that is not success, or success. Do not raise.

        ``LLM_FAILED`` also if it was cancelled: :meth:`cancelled` says so. ``LLM_TIMEOUT`` if the wait is over first; the
        transfer continues then.
        """
        return first_failure(await self.get_results(timeout_in_millis))

    async def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Wait like :meth:`synchronize`, and return one status per destination, in the order in which they were given.

        None stands for a destination that was cancelled. It neither failed nor is complete; upstream has None for one that
        the end of the job left like that.
        """
        self._check_here()
        if timeout_in_millis is not None:
            checks.integer(timeout_in_millis, "timeout_in_millis", checks.UINT32)
        seconds = None if timeout_in_millis is None else timeout_in_millis / 1000
        if not self.done():
            with anyio.move_on_after(seconds):
                await self._wait_quietly()
        elif self._transfer.holds_loop():
            await asyncio.sleep(0)
        if not self.done():
            return [LLMStatusCode.LLM_TIMEOUT] * len(self._transfer.results())
        self._is_told = True
        return [_status(state, error) for state, error in self._transfer.results()]

    async def progress(self) -> AsyncIterator[Any]:
        """``async for done in task.progress()``: a layered transfer tells of each layer at each destination as it arrives,
        also of those that have; see :class:`~aiodatadist.LayerDone`. Ends with the task. Others tell nothing."""
        self._check_here()
        layers = getattr(self._transfer, "progress", None)
        if layers is None:
            await self._wait_quietly()
            return
        async for done in layers():
            yield done

    async def _wait_quietly(self) -> None:
        """Until it is done; does not cancel it when the wait is cancelled."""
        ended = anyio.Event()
        self._transfer.add_done_callback(lambda _: ended.set())
        await ended.wait()

    def __repr__(self) -> str:
        """Peer, key, blocks or slot, layers, bytes that landed, and state."""
        about = self._about
        if isinstance(about, tuple):
            about = about[0].format(*about[1:])
        about = f"{about}, " if about else ""
        transfer = self._transfer
        return f"<CacheTask {self._operation} peer {self.peer}: {about}{transfer.nbytes} bytes, {transfer.state.value}>"


class StartedTask(CacheTask):
    """One that may fail, and says so where no caller asks."""

    __slots__ = ()

    def __del__(self) -> None:
        if not self._is_told:
            self._transfer.drop(f"{self._operation} with cluster {self.peer}", self._origin)


class AtOnce:
    """What tasks have in common that ended well in the call that made them: transfers of blocks between two caches."""

    __slots__ = ("check_here", "loop_time", "operation", "peer")

    def __init__(self, operation: str, peer: int, check_here: Callable[[], None], loop_time: LoopTime) -> None:
        self.operation = operation
        self.peer = peer
        self.check_here = check_here
        self.loop_time = loop_time


class _Late:
    """A slot of the base class's that is filled when it is first asked for."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = CacheTask.__dict__[name]

    def __get__(self, task: EndedTask | None, owner: type | None = None) -> Any:
        if task is None:  # who looks at the class
            return self
        try:
            return self._slot.__get__(task)
        except AttributeError:
            task.fill()
            return self._slot.__get__(task)

    def __set__(self, task: EndedTask, value: object) -> None:
        self._slot.__set__(task, value)


class EndedTask(CacheTask):
    """One of them. What its caller asks for seldom is made when it is asked for."""

    __slots__ = ("_common", "_count", "_key", "_report")

    _about: Any = _Late()
    _check_here: Any = _Late()
    _is_told: Any = _Late()
    _operation: Any = _Late()
    _origin: Any = _Late()
    _transfer: Any = _Late()
    peer: Any = _Late()

    def __init__(self, common: AtOnce, report: TransferReport, key: Key, count: int) -> None:
        self._common = common
        self._report = report
        self._key = key
        self._count = count

    def fill(self) -> None:
        """Make what :class:`CacheTask` has."""
        common, about = self._common, (BLOCKS, self._key, self._count)
        super().__init__(common.operation, common.peer, self.completion, common.check_here, about)

    @property
    def completion(self) -> TransferCompletion:
        """What others see of it."""
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
