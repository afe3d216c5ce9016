"""The requester: it runs transfers for which the peer must be asked, for its cache or for the bytes."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import anyio

from aiodatadist._cache.catalogue import RemoteCache
from aiodatadist._cache.names import Key, Name, name_of
from aiodatadist._concurrency.alarms import SLICE
from aiodatadist._device import TransferCompletion, TransferState
from aiodatadist._link.control.questions import AGAIN_SECONDS, MOST_AGAIN_SECONDS, Answer, Question
from aiodatadist._link.data.link_channel import LinkChannel
from aiodatadist._link.data.remote_operation import RemoteOperation, TransferSpec
from aiodatadist._link.lifecycle import LinkState
from aiodatadist._link.transfers.checksums import Checks
from aiodatadist._link.transfers.comparison import Comparison
from aiodatadist._link.transfers.pull_requests import PullRequest, PullRequests
from aiodatadist._values.grid import Grid
from aiodatadist._wire.messages import Found, KeyName, Lookup
from aiodatadist.errors import CacheNotFound, LinkError, TransferTimeout

if TYPE_CHECKING:
    from aiodatadist._cache.table import Entry
    from aiodatadist._link.session import Session
    from aiodatadist._link.transfers.running import RunningTransfers


class Requester:
    """The transfers of one link for which the peer must be asked. Each is a completion that its caller may wait for.

    Attributes:
        session: the peer.
        running: the transfers on the link's streams.
        checks: the comparisons of what arrived with what was sent.
        lookups: the transfers that wait for the peer to say where its cache is.
    """

    def __init__(self, running: RunningTransfers) -> None:
        self.running = running
        self.session: Session = running.session
        session = self.session
        self.checks: Checks = Checks(session)
        self._held: dict[object, tuple[RemoteCache, Callable[[], object]]] = {}
        self._taken_back: set[RemoteOperation] = set()
        self.lookups: _Lookups = _Lookups(session)
        self._pull_requests = PullRequests(running, self.checks)
        self._when_request_ended = self._request_ended  # bound once, otherwise each would keep its own bound method

    def end(self, failure: LinkError) -> None:
        """Fail what is left when the link has ended: doubtful transfers, and those whose task never began."""
        self.lookups.stop()
        self._pull_requests.end()
        # a copy: each operation that ends leaves the set
        for operation in list(self.running.operations):
            operation.finish(TransferState.FAILED, failure)

    def begin(self, spec: TransferSpec, what: str) -> RemoteOperation:
        """Start a transfer that cannot go on a stream at once. Its cache is leased until it has ended."""
        session, requests = self.session, self._pull_requests
        name, patience = f"{what} of cluster {session.cluster_id}", requests.patience
        spec.entry.lease()
        if spec.is_request:
            request = PullRequest(name, patience, spec, requests)
            self.running.operations.add(request)
            self.running.counters.started()
            request.add_done_callback(self._when_request_ended)
            requests.begin(request)
            return request
        is_known = spec.entry.is_known and session.life.state is LinkState.READY
        operation: RemoteOperation
        if is_known and not spec.checksum and session.catalogue.find(spec.key) is None:
            operation = lookup = _Lookup(name, patience, spec, self)
            self._keep(operation, spec)
            operation.attempt(partial(self.lookups.begin, lookup))
        else:
            operation = RemoteOperation(name, patience)
            self._keep(operation, spec)
            self.work_on(operation, spec)
        return operation

    def compare(
        self, spec: TransferSpec, what: str, remote: RemoteCache, grid: Grid, transfer: TransferCompletion
    ) -> RemoteOperation:
        """Compare the checksums of a transfer that has started. Return an operation that ends with the comparison."""
        name = f"{what} of cluster {self.session.cluster_id}"
        operation = Comparison(name, self._pull_requests.patience, spec, remote, grid, self)
        spec.entry.lease()
        self._keep(operation, spec)
        self.hold(operation, remote, operation.taken_back)  # until the operation has ended
        has_begun = False

        def begin() -> None:
            nonlocal has_begun
            operation.take_figures(transfer)
            has_begun = operation.begin()

        if transfer.state is TransferState.DONE:
            operation.attempt(begin)
        if not has_begun and not operation.is_done:
            self.session.spawn(lambda: operation.run(lambda: self._check(operation, spec, remote, grid, transfer)))
        return operation

    def _keep(self, operation: RemoteOperation, spec: TransferSpec) -> None:
        self.running.operations.add(operation)
        operation.add_done_callback(partial(self._ended, spec))

    def _request_ended(self, request: PullRequest) -> None:
        self._ended(request.spec, request)
        self.running.counters.ended("pulled", request)

    def _ended(self, spec: TransferSpec, operation: RemoteOperation) -> None:
        session = self.session
        self.running.operations.discard(operation)
        self.lookups.end(operation)
        # Bytes may still land: this memory is not used again as long as the process lives.
        if operation.state is TransferState.STUCK or (operation.is_doubtful and not session.life.is_shut):
            self.running.lose(spec.entry)
        else:
            spec.entry.release()
        # cancelled by the end of the link, or below by the peer: a CancelledError would look like the caller's own
        if session.life.failure is not None and operation.state is TransferState.CANCELLED:
            operation.replace_error(session.copy_of_failure())
        elif operation in self._taken_back and operation.state is TransferState.CANCELLED:
            operation.replace_error(
                CacheNotFound(f"cluster {session.cluster_id} took its cache back", peer=session.cluster_id)
            )
        elif operation.error is not None:
            operation.error.peer = session.cluster_id
        self._taken_back.discard(operation)
        self.running.check_idle()

    def work_on(self, operation: RemoteOperation, spec: TransferSpec) -> None:
        """Carry out a transfer in a task of the link."""
        self.session.spawn(lambda: operation.run(lambda: self._arrange(operation, spec)))

    # ---- one-sided: where the peer's cache is, and which channel reaches it ----

    async def _arrange(self, operation: RemoteOperation, spec: TransferSpec) -> None:
        if not spec.entry.is_known:
            await self.session.host.registry.make_reachable(spec.entry)
        remote, link_channel, grid = await self.locate(spec.entry, spec.key, spec.grid, spec.seconds)
        transfer = self.running.submit(
            spec.direction, link_channel, spec.entry, remote, grid, spec.seconds, "ours", spec.priority
        )
        if spec.checksum:
            with self.holding(remote, partial(self.taken_back, operation)):
                await self._check(operation, spec, remote, grid, transfer)
        else:
            operation.follow(transfer)

    async def _check(
        self,
        operation: RemoteOperation,
        spec: TransferSpec,
        remote: RemoteCache,
        grid: Grid,
        transfer: TransferCompletion,
    ) -> None:
        """Wait for a transfer, and compare the checksums. The caller holds the peer's cache."""
        await transfer.join()
        operation.take_figures(transfer)
        if transfer.state is TransferState.DONE:
            await self.checks.compare(spec, remote, grid)
        operation.finish(transfer.state, transfer.error)

    @contextmanager
    def holding(self, remote: RemoteCache, taken_back: Callable[[], object]) -> Iterator[None]:
        """Hold the peer's cache while it is compared. If the peer revokes it and waits for too long, call ``taken_back``."""
        holder = object()
        self.hold(holder, remote, taken_back)
        try:
            yield
        finally:
            self.let_go(holder)

    def hold(self, holder: object, remote: RemoteCache, taken_back: Callable[[], object]) -> None:
        """Hold the peer's cache likewise, until :meth:`let_go` is called with the same ``holder``."""
        remote.use()
        self._held[holder] = remote, taken_back

    def let_go(self, holder: object) -> None:
        """Hold the peer's cache no longer."""
        remote, _ = self._held.pop(holder)
        remote.release()

    def taken_back(self, operation: RemoteOperation) -> None:
        """Fail a comparison, because the peer takes its cache back."""
        self._taken_back.add(operation)
        operation.cancel()

    def take_back(self, remote: RemoteCache) -> None:
        """Fail the comparisons that still hold a cache which the peer has revoked for too long."""
        for held, taken_back in list(self._held.values()):
            if held is remote:
                taken_back()

    async def locate(
        self, entry: Entry, key: Key, plan: Callable[[RemoteCache, int], Grid], seconds: float
    ) -> tuple[RemoteCache, LinkChannel, Grid]:
        """Return the peer's cache that a key names, a channel that reaches it and this end's cache, and the bytes to move.

        Raises:
            CacheNotFound: if there is no such cache.
            TransferTimeout: if the peer is too slow.
            LinkError: if no channel can be opened.
            LLMException: if the plan does not fit.
        """
        session, wanted = self.session, ""
        with anyio.move_on_after(seconds):
            while True:
                wanted = "say where its cache is"
                remote, slot = await self.find(key)
                grid = plan(remote, slot)
                wanted = "open a channel that reaches both caches"
                link_channel = await session.channels.reach(entry.epoch, remote.epoch)
                session.channels.traits.check_reaches(remote, f"cluster {session.cluster_id}", entry)
                # The peer may have revoked the cache while a channel was opened. Then it is looked up again.
                if not remote.is_withdrawn:
                    return remote, link_channel, grid
        raise TransferTimeout(f"cluster {session.cluster_id} did not {wanted} within {seconds:g} s")

    async def find(self, key: Key) -> tuple[RemoteCache, int]:
        """Return the peer's cache and slot that a key names. Ask the peer if this end does not know them.

        Raises:
            CacheNotFound: if the peer has no such cache.
        """
        session, name = self.session, name_of(key)
        # Asked again if the peer has revoked the cache since it sent its answer.
        while (known := session.catalogue.find(key)) is None:
            found = await session.questions.ask(lambda call: _lookup(call, name), Found, name)
            if not isinstance(found, Found) or found.cache is None:
                raise _not_offered(session, key)
        return known


