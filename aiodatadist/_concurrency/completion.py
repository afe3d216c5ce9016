"""The base of everything that moves bytes: it ends once, tasks can wait for it, and it can be stopped.

Who owns what
    A :class:`Completion` is made by the object that does the work (a stream, a link, a layered transfer, a context
    cache). That object ends it exactly once, on the loop. Until then the memory belongs to the device. Callers own
    nothing: they may wait, ask it to stop, leave a callback, or forget it.

What cancellation means
    :meth:`Completion.cancel` asks and returns at once; the completion ends when no byte can land any longer. Cancelling
    a task that waits in :meth:`Completion.join` does the same, and the cancellation is delivered at that end. This is
    the only place where a task waits for a device under a shield. If no end comes within ``quiesce_seconds``,
    :meth:`Completion._unanswered` decides: a transfer is then ``STUCK``, and its memory must never be used again. A
    forked child ends its tasks without a wait, because what is under way belongs to its parent.

In which order
    At the end the state is set first. Then the callbacks are called; one of them may know better what happened. Then
    the waiting tasks continue. A callback that fails affects no other.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Self

from aiodatadist._concurrency import forks
from aiodatadist._concurrency.loop_time import loop_time
from aiodatadist._concurrency.origin import Origin, log_unretrieved
from aiodatadist._concurrency.outlast import outlast
from aiodatadist._counting.callbacks import log_raised
from aiodatadist._counting.figures import SUCCESS
from aiodatadist.errors import LLMException, StuckError, TransferTimeout

logger = logging.getLogger(__name__)


class TransferState(Enum):
    """The state of a transfer. ``PENDING`` changes once, to one of the others.

    ``STUCK`` means that the transfer's memory must never be used again.
    """

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STUCK = "stuck"


class Completion(ABC):
    """Work under way that moves bytes, and ends once.

    Attributes:
        state: see :class:`TransferState`.
    """

    __slots__ = ("__weakref__", "_callbacks", "_generation", "_waiters", "state")

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] | None = None  # made when a task first waits
        self._callbacks: list[Callable[[Any], object]] = []
        self._generation = forks.generation
        self.state: TransferState = TransferState.PENDING

    @property
    def is_done(self) -> bool:
        """True once it has ended, with any outcome."""
        return self.state is not TransferState.PENDING

    @property
    def is_cancelled(self) -> bool:
        """True if it ended because it was cancelled."""
        return self.state is TransferState.CANCELLED

    @property
    @abstractmethod
    def quiesce_seconds(self) -> float:
        """The time that it may take after a cancellation until no byte can land any longer."""

    @abstractmethod
    def _cancel(self) -> bool:
        """Ask the object that does the work to stop. Return False if it cannot be stopped any longer."""

    @abstractmethod
    def _unanswered(self) -> None:
        """Handle a cancellation after which no end came within ``quiesce_seconds``."""

    @abstractmethod
    def _let_go(self) -> None:
        """Release what this kept alive, because it has ended."""

    @abstractmethod
    def _what(self) -> str:
        """Return its name for the log."""

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call it on the loop when this has ended; at once if it has already. An exception in it is logged."""
        if self.state is not TransferState.PENDING:
            self._tell(callback)
        else:
            self._callbacks.append(callback)

    def cancel(self) -> bool:
        """Ask it to stop. Return False if it has ended already.

        Its memory belongs to the device until it has ended.
        """
        return not self.is_done and self._cancel()

    def _holds_loop(self) -> bool:
        """Return True if calls have held the event loop so long that awaiting this must suspend, although it has ended."""
        return loop_time(asyncio.get_running_loop()).look()

    async def join(self) -> None:
        """Wait for the end, whatever it is; return at once after it. Cancelling the waiting task cancels this, too."""
        if self.state is TransferState.PENDING:
            try:
                await self._settled()
            except asyncio.CancelledError:
                # a forked child stops nothing: the transfer is its parent's
                if self._generation == forks.generation:
                    self.cancel()
                    if not await outlast(lambda: self.is_done, self._settled, self.quiesce_seconds):
                        self._unanswered()
                raise

    async def _settled(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        waiters = self._waiters = self._waiters or []
        waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in waiters:  # else it ended in this round of the loop
                waiters.remove(waiter)
            raise

    def _end(self, state: TransferState) -> None:
        """Set the final state, call the callbacks, and let waiting tasks continue. Called once."""
        self.state = state
        self._let_go()
        for callback in self._callbacks:
            self._tell(callback)
        self._callbacks.clear()
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            # done if its task was cancelled in this round of the loop
            if not waiter.done():
                waiter.set_result(None)

    def _tell(self, callback: Callable[[Self], object]) -> None:
        try:
            callback(self)
        except BaseException as error:
            log_raised(error, logger, "%s: a done callback failed", self._what())

    def __repr__(self) -> str:
        return f"<{self._what()} {self.state.value}>"


class TransferReport(NamedTuple):
    """The result of a successful transfer.

    Attributes:
        bytes: bytes that landed.
        ranges: pieces that the device was asked for, neighbours merged.
        queue_seconds: time waiting for earlier transfers of the same link.
        transfer_seconds: time from the first piece until the last byte was in place.
    """

    bytes: int
    ranges: int
    queue_seconds: float
    transfer_seconds: float


class TransferCompletion(Completion):
    """A transfer between caches. Await it with :meth:`wait`, or keep it and look at its attributes.

    Attributes:
        error: the reason of a failure, or None.
        nbytes, ranges: bytes known to have landed; ranges handed to the device after merging neighbours.
        queue_seconds, transfer_seconds: time waiting behind others, also after it had begun; time running.
        late_after: its deadline in seconds, once that has passed; it is then being ended, and cannot begin. Before
            that, 0.
    """

    __slots__ = ("_dropped_as", "error", "late_after", "nbytes", "queue_seconds", "ranges", "transfer_seconds")

    def __init__(self) -> None:
        super().__init__()
        self._dropped_as: tuple[str, Origin | None] | None = None
        self.late_after: float = 0.0
        self.error: LLMException | None = None
        self.nbytes: int = 0
        self.ranges: int = 0
        self.queue_seconds: float = 0.0
        self.transfer_seconds: float = 0.0

    @property
    def status(self) -> str:
        """The status of a transfer that has ended: ``LLM_SUCCESS``, ``CANCELLED``, or the reason of its failure."""
        if self.error is not None:
            return self.error.status_code.name
        return SUCCESS if self.state is TransferState.DONE else "CANCELLED"

    @property
    def elapsed(self) -> float:
        """Seconds that it took, from waiting behind others to the end; 0 while it is under way."""
        return max(self.queue_seconds + self.transfer_seconds, 0.0) if self.is_done else 0.0

    async def wait(self) -> None:
        """Wait for the end.

        If it has ended already, this suspends only if calls have held the loop for a millisecond.

        Raises:
            LLMException: if it failed; the destination's contents are undefined, and no byte lands any longer.
            asyncio.CancelledError: if it was cancelled, by :meth:`cancel` or with the waiting task. In both cases this
                returns only when no byte can land any longer. A task that is cancelled just after the end gets it as
                well; ``state`` then has the transfer's own result. If that is a failure, for instance because the peer
                did not confirm the end, it is the cause of this error: a task that did not get its cancellation would
                continue.
        """
        if self.state is TransferState.PENDING:
            try:
                await self.join()
            except asyncio.CancelledError as cancelled:
                if self.error is not None:
                    raise cancelled from self.error
                raise
        elif self._holds_loop():
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        if self.state is TransferState.CANCELLED:
            raise asyncio.CancelledError("the transfer was cancelled")

    def drop(self, name: str, origin: Origin | None) -> None:
        """Give up the caller's interest: from now on a failure that no caller retrieved is logged.

        Args:
            origin: the place where the transfer was started; None if it has succeeded.
        """
        self._dropped_as = name, origin
        if self.is_done:
            self._tell_of_failure(name, origin)

    def _tell_of_failure(self, name: str, origin: Origin | None) -> None:
        if self.error is not None:
            log_unretrieved(logger, name, self.error, origin)

    def expire(self) -> None:
        """Cancel it because it is late: it ends with ``LLM_TIMEOUT``."""
        self.cancel()

    def replace_error(self, error: LLMException) -> None:
        """Set a better-informed error, for instance that the peer died. For done callbacks."""
        self.state = TransferState.STUCK if self.state is TransferState.STUCK else TransferState.FAILED
        self.error = error

    def _finish(self, state: TransferState, error: LLMException | None) -> None:
        """End with a state and an error. Has no effect after the first call."""
        if self.state is not TransferState.PENDING:
            return
        if self.late_after and state is TransferState.CANCELLED:
            state, error = TransferState.FAILED, too_late(self.late_after)
        self.error = error
        self._end(state)
        if self._dropped_as is not None:
            self._tell_of_failure(*self._dropped_as)

    def _unanswered(self) -> None:
        self._finish(TransferState.STUCK, StuckError("the device did not answer a cancellation"))

    def results(self) -> list[tuple[TransferState, LLMException | None]]:
        """Return state and error of each destination."""
        return [(self.state, self.error)]


def too_late(seconds: float, how_far: str = "") -> TransferTimeout:
    """Return the error of a transfer whose deadline has passed."""
    return TransferTimeout(f"not done within the deadline, {seconds:g} s from the call{how_far and ': '}{how_far}")
