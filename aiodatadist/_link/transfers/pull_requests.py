"""Pulls of request/response mode, at the end that asks for them: the peer writes.

Ownership
    :class:`PullRequests` owns the requests of one link, and forgets each when it has ended. The destination is in use until
    the peer has said that it is done, or that it has stopped.

Life of a request
    A request continues in callbacks: of the event loop's next turn, of the peer's answer, of an alarm. A task for each would
    cost more than everything else. A request gets a task only while it must wait for something else::

        IN_TASK   its destination is being made known to the transport, or is being revoked
           |
        WAITING   in line: the peer has been asked for ``WINDOW`` others, and has not answered
           |
        ASKED --------> STOPPING, LATE   the peer was told to stop, and a task waits for its answer
           |                |
        IN_TASK   checksums are compared
           |                |
           the request ends

    The peer is asked for few requests at a time. So a request that is cancelled in line is never asked for, a stop does not
    wait behind thousands of requests, and the peer has few under way, however many callers wait here.

Cancellation
    A request in line ends at once, because nothing has begun. Later, a request ends with the peer's answer. If no answer
    comes, or the link ends first, the request is doubtful: it ends with the channels.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final

from aiodatadist._cache.plan import target_side
from aiodatadist._concurrency.alarms import SLICE, Alarms
from aiodatadist._device import CLEAN_SECONDS, TransferState
from aiodatadist._link.data.remote_operation import RemoteOperation
from aiodatadist._link.transfers.responder import status_error
from aiodatadist._link.transfers.running import BROKEN_TIMEOUT, RunningTransfers
from aiodatadist._values.foreign import printable
from aiodatadist._values.transfer_priority import TransferPriority
from aiodatadist._wire.messages import MAX_TOGETHER, TOGETHER_SINCE, Grant, Pull, Pulled, Stop
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

if TYPE_CHECKING:
    from aiodatadist._link.control.questions import Question
    from aiodatadist._link.data.remote_operation import TransferSpec
    from aiodatadist._link.session import Session
    from aiodatadist._link.transfers.checksums import Checks

WINDOW: Final = 256
"""The most requests of one priority that the peer is asked for at a time.

Those of all priorities together are fewer than the 4096 at which a peer ends the link.
"""
MOST_BLOCKS: Final = 256
"""The most block numbers in a message of several requests. The message stays small, and the peer reads it in one piece."""
STOP_TIMEOUT = 5.0
"""Seconds that a peer has for answering that it stopped writing. If it answers nothing at all meanwhile, the link ends."""
STOPS = 5
"""The number of times that the peer is told within that time: the message or its answer may have been lost."""
MOST_STOP_SECONDS = 60.0
"""The same limit for a peer that answers everything else meanwhile."""
CLOSE_TIMEOUT = 10.0
"""Seconds that the end of a link may take. Only then is it known that the peer no longer writes."""


class Stage(Enum):
    """The stages of a request's life, as the module's docstring shows them."""

    IN_TASK = "in a task"
    WAITING = "waiting"
    ASKED = "asked"
    STOPPING = "stopping"
    LATE = "late"


class PullRequest(RemoteOperation):
    """A pull for which the peer is asked to write.

    Attributes:
        spec: what the caller wants.
        seconds: the time limit, from when the request stands in line.
        stage: the stage of its life.
        asked: how many times the peer has been asked.
        question: the last question to the peer, until it is answered.
        alarm: the number of the alarm that ends the request's time; 0 if the request is neither in line nor asked for.
    """

    __slots__ = ("_requests", "alarm", "asked", "question", "seconds", "spec", "stage")

    def __init__(self, name: str, patience: float, spec: TransferSpec, requests: PullRequests) -> None:
        super().__init__(name, patience)
        self._requests = requests
        self.spec = spec
        self.seconds = 2 * spec.seconds if spec.checksum else spec.seconds  # so that the peer can compute checksums
        self.stage = Stage.IN_TASK
        self.asked = self.alarm = 0
        self.question: Question | None = None

    @property
    def is_over(self) -> bool:
        """True if the bytes of the request are no longer wanted."""
        return self.stage is Stage.LATE or self.scope.cancel_called

    def _interrupt(self) -> None:
        self._requests.stop(self)


class _Together:
    """Requests that differ only in their blocks, on their way into one message. An older peer gets a message for each."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._spec: TransferSpec | None = None  # of the first request
        self._message: Pull | None = None
        self._also: list[tuple[int, list[int], list[int]]] = []
        self._room = 0  # for blocks

    def add(self, number: int, spec: TransferSpec) -> None:
        """Add a request. It is sent now or with :meth:`post`. Raises ProtocolError if it is too long for a message."""
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
        # Sent alone, a request that is too long fails alone.
        is_alone = count > MOST_BLOCKS or spec.selection.parts is not None
        if is_alone or self._session.peer_minor < TOGETHER_SINCE:
            self._session.post(message)
        else:
            self._spec, self._message, self._room = spec, message, MOST_BLOCKS - count

    def post(self) -> None:
        """Send the requests that were added."""
        message, also = self._message, self._also
        if message is not None:
            self._spec = self._message = None
            self._also = []
            self._session.post(message.model_copy(update={"also": also}) if also else message)


