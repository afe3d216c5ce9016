"""Pulls of request/response mode, as the end that asks for them sees them: the peer writes.

Who owns what
    :class:`PullRequests` owns the requests of one link, and forgets each when it has ended. Until the peer has said that it
    is done, or has stopped, the destination is not free.

How a request goes on
    In callbacks: of the event loop's next turn, of the peer's answer, of an alarm. A task for each would cost more than all
    else. It gets one only while something else has to be waited for::

        IN_TASK   its destination is being made known to the transport, or is being taken back
           |
        WAITING   in line: the peer has been asked for ``WINDOW`` others, and has not answered
           |
        ASKED --------> STOPPING, LATE   the peer was told to stop, and a task waits for its answer
           |                |
        IN_TASK   checksums are compared
           |                |
           the request ends

    The peer is asked for few at a time. So one that is cancelled in line is never asked for, a stop is not heard behind
    thousands of requests, and the peer has few under way, however many callers wait here.

What cancellation means
    In line nothing has begun, and the request ends at once. Later it ends with the peer's answer. If no answer comes, or the
    link ends before it, the request is doubtful: it ends with the channels.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final

from aiodatadist.cache.plan import target_side
from aiodatadist.concurrency.alarms import SLICE, Alarms
from aiodatadist.device import CLEAN_SECONDS, TransferState
from aiodatadist.errors import (
    CacheNotFound,
    LinkClosed,
    LinkError,
    LLMException,
    LLMStatusCode,
    ParamInvalid,
    ProtocolError,
    TransferTimeout,
)
from aiodatadist.link.remote_operation import RemoteOperation
from aiodatadist.link.responder import status_error
from aiodatadist.link.running import BROKEN_TIMEOUT
from aiodatadist.values.foreign import printable
from aiodatadist.values.transfer_priority import TransferPriority
from aiodatadist.wire.messages import MAX_TOGETHER, TOGETHER_SINCE, Grant, Pull, Pulled, Stop

if TYPE_CHECKING:
    from aiodatadist.link.checksums import Checks
    from aiodatadist.link.questions import Question
    from aiodatadist.link.remote_operation import TransferSpec
    from aiodatadist.link.session import Session

WINDOW: Final = 256
"""Requests of one priority that the peer is asked for at a time. Those of all priorities are fewer than the 4096 at which a
peer ends the link."""
MOST_BLOCKS: Final = 256
"""Block numbers in a message of several requests: it is small, whatever the numbers, and the peer reads it at one go."""
STOP_TIMEOUT = 5.0
"""Seconds without any answer of the peer's in which it has to answer that it stopped writing, before it loses its link."""
STOPS = 5
"""How often it is asked within that time: what was said, or its answer, may have been lost."""
MOST_STOP_SECONDS = 60.0
"""The same in all, for a peer that answers everything else meanwhile."""
CLOSE_TIMEOUT = 10.0
"""Seconds that the end of a link may take, at which what the peer may still write is known to be over."""


class Stage(Enum):
    """See above."""

    IN_TASK = "in a task"
    WAITING = "waiting"
    ASKED = "asked"
    STOPPING = "stopping"
    LATE = "late"


class PullRequest(RemoteOperation):
    """One of them.

    Attributes:
        spec: what its caller wants.
        seconds: that it may take from when it stands in line.
        asked: how many times the peer was asked.
        question: the last time, until it is answered.
        alarm: when its time is over; 0 if it neither stands in line nor is asked for.
    """

    __slots__ = ("_requests", "alarm", "asked", "question", "seconds", "spec", "stage")

    def __init__(self, name: str, patience: float, spec: TransferSpec, requests: PullRequests) -> None:
        super().__init__(name, patience)
        self._requests = requests
        self.spec = spec
        self.seconds = 2 * spec.seconds if spec.checksum else spec.seconds  # for the peer to sum up what it sent
        self.stage = Stage.IN_TASK
        self.asked = self.alarm = 0
        self.question: Question | None = None

    @property
    def is_over(self) -> bool:
        """Return True if its bytes are no longer wanted."""
        return self.stage is Stage.LATE or self.scope.cancel_called

    def _interrupt(self) -> None:
        self._requests.stop(self)


