"""Transfers that need words with the peer before, or instead of, moving bytes ourselves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from aiodatadist.cache.catalogue import RemoteCache
from aiodatadist.cache.names import Key, Name, name_of
from aiodatadist.cache.plan import target_side
from aiodatadist.device import CLEAN_SECONDS, StreamTransfer, TransferState
from aiodatadist.errors import (
    CacheNotFound,
    InternalError,
    LinkClosed,
    LinkError,
    LLMException,
    LLMStatusCode,
    ParamInvalid,
    ProtocolError,
    TransferTimeout,
)
from aiodatadist.link.channels import LinkChannel
from aiodatadist.link.checksums import Checks
from aiodatadist.link.questions import AGAIN_SECONDS, MOST_AGAIN_SECONDS, Answer, Question
from aiodatadist.link.remote_operation import RemoteOperation, TransferSpec
from aiodatadist.link.responder import status_error
from aiodatadist.link.session import BROKEN_TIMEOUT
from aiodatadist.values.foreign import printable
from aiodatadist.values.grid import Grid
from aiodatadist.wire.messages import Found, Grant, KeyName, Lookup, Pulled, Stop

if TYPE_CHECKING:
    from aiodatadist.cache.table import Entry
    from aiodatadist.link.session import Session


STOP_TIMEOUT = 5.0
"""Seconds without any answer of the peer's in which it has to answer that it stopped writing, before it loses its link."""
STOPS = 5
"""How often it is asked within that time: what was said, or its answer, may have been lost."""
MOST_STOP_SECONDS = 60.0
"""The same in all, for a peer that answers everything else meanwhile: 10,000 requests take it a tenth of that."""
CLOSE_TIMEOUT = 10.0
"""Seconds that the end of a link may take, at which what the peer may still write is known to be over."""