class PullRequests:
    """The pull requests of one link."""

    def __init__(self, running: RunningTransfers, checks: Checks) -> None:
        self._running = running
        self._session = session = running.session
        self._checks = checks
        self._lines = tuple(OrderedDict[PullRequest, None]() for _ in TransferPriority)
        self._open = tuple(set[PullRequest]() for _ in TransferPriority)  # the peer has not answered
        self._together = _Together(session)
        self._alarms = Alarms(self._too_late)
        self._next_turn: asyncio.Handle | None = None
        self._when_ended = self._forget  # bound once, otherwise each request would keep its own bound method

    @property
    def patience(self) -> float:
        """The most seconds from a cancellation until its outcome is known: no byte can land, or that cannot be known."""
        clean = CLEAN_SECONDS if self._session.channels.traits.has_one_queue else 0.0
        return STOP_TIMEOUT + CLOSE_TIMEOUT + 2 * self._running.quiesce_seconds + clean

    def begin(self, request: PullRequest) -> None:
        """Ask for a pull as soon as it is its turn. If something goes wrong, the request fails."""
        request.add_done_callback(self._when_ended)
        request.attempt(partial(self._prepare, request))

    def end(self) -> None:
        """Mark the requests for which the peer may still write, because the link has ended."""
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
            await self._session.host.registry.make_reachable(entry)
        await self._session.peer_leases.wait_settled(entry)
        self._line_up(request)

    def _line_up(self, request: PullRequest) -> None:
        if request.scope.cancel_called:  # in the tick in which the request continued
            request.finish(TransferState.CANCELLED)
            return
        spec = request.spec
        self._session.check_writer(spec.entry, "in request/response mode the owner delivers what is pulled")
        whose = "this cluster, which the peer is asked to fill,"
        self._session.channels.traits.check_reaches(spec.entry, whose, spec.entry)
        request.stage = Stage.WAITING
        request.alarm = self._alarms.set(asyncio.get_running_loop().time() + request.seconds, request)
        self._lines[spec.priority][request] = None
        self._go_on()

    def _go_on(self) -> None:
        """Ask in the next turn of the loop.

        Then a request that is cancelled in this turn is not asked for, and the others are sent together.
        """
        if self._next_turn is None and any(self._lines):
            self._next_turn = asyncio.get_running_loop().call_soon(self._ask_in_turn)

    def _ask_in_turn(self) -> None:
        self._next_turn = None
        with self._session.wire.together():
            self._ask_some(perf_counter() + SLICE)

    def _ask_some(self, until: float) -> None:
        for request in self._in_turn():
            request.attempt(partial(self._ask, request))
            if perf_counter() >= until:
                self._go_on()
                break
        self._together.post()

    def _in_turn(self) -> Iterator[PullRequest]:
        """Yield some requests of each line in turn. The peer decides which priority goes first, so it must know of them.

        Meanwhile callbacks may cancel requests that still stand in line.
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
        if not session.peer_leases.is_settled(entry):  # the peer must release the cache first
            self._let_go(request)
            self._prepare(request)
            return
        if not entry.is_live:
            raise CacheNotFound(f"cache {entry.cache_id} is being released")
        if session.peer_leases.told(entry) or request.asked:  # asked again: the peer may have missed the first grant
            session.post(Grant(cache=entry.message(), access=session.access_to(entry).value))
        checksums = spec.pieces if spec.checksum else 0
        request.question = session.questions.expect(
            partial(self._answered, request), checksums, spec.least_bytes, spec.most_bytes
        )
        request.stage = Stage.ASKED
        request.asked += 1
        self._open[spec.priority].add(request)
        try:
            self._together.add(request.question.number, spec)
        except ProtocolError as error:
            raise ParamInvalid(f"the request: {error.args[0]}", hint="pull them with several calls") from error

    # ---- the answer ----

    def _answered(self, request: PullRequest) -> None:
        answer = None if request.question is None else request.question.answer
        if not isinstance(answer, Pulled):
            raise ProtocolError("the peer says that it knows no 'pull' messages, but all versions do")
        self._let_go(request)
        request.is_doubtful = False  # it was set if the link broke in the tick in which the answer came
        request.attempt(partial(self._take, request, answer))

    def _take(self, request: PullRequest, answer: Pulled) -> None:
        """End the request with the peer's answer.

        If the peer did not know the destination, and the answer is the first one, ask once more.
        """
        if request.asked == 1 and answer.is_unknown and not request.is_over:
            self._prepare(request)
            return
        self._conclude(request, answer)
        if not request.is_done:
            request.stage = Stage.IN_TASK
            self._session.spawn(partial(request.run, partial(self._compare, request, answer)))

    def _conclude(self, request: PullRequest, answer: Pulled) -> None:
        """End the request, unless it succeeded and its checksums must be compared.

        After the answer no more bytes can land. If the peer stopped, or knew no destination, the bytes were no longer wanted.
        """
        is_late = request.stage is Stage.LATE
        request.nbytes, request.ranges = answer.nbytes, answer.ranges
        request.queue_seconds = min(answer.queue_seconds, request.seconds)  # no more than they can have been
        request.transfer_seconds = min(answer.transfer_seconds, request.seconds)
        if answer.status == LLMStatusCode.LLM_SUCCESS:
            if not request.spec.checksum:
                request.finish(TransferState.DONE)
        elif request.scope.cancel_called and (answer.stopped or answer.is_unknown):
            request.finish(TransferState.CANCELLED)
        elif is_late and (answer.stopped or answer.is_unknown):
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
        # The peer had begun to end the link before the request came. A TransferError would say that the link still works.
        if answer.status == LLMStatusCode.LLM_NOT_YET_LINK:
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
        """Cancel a request."""
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
        """Wait until the peer says that it stopped, or the link ends. End the link if the peer stays silent for too long."""
        session, question = self._session, request.question
        if question is None or question.answer is not None:  # in the tick in which it was to stop
            return
        # If the channel has one queue, the peer must close it with us before it answers.
        seconds = STOP_TIMEOUT + (BROKEN_TIMEOUT if session.channels.traits.has_one_queue else 0.0)
        session.post(Stop(call=question.number))
        silent, heard = 0, session.questions.heard
        for _ in range(round(STOPS * MOST_STOP_SECONDS / STOP_TIMEOUT)):
            await session.questions.insist(question, seconds / STOPS)
            if question.answer is not None or session.questions.is_over:
                break
            if session.questions.heard != heard:  # the peer is busy with earlier messages
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
        """Mark a request for which the peer may still write. It ends when the channel is closed."""
        request.is_doubtful = True
        self._running.check_idle()

    # ---- what is kept of it ----

    def _let_go(self, request: PullRequest) -> None:
        """Release a request's alarm and question, because the peer has answered or is not asked; ask for the next in line."""
        self._alarms.drop(request.alarm)
        request.alarm = 0
        if request.question is not None:
            self._session.questions.close(request.question)
            request.question = None  # a cycle, which is not left to the garbage collector
            self._open[request.spec.priority].discard(request)
            self._go_on()

    def _forget(self, request: PullRequest) -> None:
        """Forget a request that has ended."""
        if request.stage is Stage.WAITING:
            self._lines[request.spec.priority].pop(request, None)
        if request.alarm or request.question is not None:
            self._let_go(request)


def _late_error(request: PullRequest) -> TransferTimeout:
    return TransferTimeout(f"not done within {request.seconds:g} s")