class _Together:
    """Requests that differ in their blocks alone, on their way into one message. Older peers get one in each."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._spec: TransferSpec | None = None  # of the first
        self._message: Pull | None = None
        self._also: list[tuple[int, list[int], list[int]]] = []
        self._room = 0  # for blocks

    def add(self, number: int, spec: TransferSpec) -> None:
        """Say one, at the latest with :meth:`post`. Raises ProtocolError: it is too long to be said."""
        src, dst = spec.selection.src_blocks, spec.selection.dst_blocks
        count = len(src) + len(dst)
        if self._spec is not None and count <= self._room and self._spec.is_like(spec):
            self._also.append((number, src.tolist(), dst.tolist()))
            self._room -= count
            if len(self._also) == MAX_TOGETHER - 1:
                self.post()
            return
        self.post()
        message = spec.message(number)
        is_alone = (
            count > MOST_BLOCKS or spec.selection.parts is not None
        )  # it may be too long, which is its own failure
        if is_alone or self._session.peer_minor < TOGETHER_SINCE:
            self._session.post(message)
        else:
            self._spec, self._message, self._room = spec, message, MOST_BLOCKS - count

    def post(self) -> None:
        """Say what was added."""
        message, also = self._message, self._also
        if message is not None:
            self._spec = self._message = None
            self._also = []
            self._session.post(message.model_copy(update={"also": also}) if also else message)


class PullRequests:
    """Those of one link."""

    def __init__(self, session: Session, checks: Checks) -> None:
        self._session = session
        self._checks = checks
        self._lines = tuple(OrderedDict[PullRequest, None]() for _ in TransferPriority)
        self._open = tuple(set[PullRequest]() for _ in TransferPriority)  # the peer has not answered
        self._together = _Together(session)
        self._alarms = Alarms(self._too_late)
        self._next_turn: asyncio.Handle | None = None
        self._when_ended = self._forget  # one for all of them: each would keep one of its own

    @property
    def patience(self) -> float:
        """Return the seconds from a cancellation until it is known that no byte can land, or that it is not known."""
        clean = CLEAN_SECONDS if self._session.channels.has_one_queue else 0.0
        return STOP_TIMEOUT + CLOSE_TIMEOUT + 2 * self._session.quiesce_seconds + clean

    def begin(self, request: PullRequest) -> None:
        """Ask for a pull as soon as it is its turn. Whatever goes wrong, the request tells it."""
        request.add_done_callback(self._when_ended)
        request.attempt(partial(self._prepare, request))

    def end(self) -> None:
        """Mark what the peer may still write, because the link is over."""
        if self._next_turn is not None:
            self._next_turn.cancel()
        for requests in self._open:
            for request in requests:
                request.is_doubtful = True

    # ---- until the peer is asked ----

    def _prepare(self, request: PullRequest) -> None:
        entry = request.spec.entry
        if entry.is_known and self._session.peer_leases.is_settled(entry):
            self._line_up(request)
        else:
            request.stage = Stage.IN_TASK
            self._session.spawn(partial(request.run, partial(self._wait_and_line_up, request)))

    async def _wait_and_line_up(self, request: PullRequest) -> None:
        entry = request.spec.entry
        if not entry.is_known:
            await self._session.registry.make_reachable(entry)
        await self._session.peer_leases.wait_settled(entry)
        self._line_up(request)

    def _line_up(self, request: PullRequest) -> None:
        if request.scope.cancel_called:  # in the tick in which it went on
            request.finish(TransferState.CANCELLED)
            return
        spec = request.spec
        self._session.channels.check_reaches(spec.entry, "this cluster, which the peer is asked to fill,")
        request.stage = Stage.WAITING
        request.alarm = self._alarms.set(asyncio.get_running_loop().time() + request.seconds, request)
        self._lines[spec.priority][request] = None
        self._go_on()

    def _go_on(self) -> None:
        """Ask in the next turn of the loop: what is cancelled in this one is not asked for, and the rest is sent together."""
        if self._next_turn is None and any(self._lines):
            self._next_turn = asyncio.get_running_loop().call_soon(self._ask_in_turn)

    def _ask_in_turn(self) -> None:
        self._next_turn = None
        with self._session.posting_together():
            self._ask_some(perf_counter() + SLICE)

    def _ask_some(self, until: float) -> None:
        for request in self._in_turn():
            request.attempt(partial(self._ask, request))
            if perf_counter() >= until:
                self._go_on()
                break
        self._together.post()

    def _in_turn(self) -> Iterator[PullRequest]:
        """Take some of each line after the other: the peer decides how they pass each other, and has to know of them.

        Meanwhile the caller's callbacks may cancel those that still stand in line.
        """
        lines = tuple(zip(self._lines, self._open, strict=True))
        while any(line and len(asked) < WINDOW for line, asked in lines):
            for line, asked in lines:
                for _ in range(MAX_TOGETHER):
                    if not line or len(asked) >= WINDOW:
                        break
                    yield line.popitem(last=False)[0]

    def _ask(self, request: PullRequest) -> None:
        session, spec = self._session, request.spec
        entry = spec.entry
        if not session.peer_leases.is_settled(entry):  # the peer is to forget it first
            self._let_go(request)
            self._prepare(request)
            return
        if not entry.is_live:
            raise CacheNotFound(f"cache {entry.cache_id} is being given up")
        if session.peer_leases.told(entry) or request.asked:  # or it did not hear it
            session.post(Grant(cache=entry.message()))
        checksums = spec.pieces if spec.checksum else 0
        request.question = session.questions.expect(Pulled, partial(self._answered, request), checksums)
        request.stage = Stage.ASKED
        request.asked += 1
        self._open[spec.priority].add(request)
        try:
            self._together.add(request.question.number, spec)
        except ProtocolError as error:
            raise ParamInvalid(f"the request: {error.args[0]}", hint="pull them with several calls") from error

    # ---- the answer ----

    def _answered(self, request: PullRequest) -> None:
        question = request.question
        if question is None or not isinstance(question.answer, Pulled):  # the peer says that it knows no requests
            self._stop_asking(request, Stage.STOPPING)
            return
        self._let_go(request)
        request.is_doubtful = False  # also where the link broke in the tick in which the answer came
        request.attempt(partial(self._take, request, question.answer))

    def _take(self, request: PullRequest, answer: Pulled) -> None:
        """It is over; or, the first time, the peer was not told of the destination, and is asked once more."""
        if request.asked == 1 and answer.is_unknown and not request.is_over:
            self._prepare(request)
            return
        self._conclude(request, answer)
        if not request.is_done:
            request.stage = Stage.IN_TASK
            self._session.spawn(partial(request.run, partial(self._compare, request, answer)))

    def _conclude(self, request: PullRequest, answer: Pulled) -> None:
        """It ends here in every case, but for a success with checksums, which have to be compared. After any other answer no
        byte lands; of a peer that stopped, or that knew no destination, none was wanted any more."""
        is_late = request.stage is Stage.LATE
        request.nbytes, request.ranges = answer.nbytes, answer.ranges
        request.queue_seconds, request.transfer_seconds = answer.queue_seconds, answer.transfer_seconds
        if answer.status == LLMStatusCode.LLM_SUCCESS:
            if not request.spec.checksum:
                request.finish(TransferState.DONE)
        elif request.scope.cancel_called and (answer.stopped or answer.is_unknown):
            request.finish(TransferState.CANCELLED)
        elif answer.stopped or (answer.is_unknown and is_late):
            request.finish(TransferState.FAILED, _late_error(request))
        else:
            request.finish(TransferState.FAILED, self._refused(request, answer))

    def _refused(self, request: PullRequest, answer: Pulled) -> LLMException:
        peer = self._session.cluster_id
        if answer.status == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
            return CacheNotFound(
                f"cluster {peer} offers no cache for {request.spec.key}",
                hint="has it been made there, or has its key been consumed by a pull?",
            )
        if answer.status == LLMStatusCode.LLM_NOT_YET_LINK:  # it heard the request when it had begun to end the link
            return LinkClosed(
                f"cluster {peer} has ended the link, and said: {printable(answer.reason)}", peer=peer, hint="link again"
            )
        return status_error(answer)

    async def _compare(self, request: PullRequest, answer: Pulled) -> None:
        spec = request.spec
        side = target_side(spec.selection, spec.entry, answer.nbytes)
        await self._checks.compare_answer(spec, side, answer.checksums)
        request.finish(TransferState.DONE)

    # ---- an end before the answer ----

    def stop(self, request: PullRequest) -> None:
        request.scope.cancel()
        if request.stage is Stage.WAITING:
            request.finish(TransferState.CANCELLED)
        elif request.stage is Stage.ASKED:
            self._stop_asking(request, Stage.STOPPING)

    def _too_late(self, request: PullRequest) -> None:
        if request.stage is Stage.WAITING:
            request.finish(TransferState.FAILED, _late_error(request))
        elif request.stage is Stage.ASKED:
            self._stop_asking(request, Stage.LATE)

    def _stop_asking(self, request: PullRequest, stage: Stage) -> None:
        """Tell the peer to stop: it is too slow, or its bytes are no longer wanted."""
        request.stage = stage
        if self._session.is_open:
            self._session.spawn(partial(self._stop, request))
        else:
            self._doubt(request)

    async def _stop(self, request: PullRequest) -> None:
        """Wait until the peer says that it stopped, or the link ends."""
        session, question = self._session, request.question
        if question is None or question.answer is not None:  # in the tick in which it was to stop
            return
        seconds = STOP_TIMEOUT + (
            BROKEN_TIMEOUT if session.channels.has_one_queue else 0.0
        )  # it has to close a channel with us
        session.post(Stop(call=question.number))
        silent, heard = 0, session.questions.heard
        for _ in range(round(STOPS * MOST_STOP_SECONDS / STOP_TIMEOUT)):
            await session.questions.insist(question, seconds / STOPS)
            if question.answer is not None or session.questions.is_over:
                break
            if session.questions.heard != heard:  # it is busy with what it was told before
                silent, heard = 0, session.questions.heard
                continue
            silent += 1
            if silent == STOPS:
                break
            session.post_again(Stop(call=question.number))
        if question.answer is None:
            self._doubt(request)
            if not session.questions.is_over:
                why = f"cluster {session.cluster_id} did not stop writing within {seconds:g} s"
                session.break_off(LinkError(why, hint="link_clusters() again"))

    def _doubt(self, request: PullRequest) -> None:
        """The peer may still write: it ends when the channel is closed, and not before."""
        request.is_doubtful = True
        self._session.running.check_idle()

    # ---- what is kept of it ----

    def _let_go(self, request: PullRequest) -> None:
        """The peer has answered, or is not asked: the next one in line is."""
        self._alarms.drop(request.alarm)
        request.alarm = 0
        if request.question is not None:
            self._session.questions.close(request.question)
            request.question = None  # which leads to the request: it is not left to the garbage collector
            self._open[request.spec.priority].discard(request)
            self._go_on()

    def _forget(self, request: PullRequest) -> None:
        """It has ended."""
        if request.stage is Stage.WAITING:
            self._lines[request.spec.priority].pop(request, None)
        if request.alarm or request.question is not None:
            self._let_go(request)


def _late_error(request: PullRequest) -> TransferTimeout:
    return TransferTimeout(f"not done within {request.seconds:g} s")