def _lookup(call: int, name: Name) -> Lookup:
    return Lookup(call=call, name=KeyName(**name._asdict()))


def _not_offered(session: Session, key: Key) -> CacheNotFound:
    return CacheNotFound(
        f"cluster {session.cluster_id} offers no cache for {key}",
        hint="has it been made there, may this cluster read it? Host memory is only for peers with remote_accessible=True",
    )


class _Lookups:
    """The transfers of one link that wait for an answer. All that want the same cache share one question.

    They also share one timer, because most have their answers long before it goes off.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked: dict[Name, _Asked] = {}
        self._names: dict[_Lookup, Name] = {}
        self._answers: deque[tuple[_Lookup, Answer | None]] = deque()  # those that have not been passed on
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def begin(self, lookup: _Lookup) -> None:
        """Ask for the cache of a transfer, unless the peer has been asked. Raises LLMException if it cannot be asked."""
        name = name_of(lookup.spec.key)
        asked = self._asked.get(name)
        if asked is None:
            asked = self._asked[name] = _Asked(self._session, name, self._answered)
        asked.waiting[lookup] = None
        self._names[lookup] = name
        if asked.question is None:
            asked.ask()
        else:
            asked.late.add(lookup)
        look_at = min(asked.ask_at, lookup.end)
        if look_at < self._timer_at:
            self._set_timer(look_at)

    def __contains__(self, operation: RemoteOperation) -> bool:
        return operation in self._names

    def end(self, operation: RemoteOperation) -> None:
        """Let a transfer wait no longer, if it waits."""
        if type(operation) is _Lookup and (name := self._names.pop(operation, None)) is not None:
            asked = self._asked.get(name)
            if asked is None or operation not in asked.waiting:  # its answer has come, and waits to be passed on
                return
            del asked.waiting[operation]
            asked.late.discard(operation)
            if not asked.waiting:
                asked.close()
                del self._asked[name]

    def stop(self) -> None:
        """Stop the timer, because the link has ended."""
        self._set_timer(math.inf)

    def _answered(self, name: Name) -> None:
        """Continue the transfers that wait for an answer, in the order in which they came.

        If there is no such cache, transfers that came after the question was asked share another question: the cache may have
        been made meanwhile.
        """
        asked = self._asked.pop(name)
        answer = asked.close()
        late = asked.late if isinstance(answer, Found) and answer.cache is None else set()
        if late:
            again = self._asked[name] = _Asked(self._session, name, self._answered)
            again.waiting = {lookup: None for lookup in asked.waiting if lookup in late}
            again.ask()
        was_idle = not self._answers
        for lookup in asked.waiting:
            if lookup not in late:
                self._answers.append((lookup, answer))
        if was_idle:
            self._tell_some()

    def _tell_some(self) -> None:
        """Pass answers on for a slice of time, so that ten thousand transfers with the same answer do not block the loop."""
        until = perf_counter() + SLICE
        while self._answers:
            lookup, answer = self._answers.popleft()
            if self._names.pop(lookup, None) is not None:  # otherwise it has ended meanwhile
                lookup.answered(answer)
            if self._answers and perf_counter() >= until:
                asyncio.get_running_loop().call_soon(self._tell_some)
                return

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = None if when == math.inf else asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        now, next_at = asyncio.get_running_loop().time(), math.inf
        for asked in list(self._asked.values()):
            for lookup in [lookup for lookup in asked.waiting if lookup.end <= now]:
                lookup.too_late()
            if asked.waiting:
                if asked.ask_at <= now:
                    asked.ask_again(now)
                next_at = min(next_at, asked.ask_at, *(lookup.end for lookup in asked.waiting))
        self._set_timer(next_at)


class _Asked:
    """A question about a peer's cache, and the transfers that share it.

    Attributes:
        question: the question; None until it is asked.
        waiting: the transfers that want the cache.
        late: those of them that came after the question was asked.
        ask_at: when to repeat the question, by the event loop's clock.
    """

    def __init__(self, session: Session, name: Name, then: Callable[[Name], None]) -> None:
        self._session, self._name, self._then = session, name, then
        self._pause = AGAIN_SECONDS
        self.question: Question | None = None
        self.waiting: dict[_Lookup, None] = {}  # in the order in which they came
        self.late: set[_Lookup] = set()
        self.ask_at = asyncio.get_running_loop().time() + self._pause

    def ask(self) -> None:
        """Ask the question."""
        self.question = self._session.questions.start(self._words, Found, self._name, partial(self._then, self._name))

    def _words(self, call: int) -> Lookup:
        return _lookup(call, self._name)

    def ask_again(self, now: float) -> None:
        """Repeat the question, because it or its answer may have been lost."""
        if self.question is not None:
            self._session.post_again(self._words(self.question.number))
        self._pause = min(2 * self._pause, MOST_AGAIN_SECONDS)
        self.ask_at = now + self._pause

    def close(self) -> Answer | None:
        """Close the question, and return its answer, if there is one."""
        if self.question is None:
            return None
        self._session.questions.close(self.question)
        return self.question.answer


class _Lookup(RemoteOperation):
    """A transfer for which the peer is only asked where its cache is.

    It has no task, which would cost more than the question: it continues in the call that brings the answer. It gets a task
    only if it must wait for something else then.

    Attributes:
        spec: what the caller wants.
        end: when to give up, by the event loop's clock.
    """

    __slots__ = ("_requester", "end", "spec")

    def __init__(self, name: str, patience: float, spec: TransferSpec, requester: Requester) -> None:
        super().__init__(name, patience)
        self._requester = requester
        self.spec: TransferSpec = spec
        self.end: float = asyncio.get_running_loop().time() + spec.seconds

    def _interrupt(self) -> None:
        if self in self._requester.lookups:
            self.finish(TransferState.CANCELLED)
        else:
            super()._interrupt()

    def too_late(self) -> None:
        """Fail the transfer, because the peer did not answer in time."""
        who, seconds = self._requester.session.cluster_id, self.spec.seconds
        late = TransferTimeout(f"cluster {who} did not say where its cache is within {seconds:g} s")
        self.finish(TransferState.FAILED, late)

    def answered(self, answer: Answer | None) -> None:
        """Continue with the peer's answer."""
        self.attempt(partial(self._go_on, answer))

    def _go_on(self, answer: Answer | None) -> None:
        running, spec = self._requester.running, self.spec
        session = running.session
        if isinstance(answer, Found) and answer.cache is None:
            raise _not_offered(session, spec.key)
        known = running.within_reach(spec.entry, spec.key) if session.life.state is LinkState.READY else None
        if known is None:
            self._requester.work_on(self, spec)
            return
        remote, slot, link_channel = known
        grid = spec.grid(remote, slot)
        transfer = running.submit(
            spec.direction, link_channel, spec.entry, remote, grid, spec.seconds, "ours", spec.priority
        )
        self.follow(transfer)