class Requester:
    """Those of one link. Each is a task of the link's, and a completion that its caller may wait for.

    Attributes:
        session: the link.
        checks: compares what arrived with what was sent.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.checks = Checks(session)
        self._held: dict[object, tuple[RemoteCache, Callable[[], object]]] = {}
        self._taken_back: set[RemoteOperation] = set()
        self._lookups = _Lookups(session)

    def end(self, failure: LinkError) -> None:
        """The link is over: so are the doubtful ones, and those whose task never began."""
        self._lookups.stop()
        for operation in list(self.session.operations):
            operation.finish(TransferState.FAILED, failure)

    def begin(self, spec: TransferSpec, what: str) -> RemoteOperation:
        """Start a transfer that cannot go on the stream at once. Its cache is leased until it ended."""
        session = self.session
        patience = STOP_TIMEOUT + CLOSE_TIMEOUT + 2 * session.quiesce_seconds
        if session.channels.is_rdma:
            patience += CLEAN_SECONDS
        operation = RemoteOperation(f"{what} of cluster {session.cluster_id}", patience)
        spec.entry.lease()
        self.session.operations.add(operation)
        if spec.is_request:
            session.counters.started()

        def ended(done: RemoteOperation) -> None:
            self.session.operations.discard(operation)
            self._lookups.end(operation)
            if done.state is TransferState.STUCK or (operation.is_doubtful and not session.is_shut):
                session.lose(spec.entry)
            else:
                spec.entry.release()
            if session.failure is not None and done.state is TransferState.CANCELLED:
                done.replace_error(session.copy_of_failure())
            elif operation in self._taken_back and done.state is TransferState.CANCELLED:
                done.replace_error(
                    CacheNotFound(f"cluster {session.cluster_id} took its cache back", peer=session.cluster_id)
                )
            elif done.error is not None:
                done.error.peer = session.cluster_id
            if spec.is_request:
                session.counters.ended("pulled", done)
            self._taken_back.discard(operation)
            session.check_idle()

        operation.add_done_callback(ended)
        is_known = spec.entry.is_known and session.is_ready
        if is_known and not spec.is_request and not spec.checksum and session.catalogue.find(spec.key) is None:
            _Lookup(self, operation, spec, what).ask(self._lookups)
        else:
            self.work_on(operation, spec, what)
        return operation

    def work_on(self, operation: RemoteOperation, spec: TransferSpec, what: str) -> None:
        """In a task of the link's."""
        operation.has_task = True
        self.session.spawn(lambda: self._run(operation, spec, what))

    async def _run(self, operation: RemoteOperation, spec: TransferSpec, what: str) -> None:
        try:
            with operation.scope:
                if not spec.entry.is_known:
                    await self.session.registry.make_reachable(spec.entry)
                await (self._request if spec.is_request else self._arrange)(operation, spec)
            if operation.scope.cancelled_caught and not operation.is_doubtful:
                operation.finish(TransferState.CANCELLED)
        except LLMException as error:
            operation.finish(TransferState.FAILED, error)
        except Exception as error:
            operation.finish(TransferState.FAILED, _unforeseen(what, error))

    # ---- one-sided: where is it, and how is it reached? ----

    async def _arrange(self, operation: RemoteOperation, spec: TransferSpec) -> None:
        remote, link_channel, grid = await self.locate(spec.entry, spec.key, spec.grid, spec.seconds)
        transfer = self.session.submit(
            spec.direction, link_channel, spec.entry, remote, grid, spec.seconds, "ours", spec.priority
        )
        if spec.checksum:
            await self._check(operation, spec, remote, grid, transfer)
        else:
            operation.follow(transfer)

    async def _check(
        self, operation: RemoteOperation, spec: TransferSpec, remote: RemoteCache, grid: Grid, transfer: StreamTransfer
    ) -> None:
        """The peer's cache is held until the checksums are compared, or the peer takes it back and waited long enough."""

        def taken_back() -> None:
            self._taken_back.add(operation)
            operation.cancel()

        with self.holding(remote, taken_back):
            await transfer.join()
            operation.take_figures(transfer)
            if transfer.state is TransferState.DONE:
                await self.checks.compare(spec, remote, grid)
            operation.finish(transfer.state, transfer.error)

    @contextmanager
    def holding(self, remote: RemoteCache, taken_back: Callable[[], object]) -> Iterator[None]:
        """The peer's cache stays while it is compared; if the peer wants it for too long, this is called."""
        holder = object()
        remote.use()
        self._held[holder] = remote, taken_back
        try:
            yield
        finally:
            del self._held[holder]
            remote.release()

    def take_back(self, remote: RemoteCache) -> None:
        """The peer wants its cache, and waited: what is still being compared fails."""
        for held, taken_back in list(self._held.values()):
            if held is remote:
                taken_back()

    async def locate(
        self, entry: Entry, key: Key, plan: Callable[[RemoteCache, int], Grid], seconds: float
    ) -> tuple[RemoteCache, LinkChannel, Grid]:
        """What a key stands for at the peer, a channel that reaches it from this end's cache, and what to move.

        Raises:
            CacheNotFound, TransferTimeout, LinkError: there is no such cache; the peer is too slow; no channel can be had.
            LLMException: the plan does not fit.
        """
        session, wanted = self.session, ""
        with anyio.move_on_after(seconds):
            while True:
                wanted = "say where its cache is"
                remote, slot = await self._find(key)
                grid = plan(remote, slot)
                wanted = "open a channel that reaches both caches"
                link_channel = await session.channels.reach(entry.epoch, remote.epoch)
                session.channels.check_reaches(remote, f"cluster {session.cluster_id}")
                if not remote.is_withdrawn:
                    return remote, link_channel, grid
        raise TransferTimeout(f"cluster {session.cluster_id} did not {wanted} within {seconds:g} s")

    async def _find(self, key: Key) -> tuple[RemoteCache, int]:
        """What a key stands for at the peer, which is asked if we do not know.

        Raises:
            CacheNotFound: the peer has no such cache.
        """
        session, name = self.session, name_of(key)
        while (known := session.catalogue.find(key)) is None:
            found = await session.questions.ask(lambda call: _lookup(call, name), Found, name)
            if not isinstance(found, Found) or found.cache is None:
                raise _not_offered(session, key)
        return known

    # ---- request/response: the peer writes ----

    async def _request(self, operation: RemoteOperation, spec: TransferSpec) -> None:
        """Until the peer said that it is done, or stopped, the destination is not free."""
        self.session.channels.check_reaches(spec.entry, "this cluster, which the peer is asked to fill,")
        await self._grant(spec.entry)
        await checkpoint_if_cancelled()  # else the peer would be asked, and then asked to stop
        await self._ask(operation, spec, is_first=True)
        if not operation.is_done and not operation.is_doubtful:
            await self._grant(spec.entry, anew=True)
            await self._ask(operation, spec, is_first=False)

    async def _ask(self, operation: RemoteOperation, spec: TransferSpec, *, is_first: bool) -> None:
        """Until it is over; or, the first time, until the peer said that it was not told of the destination."""
        checksums = spec.pieces if spec.checksum else 0
        try:
            with self.session.questions.open(spec.message, Pulled, checksums=checksums) as question:
                await self._answer(operation, question, spec, is_first)
        except ProtocolError as error:
            raise ParamInvalid(f"the request: {error.args[0]}", hint="pull them with several calls") from error
        if not operation.is_done and isinstance(answer := question.answer, Pulled) and answer.checksums:
            side = target_side(spec.selection, spec.entry, answer.nbytes)
            await self.checks.compare_answer(spec, side, answer.checksums)
            operation.finish(TransferState.DONE)

    async def _answer(self, operation: RemoteOperation, question: Question, spec: TransferSpec, is_first: bool) -> None:
        seconds = 2 * spec.seconds if spec.checksum else spec.seconds  # for the peer to sum up what it sent
        limit = anyio.move_on_after(seconds)
        try:
            with limit:
                await question.answered.wait()
        finally:
            if question.answer is None:
                await self._stop(operation, question)
            if isinstance(question.answer, Pulled):
                is_over = limit.cancelled_caught or operation.scope.cancel_called
                if is_over or not is_first or not question.answer.is_unknown:
                    self._conclude(operation, question.answer, spec, seconds, is_late=limit.cancelled_caught)

    async def _grant(self, entry: Entry, *, anew: bool = False) -> None:
        """Tell the peer where a cache of this end is. ``anew``: also if it was told, which it did not hear."""
        peer_leases = self.session.peer_leases
        await peer_leases.wait_settled(entry)
        if not entry.is_live:
            raise CacheNotFound(f"cache {entry.cache_id} is being given up")
        if peer_leases.told(entry) or anew:
            self.session.post(Grant(cache=entry.message()))

    async def _stop(self, operation: RemoteOperation, question: Question) -> None:
        """The peer is too slow, or its bytes are not wanted any more: until it says that it stopped, or the link ends."""
        session = self.session
        if not session.is_open:
            self._doubt(operation)
            return
        seconds = STOP_TIMEOUT + (
            BROKEN_TIMEOUT if session.channels.is_rdma else 0.0
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
            self._doubt(operation)
            if not session.questions.is_over:
                why = f"cluster {session.cluster_id} did not stop writing within {seconds:g} s"
                session.break_off(LinkError(why, hint="link_clusters() again"))

    def _doubt(self, operation: RemoteOperation) -> None:
        """The peer may still write: it ends when the channel is closed, and not before."""
        operation.is_doubtful = True
        self.session.check_idle()

    def _conclude(
        self, operation: RemoteOperation, answer: Pulled, spec: TransferSpec, seconds: float, *, is_late: bool
    ) -> None:
        """It ends here in every case, but for a success with checksums, which have to be compared. After any other answer no
        byte lands; of a peer that stopped, or that knew no destination, none was wanted any more."""
        operation.nbytes, operation.ranges = answer.nbytes, answer.ranges
        operation.queue_seconds, operation.transfer_seconds = answer.queue_seconds, answer.transfer_seconds
        if answer.status == LLMStatusCode.LLM_SUCCESS:
            if not spec.checksum:
                operation.finish(TransferState.DONE)
        elif operation.scope.cancel_called and (answer.stopped or answer.is_unknown):
            operation.finish(TransferState.CANCELLED)
        elif answer.stopped or (answer.is_unknown and is_late):
            operation.finish(TransferState.FAILED, _too_late(seconds))
        else:
            operation.finish(TransferState.FAILED, self._refused(answer, spec.key))

    def _refused(self, answer: Pulled, key: Key) -> LLMException:
        if answer.status == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
            return CacheNotFound(
                f"cluster {self.session.cluster_id} offers no cache for {key}",
                hint="has it been made there, or has its key been consumed by a pull?",
            )
        if answer.status == LLMStatusCode.LLM_NOT_YET_LINK:  # it heard the request when it had begun to end the link
            return LinkClosed(
                f"cluster {self.session.cluster_id} has ended the link, and said: {printable(answer.reason)}",
                peer=self.session.cluster_id,
                hint="link again",
            )
        return status_error(answer)


def _too_late(seconds: float) -> TransferTimeout:
    return TransferTimeout(f"not done within {seconds:g} s")


def _lookup(call: int, name: Name) -> Lookup:
    return Lookup(call=call, name=KeyName(**name._asdict()))


def _not_offered(session: Session, key: Key) -> CacheNotFound:
    return CacheNotFound(
        f"cluster {session.cluster_id} offers no cache for {key}",
        hint="has it been made there? Host memory is only for peers with remote_accessible=True",
    )


def _unforeseen(what: str, error: Exception) -> InternalError:
    failure = InternalError(f"{what} failed: {error!r}")
    failure.__cause__ = error
    return failure


class _Lookups:
    """Those of one link that wait for an answer, by name: all transfers that want the same cache share one question.

    There is one timer for all: most have their answers long before it is of use.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked: dict[Name, _Asked] = {}
        self._names: dict[RemoteOperation, Name] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def begin(self, lookup: _Lookup) -> None:
        """Ask for its cache, unless that is asked already. Raises LLMException: it cannot be asked."""
        name, operation = name_of(lookup.spec.key), lookup.operation
        asked = self._asked.get(name)
        if asked is None:
            asked = self._asked[name] = _Asked(self._session, name, self._answered)
        asked.waiting[operation] = lookup
        self._names[operation] = name
        if asked.question is None:
            asked.ask()
        else:
            asked.late.add(operation)
        look_at = min(asked.ask_at, lookup.end)
        if look_at < self._timer_at:
            self._set_timer(look_at)

    def end(self, operation: RemoteOperation) -> None:
        name = self._names.pop(operation, None)
        if name is not None:
            asked = self._asked[name]
            del asked.waiting[operation]
            asked.late.discard(operation)
            if not asked.waiting:
                asked.close()
                del self._asked[name]

    def stop(self) -> None:
        """The link is over."""
        self._set_timer(math.inf)

    def _answered(self, name: Name) -> None:
        """All that wait for it continue, in the order in which they came. Those that came when the question was under way
        ask once more, together, if there is no such cache: it may have been made meanwhile."""
        asked = self._asked.pop(name)
        answer = asked.close()
        late = asked.late if isinstance(answer, Found) and answer.cache is None else set()
        for operation in asked.waiting.keys() - late:
            del self._names[operation]
        if late:
            again = self._asked[name] = _Asked(self._session, name, self._answered)
            again.waiting = {operation: asked.waiting[operation] for operation in asked.waiting if operation in late}
            again.ask()
        for operation, lookup in asked.waiting.items():
            if operation not in late and not operation.is_done:
                lookup.answered(answer)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = None if when == math.inf else asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        now, next_at = asyncio.get_running_loop().time(), math.inf
        for asked in list(self._asked.values()):
            for lookup in [lookup for lookup in asked.waiting.values() if lookup.end <= now]:
                lookup.too_late()
            if asked.waiting:
                if asked.ask_at <= now:
                    asked.ask_again(now)
                next_at = min(next_at, asked.ask_at, *(lookup.end for lookup in asked.waiting.values()))
        self._set_timer(next_at)


class _Asked:
    """One question about a cache of the peer's.

    Attributes:
        waiting: transfers that want it.
        late: those of them that came when it was asked already.
        ask_at: when to say it again, as the event loop counts.
    """

    def __init__(self, session: Session, name: Name, then: Callable[[Name], None]) -> None:
        self._session, self._name, self._then = session, name, then
        self._pause = AGAIN_SECONDS
        self.question: Question | None = None
        self.waiting: dict[RemoteOperation, _Lookup] = {}
        self.late: set[RemoteOperation] = set()
        self.ask_at = asyncio.get_running_loop().time() + self._pause

    def ask(self) -> None:
        self.question = self._session.questions.start(self._words, Found, self._name, lambda: self._then(self._name))

    def _words(self, call: int) -> Lookup:
        return _lookup(call, self._name)

    def ask_again(self, now: float) -> None:
        """There is no answer yet. It, or the question, may have been lost."""
        if self.question is not None:
            self._session.post_again(self._words(self.question.number))
        self._pause = min(2 * self._pause, MOST_AGAIN_SECONDS)
        self.ask_at = now + self._pause

    def close(self) -> Answer | None:
        """Its answer is there, or is not waited for any more."""
        if self.question is None:
            return None
        self._session.questions.close(self.question)
        return self.question.answer


class _Lookup:
    """A transfer for which the peer is only asked where its cache is. It has no task, which would cost more than the question
    does: it goes on in the call that brings the answer, and where that is not enough it gets one.

    Attributes:
        end: when to give up, as the event loop counts.
    """

    def __init__(self, requester: Requester, operation: RemoteOperation, spec: TransferSpec, what: str) -> None:
        self._requester, self._what = requester, what
        self.operation, self.spec = operation, spec
        self.end = asyncio.get_running_loop().time() + spec.seconds
        operation.has_task = False

    def ask(self, lookups: _Lookups) -> None:
        """Whatever goes wrong, the operation tells it."""
        self._failing(lambda: lookups.begin(self))

    def _failing(self, step: Callable[[], None]) -> None:
        """What it raises fails the operation."""
        try:
            step()
        except LLMException as error:
            self.operation.finish(TransferState.FAILED, error)
        except Exception as error:
            self.operation.finish(TransferState.FAILED, _unforeseen(self._what, error))

    def too_late(self) -> None:
        who, seconds = self._requester.session.cluster_id, self.spec.seconds
        late = TransferTimeout(f"cluster {who} did not say where its cache is within {seconds:g} s")
        self.operation.finish(TransferState.FAILED, late)

    def answered(self, answer: Answer | None) -> None:
        self._failing(lambda: self._go_on(answer))

    def _go_on(self, answer: Answer | None) -> None:
        session, spec = self._requester.session, self.spec
        if isinstance(answer, Found) and answer.cache is None:
            raise _not_offered(session, spec.key)
        known = session.within_reach(spec.entry, spec.key) if session.is_ready else None
        if known is None:
            self._requester.work_on(self.operation, spec, self._what)
            return
        remote, slot, link_channel = known
        grid = spec.grid(remote, slot)
        transfer = session.submit(
            spec.direction, link_channel, spec.entry, remote, grid, spec.seconds, "ours", spec.priority
        )
        self.operation.follow(transfer)
