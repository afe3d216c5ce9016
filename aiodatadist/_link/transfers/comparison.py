"""A small transfer that is compared without a task: the peer is asked once the bytes have arrived, and its answer ends it."""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Protocol

from aiodatadist._device import TransferState
from aiodatadist._link.data.remote_operation import RemoteOperation
from aiodatadist._wire.messages import Digests, Stop

if TYPE_CHECKING:
    from aiodatadist._cache.catalogue import RemoteCache
    from aiodatadist._link.control.questions import Question
    from aiodatadist._link.data.remote_operation import TransferSpec
    from aiodatadist._link.session import Session
    from aiodatadist._link.transfers.checksums import Checks
    from aiodatadist._values.grid import Grid


class ComparisonOwner(Protocol):
    """The part of the requester that a comparison needs. ``Requester`` explains it."""

    @property
    def session(self) -> Session: ...
    @property
    def checks(self) -> Checks: ...
    def let_go(self, holder: object) -> None: ...
    def taken_back(self, operation: RemoteOperation) -> None: ...


class Comparison(RemoteOperation):
    """A transfer with a checksum.

    If all is at hand when the bytes have arrived, it has no task, which would cost more than the rest: it continues in the
    call that brings the peer's checksums. Otherwise a task does the same.

    Args:
        spec: what the caller wants.
        grid: the bytes that are compared; the destination is its local side.
    """

    __slots__ = ("_grid", "_mine", "_nbytes", "_question", "_remote", "_requester", "_spec", "_timer")

    def __init__(
        self,
        name: str,
        patience: float,
        spec: TransferSpec,
        remote: RemoteCache,
        grid: Grid,
        requester: ComparisonOwner,
    ) -> None:
        super().__init__(name, patience)
        self._requester = requester
        self._spec = spec
        self._remote = remote
        self._grid = grid
        self._nbytes = 0
        self._mine = array("I")
        self._question: Question | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> bool:
        """Ask the peer, and compute the checksums of this end. Return False if nothing was done: that takes a task."""
        requester, remote, spec, grid = self._requester, self._remote, self._spec, self._grid
        checks, session = requester.checks, requester.session
        is_get, digester = spec.direction == "get", session.host.digester
        here, there = (grid.local_side, grid.remote_side) if is_get else (grid.remote_side, grid.local_side)
        if not digester.is_at_hand(spec.entry, here) or not checks.take_turn():
            return False
        if not remote.summing.take_now(grid.total):
            checks.end_turn()
            return False
        self._nbytes = grid.total  # from here on it has a turn
        words = checks.question(spec, remote, there)
        self._question = session.questions.start(words, Digests, None, self._answered, len(there.index))
        self._timer = asyncio.get_running_loop().call_later(spec.seconds, self._too_late)
        self._mine = digester.digests_now(here)  # while the peer computes its own
        return True

    def _answered(self) -> None:
        self.attempt(self._judge)

    def _judge(self) -> None:
        """End the transfer with the peer's answer."""
        question = self._question
        if question is not None:
            self._requester.checks.judge_answer(self._spec, self._remote, self._grid, self._mine, question.answer)
            self.finish(TransferState.DONE)

    def _too_late(self) -> None:
        self._say_stop()
        self.finish(TransferState.FAILED, self._requester.checks.too_slow(self._spec.seconds))

    def taken_back(self) -> None:
        """Fail, because the peer takes its cache back."""
        self._requester.taken_back(self)

    def _interrupt(self) -> None:
        if self._question is None:
            super()._interrupt()
        else:
            self._say_stop()
            self.finish(TransferState.CANCELLED)

    def _say_stop(self) -> None:
        """Tell the peer that it need not sum up any further."""
        session = self._requester.session
        if self._question is not None and session.is_open:
            session.post(Stop(call=self._question.number))

    def _let_go(self) -> None:
        requester = self._requester
        requester.let_go(self)
        if not self._nbytes:
            return
        if self._question is not None:
            requester.session.questions.close(self._question)
        if self._timer is not None:
            self._timer.cancel()
        self._remote.summing.give(self._nbytes)
        requester.checks.end_turn()
