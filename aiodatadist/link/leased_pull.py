"""A pull of blocks that their owner keeps for it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Literal

from aiodatadist.device import TransferCompletion, TransferState
from aiodatadist.errors import CacheNotFound, LLMException, TransferTimeout
from aiodatadist.link.remote_operation import RemoteOperation
from aiodatadist.wire.messages import MAX_SECONDS, Claim, Claimed, Unclaim

if TYPE_CHECKING:
    from aiodatadist.link.session import Session

_SAID: dict[TransferState, Literal["taken", "released"]] = {
    TransferState.DONE: "taken",
    TransferState.CANCELLED: "released",
}


class LeasedPull(RemoteOperation):
    """It has succeeded when the bytes are here, and the owner said that it kept them. The owner is told what became of it.

    Args:
        seconds: for all of it, whatever it waits for: the owner keeps its blocks no longer.
        patience: seconds in which a lease that the owner does not know may come to be.
    """

    __slots__ = (
        "_call",
        "_is_here",
        "_is_kept",
        "_is_late",
        "_lease",
        "_patience_there",
        "_seconds",
        "_session",
        "_timer",
    )

    def __init__(self, session: Session, lease: str, seconds: float, patience: float, what: str) -> None:
        super().__init__(f"{what} of cluster {session.cluster_id}", 0.0)
        self._session = session
        self._lease = lease
        self._seconds = seconds
        self._patience_there = patience
        self._call = 0
        self._is_kept: bool | None = None
        self._is_here = self._is_late = False
        self._timer = asyncio.get_running_loop().call_later(seconds, self._late)
        session.operations.add(self)
        self.add_done_callback(self._over)
        session.spawn(self._claim)

    @property
    def quiesce_seconds(self) -> float:
        return 0.0 if self._transfer is None else self._transfer.quiesce_seconds

    # ---- what happens ----

    async def _claim(self) -> None:
        lease, seconds, patience = self._lease, min(self._seconds, MAX_SECONDS), self._patience_there
        claim = partial(Claim, lease=lease, seconds=seconds, patience=patience)
        if self.is_done:
            return
        with self.scope, self._session.questions.open(lambda call: claim(call=call), Claimed) as question:
            self._call = question.number
            await question.answered.wait()
            self._answered(question.answer)

    def _answered(self, answer: object) -> None:
        self._is_kept = isinstance(answer, Claimed) and answer.kept
        if self._is_here:
            self._conclude(TransferState.DONE, None)
        elif not self._is_kept and self._transfer is not None:
            self._transfer.cancel()

    def _take_over(self, transfer: TransferCompletion) -> None:
        """The bytes are here, or will not be."""
        self._take_figures(transfer)
        self._is_here = transfer.state is TransferState.DONE
        if not self._is_here or self._is_kept is not None:
            self._conclude(transfer.state, transfer.error)

    def _conclude(self, state: TransferState, error: LLMException | None) -> None:
        if state is TransferState.STUCK:
            self._finish(state, error)
        elif self._is_kept is False:
            hint = "its time was over, another pull has or had it, or its owner took it back"
            self._fail(CacheNotFound(f"cluster {self._session.cluster_id} keeps no blocks as {self._lease}", hint=hint))
        elif self._is_late and state is not TransferState.DONE:
            self._fail(TransferTimeout(f"not done within {self._seconds:g} s of the call"))
        else:
            self._finish(state, error)

    def _fail(self, error: LLMException) -> None:
        error.peer = self._session.cluster_id
        self._finish(TransferState.FAILED, error)

    def _late(self) -> None:
        self._is_late = True
        if self._transfer is not None:
            self._transfer.cancel()
        else:
            self._conclude(TransferState.FAILED, None)

    def _cancel(self) -> bool:
        if self._transfer is not None:
            return self._transfer.cancel()
        self._finish(TransferState.CANCELLED, None)
        return True

    def _over(self, _: object) -> None:
        """It has ended: the first to know, before its callers."""
        session = self._session
        self._timer.cancel()
        self.scope.cancel()
        session.operations.discard(self)
        if session.is_open and self._is_kept is not False and (self._call or self.state in _SAID):
            session.post(Unclaim(call=self._call, lease=self._lease, end=_SAID.get(self.state, "failed")))
        if session.failure is not None and self.is_cancelled:
            self.replace_error(session.copy_of_failure())
        session.check_idle()
