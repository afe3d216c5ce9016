"""Leased pulls: pulls of blocks that their owner keeps meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from aiodatadist._device import TransferCompletion, TransferState
from aiodatadist._link.control.peer_leases import SLACK_SECONDS
from aiodatadist._link.control.questions import Question
from aiodatadist._link.data.remote_operation import RemoteOperation, TransferSpec
from aiodatadist._values import checks
from aiodatadist._values.digests import LeaseDigests, Refusal
from aiodatadist._values.selection import BlockParts
from aiodatadist._wire.messages import MAX_SECONDS, Claim, Claimed, Unclaim
from aiodatadist.errors import CacheNotFound, DataCorrupted, LeaseMismatch, LLMException, TransferTimeout

if TYPE_CHECKING:
    from aiodatadist._link.transfers.running import RunningTransfers

Start = Callable[[], list[tuple[TransferCompletion, int]]]

_SAID: dict[TransferState, Literal["taken", "released"]] = {
    TransferState.DONE: "taken",
    TransferState.CANCELLED: "released",
}
_GRAVITY = {
    TransferState.DONE: 0,
    TransferState.CANCELLED: 1,
    TransferState.FAILED: 2,
    TransferState.STUCK: 3,
}


class KeptBlocks(NamedTuple):
    """The claim that a pull makes on the owner of the blocks.

    Attributes:
        lease: the name of the lease.
        digests: digests of all blocks that the ticket names, and of this end's prompt. The owner compares them with the
            lease's.
        patience: seconds for which the claim waits if the owner does not know the lease yet.
        takers: the number of peers that share the blocks.
        parts: returns the parts to pull. It is called once the owner has confirmed the claim. If None, the transfer's
            specification says what to pull.
    """

    lease: str
    digests: LeaseDigests
    patience: float
    takers: int
    parts: Callable[[], BlockParts] | None = None

    def parts_of(self, spec: TransferSpec) -> TransferSpec:
        """Return the specification, with the parts that ``parts()`` returns if there is such a function."""
        if self.parts is None:
            return spec
        parts = checks.instance(self.parts(), "parts()", BlockParts)
        return replace(spec, selection=replace(spec.selection, parts=parts))


class LeasedPull(RemoteOperation):
    """A pull that succeeds when the bytes have landed and the owner has confirmed that it kept the blocks meanwhile.

    The owner is told how the pull ended. It keeps the blocks for the pull's time and a little more, or for its own shorter
    limit, of which it tells this end. Bytes that land later, for instance because this process was stopped, may be another
    request's. Then the pull fails.

    Args:
        seconds: the time limit, waiting included. The owner keeps its blocks no longer, and may have a shorter limit.
        start: starts the transfers, which run one after the other, and returns each with its number of blocks. It is called
            once the owner has confirmed the claim, unless :meth:`begin` is called before.
    """

    __slots__ = (
        "_began",
        "_here_at",
        "_is_expired",
        "_is_here",
        "_is_kept",
        "_is_late",
        "_is_limited",
        "_is_stopped",
        "_kept",
        "_kept_until",
        "_landed",
        "_outcome",
        "_portions",
        "_question",
        "_running",
        "_seconds",
        "_session",
        "_start",
        "_timer",
        "_under_way",
        "_why",
    )

    def __init__(self, running: RunningTransfers, kept: KeptBlocks, seconds: float, what: str, start: Start) -> None:
        session = running.session
        super().__init__(f"{what} of cluster {session.cluster_id}", 0.0)
        self._running = running
        self._session = session
        self._kept = kept
        self._seconds = seconds
        self._start: Start | None = start
        self._portions: list[tuple[TransferCompletion, int]] = []
        self._under_way = self._landed = 0
        self._question: Question | None = None
        self._is_kept: bool | None = None
        self._why = ""
        self._is_here = self._is_late = self._is_expired = self._is_stopped = self._is_limited = False
        self._outcome: tuple[TransferState, LLMException | None] | None = None
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._here_at = 0.0
        self._kept_until = self._began + min(seconds, MAX_SECONDS) + SLACK_SECONDS
        self._timer = loop.call_later(seconds, self._late)
        running.operations.add(self)
        self.add_done_callback(self._over)
        session.spawn(self._claim)

    @property
    def quiesce_seconds(self) -> float:
        return max((portion.quiesce_seconds for portion, _ in self._portions), default=0.0)

    def begin(self) -> None:
        """Start the transfers. From now on the pull ends with them."""
        start, self._start = self._start, None
        if start is not None:
            self.attempt(lambda: self._watch(start()))

    def _watch(self, portions: list[tuple[TransferCompletion, int]]) -> None:
        self._portions = portions
        self._under_way = len(portions)
        for portion, _ in portions:
            portion.add_done_callback(self._portion_over)

    # ---- what happens ----

    async def _claim(self) -> None:
        lease, (blocks, prompt), patience, takers, _ = self._kept
        claim = partial(
            Claim,
            lease=lease,
            seconds=min(self._seconds, MAX_SECONDS),
            patience=patience,
            takers=takers,
            blocks_digest=blocks,
            prompt_digest=prompt,
        )
        # If the pull was cancelled before this task ran, a claim would keep blocks that no pull takes.
        if not self.is_done:
            self._question = self._session.questions.start_repeated(
                lambda call: claim(call=call), Claimed, self._answered
            )

    def _answered(self) -> None:
        answer = None if self._question is None else self._question.answer
        self._is_kept = isinstance(answer, Claimed) and answer.kept
        if isinstance(answer, Claimed):
            self._why = answer.why
            if 0 < answer.seconds < self._seconds:
                self._limit(answer.seconds)
        # the bytes landed before this answer, and the pull waited only for it
        if self._outcome is not None:
            self._conclude(*self._outcome)
        elif self._is_kept:
            self.begin()
        # Reading has begun, and the owner does not keep the blocks: what lands may be another request's.
        elif self._start is None:
            self._stop()
        else:  # nothing was started
            self._conclude(TransferState.FAILED, None)

    def _limit(self, seconds: float) -> None:
        """Shorten the time limit: the owner keeps the blocks no longer than this."""
        self._is_limited = True
        self._seconds = seconds
        self._kept_until = self._began + seconds + SLACK_SECONDS
        loop = asyncio.get_running_loop()
        self._timer.cancel()
        self._timer = loop.call_later(max(self._began + seconds - loop.time(), 0.0), self._late)
        # The bytes came before this answer. If the owner had given the blocks up by then, they may be another request's.
        if self._here_at >= self._kept_until:
            self._is_expired, self._landed = True, 0

    def _stop(self) -> bool:
        """Cancel the transfers. Return True if one of them is still under way."""
        self._is_stopped = True
        told = [portion.cancel() for portion, _ in self._portions]
        return any(told)

    def _portion_over(self, portion: TransferCompletion) -> None:
        self._under_way -= 1
        if portion.state is not TransferState.DONE and not self._is_stopped:  # once: cancelling the others leads here
            self._stop()
        if self._under_way == 0 and self._portions:
            self._take_over_all()

    def _take_over_all(self) -> None:
        """Sum up the transfers, which have all ended, and end the pull unless the owner's answer is still needed."""
        portions, self._portions = self._portions, []
        self.nbytes: int = sum(p.nbytes for p, _ in portions)
        self.ranges: int = sum(p.ranges for p, _ in portions)
        self.queue_seconds: float = portions[0][0].queue_seconds
        self.transfer_seconds: float = sum(p.transfer_seconds for p, _ in portions)
        undone = [portion for portion, _ in portions if portion.state is not TransferState.DONE]
        self._is_here = not undone
        self._here_at = asyncio.get_running_loop().time()
        self._is_expired = self._here_at >= self._kept_until
        for portion, blocks in portions:
            if portion.state is not TransferState.DONE or self._is_expired:
                if isinstance(portion.error, DataCorrupted) and not self._is_expired:
                    self._landed += portion.error.landed_blocks
                break
            self._landed += blocks
        # A transfer that failed, or is stuck, has the reason. The others were cancelled because of that one.
        worst = max([portion for portion, _ in portions], key=lambda portion: _GRAVITY[portion.state])
        self._outcome = worst.state, worst.error
        if self._is_stopped and self._is_kept is None and worst.state is TransferState.DONE:
            # The pull was cancelled, or late, in the tick in which the bytes landed. They count only if the owner confirms
            # the claim, and the caller no longer waits for that.
            self._outcome = TransferState.CANCELLED, None
        may_count = self._outcome[0] is TransferState.DONE or (self._landed and worst.state is TransferState.FAILED)
        if self._is_kept is not None or not may_count:
            self._conclude(*self._outcome)

    def _conclude(self, state: TransferState, error: LLMException | None) -> None:
        if error is not None and self._is_kept:
            error.landed_blocks = self._landed
        if state is TransferState.STUCK:
            self._finish(state, error)
        elif self._is_kept is False:
            self._fail(self._not_kept())
        elif self._is_expired or (self._is_late and state is not TransferState.DONE):
            why = ", and the owner keeps its blocks no longer" if self._is_limited else ""
            self._fail(TransferTimeout(f"not done within {self._seconds:g} s of the call{why}"))
        else:
            self._finish(state, error)

    def _not_kept(self) -> CacheNotFound:
        who, lease = f"cluster {self._session.cluster_id}", self._kept.lease
        if self._why:
            words = f"{who} refused the claim of lease {lease}: {self._why}"
            return LeaseMismatch(words, hint=self._hint())
        hint = "it expired, another pull has or had it, its owner took it back, or too many claims came before their leases"
        ended = CacheNotFound(f"{who} keeps no blocks as {lease}", hint=hint)
        ended.retryable = False  # a lease that has ended does not begin again
        return ended

    def _hint(self) -> str:
        """Return what the caller should look at after a refusal for this reason."""
        if self._why == Refusal.NO_RIGHT:
            return "the owner's policy.json must have a rule with 'claim' for this cluster"
        if self._why == Refusal.ANOTHER_CLUSTER:
            return "the owner made the lease with for_cluster=, for another one than this"
        if self._why == Refusal.ANOTHER_PROMPT and not self._kept.digests.prompt:
            return "the lease has a prompt_digest, and this pull has none"
        return "the ticket was changed on its way, or is another request's"

    def _fail(self, error: LLMException) -> None:
        if self._is_kept:
            error.landed_blocks = self._landed
        error.peer = self._session.cluster_id
        self._finish(TransferState.FAILED, error)

    def _late(self) -> None:
        self._is_late = True
        if self._under_way:
            self._stop()
        else:
            self._conclude(TransferState.FAILED, None)

    def _cancel(self) -> bool:
        if self._under_way:
            return self._stop()
        self._finish(TransferState.CANCELLED, None)
        return True

    def _over(self, _: object) -> None:
        """Tell the owner how the pull ended. This runs before the callbacks of the pull's callers."""
        session = self._session
        self._timer.cancel()
        self._running.operations.discard(self)
        call = 0
        if self._question is not None:
            call = self._question.number
            # An answer that comes in this tick must start nothing: the caller may use the destination for something else.
            session.questions.close(self._question)
        # A refused claim has nothing to end. If none was made, a cancelled pull still tells the owner that it may free the
        # blocks.
        if session.is_open and self._is_kept is not False and (call or self.state in _SAID):
            lease, (blocks, prompt), *_ = self._kept
            end: Literal["taken", "released", "failed"] = _SAID.get(self.state, "failed")
            session.post(Unclaim(call=call, lease=lease, end=end, blocks_digest=blocks, prompt_digest=prompt))
        # cancelled by the end of the link: a CancelledError would look like the caller's own
        if session.life.failure is not None and self.is_cancelled:
            self.replace_error(session.copy_of_failure())
        self._running.check_idle()
