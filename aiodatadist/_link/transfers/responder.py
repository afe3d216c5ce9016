"""The responder of request/response mode: it writes what the peer asks for into the peer's memory."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from anyio.lowlevel import checkpoint

from aiodatadist._cache.names import WHOLE_CACHE, Name
from aiodatadist._cache.plan import plan
from aiodatadist._concurrency.scope import Scope
from aiodatadist._concurrency.signal import Signal
from aiodatadist._device import StreamTransfer, TransferReport, TransferState, give_way
from aiodatadist._link.control.served_requests import CriticalRequests, ServedRequests
from aiodatadist._link.lifecycle import LinkState
from aiodatadist._link.transfers.asked_checksums import AskedChecksums, check_key, check_reader
from aiodatadist._link.transfers.requests_in_line import RequestInLine, RequestLines, selection_of
from aiodatadist._transport import Access
from aiodatadist._values.peer_budget import Budget
from aiodatadist._values.selection import Selection
from aiodatadist._values.transfer_priority import TransferPriority
from aiodatadist._wire.messages import MAX_INDEXES, Digests, Found, Lookup, OtherPulled, Pull, Pulled
from aiodatadist._wire.reasons import reason_of, status_of
from aiodatadist.errors import (
    CacheNotFound,
    FeatureNotEnabled,
    LLMException,
    LLMStatusCode,
    ParamInvalid,
    ProtocolError,
    TransferError,
    TransferTimeout,
)

if TYPE_CHECKING:
    from aiodatadist._cache.catalogue import RemoteCache
    from aiodatadist._cache.table import Entry
    from aiodatadist._link.data.link_channel import LinkChannel
    from aiodatadist._link.transfers.running import RunningTransfers
    from aiodatadist._link.transfers.shortcuts import Shortcuts

MAX_SERVED = 4096
"""The most requests of one peer that are under way."""
MAX_ASKED_EARLY = 4096
"""The most questions of one peer for caches that are being revoked. Each keeps a message."""
_ERRORS: dict[LLMStatusCode, type[LLMException]] = {
    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST: CacheNotFound,
    LLMStatusCode.LLM_PARAM_INVALID: ParamInvalid,
    LLMStatusCode.LLM_TIMEOUT: TransferTimeout,
    LLMStatusCode.LLM_FEATURE_NOT_ENABLED: FeatureNotEnabled,
}


def status_error(answer: Pulled | Digests, before: str = "") -> LLMException:
    """Return the error that stands for a peer's refusal. ``before`` is put in front of the peer's reason."""
    status = LLMStatusCode.of(answer.status)
    return _ERRORS.get(status, TransferError)(before + answer.reason, status_code=status)


class _Stoppable(Protocol):
    """A request that can be cancelled: the scope of its task, or its transfer."""

    def cancel(self) -> object:
        """Cancel the request."""


class Responder:
    """The requests of one peer. Their transfers run one after the other on its stream.

    A request goes on the stream in the call that brings it, and its answer is posted in the call that ends the transfer. It
    gets a task only if it must wait for something else: a channel, a key that others pull at the same time, the turn of a v1
    cluster, checksums. Few requests have a task at a time. The others stand in line.

    Attributes:
        checksums: the peer's questions for checksums.
    """

    def __init__(self, running: RunningTransfers, shortcuts: Shortcuts) -> None:
        self._running = running
        self._session = session = running.session
        self._registry = session.host.registry
        self._consumption = self._registry.consumption
        self._quotas = session.host.peer_shares.quotas
        self._shortcuts = shortcuts
        self._under_way: dict[int, _Stoppable] = {}
        self._asked_early: dict[Entry, list[Lookup]] = {}  # for caches that are being revoked
        self._in_line = RequestLines()
        self._moved = Signal()  # a request has left its line
        self._served = ServedRequests()
        self._ended: list[OtherPulled] | None = None  # those of one message
        self._waiting_blocks = 0  # numbers in the requests that have a task, or stand in line
        self._critical = CriticalRequests(lambda: session.share.critical)
        self.checksums: AskedChecksums = AskedChecksums(session)

    def find(self, message: Lookup) -> None:
        """Tell the peer where a cache of this end is. If the cache is being revoked, wait until that has ended."""
        session = self._session
        wanted = message.name
        name = Name(wanted.kind, wanted.id, wanted.model_id)
        found = self._registry.offered(name) if session.life.state is LinkState.READY else None
        if found is None or (access := self._shown(*found, name)) is Access.NONE:
            session.post(Found(call=message.call, cache=None))
            return
        entry, slot = found
        if session.peer_leases.is_settled(entry):
            session.peer_leases.told(entry)
            session.post(Found(call=message.call, cache=entry.message(), slot=slot, access=access.value))
            return
        asked = self._asked_early.setdefault(entry, [])
        if not asked:
            session.spawn(partial(self._find_later, entry))
        if len(asked) < MAX_ASKED_EARLY:
            asked.append(message)
        else:
            session.post(Found(call=message.call, cache=None))

    def _shown(self, entry: Entry, slot: int, name: Name) -> Access:
        """Return what the peer may do with a cache; nothing if it may not know of it by this name."""
        session = self._session
        access = session.access_to(entry)
        if access is not Access.NONE and (name.kind in WHOLE_CACHE or entry.is_for(session.cluster_id, name, slot)):
            return access
        session.lacks_right("read", f"cache {entry.cache_id} is not shown")
        return Access.NONE

    async def _find_later(self, entry: Entry) -> None:
        """Answer what was asked about a cache while it was being revoked, a few questions at a time."""
        await self._session.peer_leases.wait_settled(entry)
        for message in self._asked_early.pop(entry):
            self.find(message)
            if self._session.wire.is_congested:
                await self._session.wire.flush()
            await give_way()

    def begin_each(self, message: Pull) -> None:
        """Serve the requests of a message. Those that have ended by then are answered together."""
        if not message.also:
            self.begin(message)
            return
        if (count := message.count_blocks()) > 2 * MAX_INDEXES:
            raise ProtocolError(f"the requests of a message name {count} blocks: the limit is {2 * MAX_INDEXES}")
        ended = self._ended = []
        try:
            for each in message.each():
                self.begin(each)
        finally:
            self._ended = None
            if ended and self._session.is_open:
                self._say(_report_all(ended))

    def begin(self, message: Pull) -> None:
        """Serve a request, unless it came before, or was stopped before it came.

        A critical request of a peer that may have none, or has had its share of them, is served as a normal one.
        """
        if len(self._under_way) + len(self._in_line) >= MAX_SERVED:
            raise ProtocolError(f"{MAX_SERVED} requests are under way")
        # served twice, it would write into memory that the first answer released
        if not self._served.is_new(message.call):
            return
        if message.priority == TransferPriority.CRITICAL.value and not (
            self._session.may_be_critical() and self._critical.begin(message.call)
        ):
            message = message.model_copy(update={"priority": int(TransferPriority.NORMAL)})
        if not self._is_full and self._write_at_once(message):
            return
        try:
            self._session.check_ready()
            target = self._session.catalogue.get(message.target)  # now: the peer may take it back in its next message
            if target is None:
                self._say(_unknown(message))
                return
            selection = selection_of(message)
            self._check_room(selection)
        except LLMException as error:
            self._say(_refusal(message.call, error))
        else:
            self._admit(message, selection, target)

    @property
    def _is_full(self) -> bool:
        """True if the limit of served requests is reached: further ones wait in line."""
        return len(self._under_way) >= self._quotas.requests

    def _admit(self, message: Pull, selection: Selection, target: RemoteCache) -> None:
        """Give a request a task, or a place in the line. Its destination stays in use until its end."""
        self._waiting_blocks += selection.count_blocks()
        target.use()
        if not self._is_full and self._in_line.enter(message.priority):
            self._start(message, selection, target)
        else:
            self._in_line.add(RequestInLine(message, selection, target))
            if self._is_full:
                self._session.totals.budget_waits[Budget.REQUESTS.value] += 1

    def _start_waiting(self) -> None:
        """Start requests in line, the most urgent first, because others have ended."""
        for priority in sorted(TransferPriority) if len(self._in_line) else ():
            while self._in_line.has(priority) and not self._is_full and self._in_line.enter(priority):
                self._start_next(priority)

    def _drop(self, blocks: int, target: RemoteCache) -> None:
        """Release what a request kept in use."""
        self._waiting_blocks -= blocks
        target.release()

    async def wait_served(self) -> None:
        """Wait until no request stands in line. Call it only while the link ends, when further requests are refused."""
        while len(self._in_line):
            await self._moved.wait()

    def refuse_line(self) -> None:
        """Refuse the requests in line, because the time for ending the link in good order has passed."""
        for request in self._in_line.clear():
            self._drop(request.blocks, request.target)
            self._say(_refusal(request.call, self._session.copy_of_failure()))

    def end(self) -> None:
        """Drop the requests in line, because the link has ended. The others end with their tasks and transfers."""
        for request in self._in_line.clear():
            self._drop(request.blocks, request.target)
        self._critical.end()

    def _check_room(self, selection: Selection) -> None:
        """Raise TransferError if the requests that wait would name too many blocks with this one."""
        numbers = self._waiting_blocks + selection.count_blocks()
        if numbers > self._quotas.request_blocks:
            self._session.totals.budget_refusals[Budget.REQUEST_BLOCKS.value] += 1
            raise TransferError(
                f"requests that wait would name {numbers} blocks with this one: the limit is {self._quotas.request_blocks}",
                hint="pull again when some of them have ended",
            )

    def _write_at_once(self, message: Pull) -> bool:
        """Put a request on the stream, or refuse it. Return False if it needs a task; nothing has begun then."""
        session, call = self._session, message.call
        target = session.catalogue.get(message.target)
        if target is None or message.checksum or not session.is_ready or self._serving_a_request() is not None:
            return False
        try:
            entry, _, slot = self._find(message)
            link_channel = session.channels.find(entry.epoch, target.epoch)
            if link_channel is None or entry.may_have_keys:
                return False
            done = self._put(message, slot, entry, target, link_channel)
        except LLMException as error:
            self._say(_refusal(call, error))
            return True
        if isinstance(done, TransferReport):
            self._succeeded((call, *done))
            return True
        if not done.is_done:
            self._under_way[call] = done
        done.add_done_callback(lambda transfer: self._written(call, transfer))
        return True

    def _serving_a_request(self) -> AbstractContextManager[None] | None:
        """Return a context to enter around the answer to a request, or None.

        Entering it raises LLMException if something else is under way.
        """
        return self._session.host.serving_a_request(self._session.cluster_id)

    def _put(
        self, message: Pull, slot: int, entry: Entry, target: RemoteCache, link_channel: LinkChannel
    ) -> TransferReport | StreamTransfer:
        """Put a request on the stream, and return its transfer, or its report if it has ended at once.

        Raises LLMException if the request does not fit the two caches.
        """
        priority = TransferPriority(message.priority)
        way = entry, target, link_channel, message.seconds, priority, message.layers
        if message.is_whole_blocks:
            done = self._shortcuts.serve(*way, message.src_blocks, message.dst_blocks)
            if done is not None:
                return done
        grid = plan(selection_of(message), entry, target, src_slot=slot)
        transfer = self._running.submit("put", link_channel, entry, target, grid, message.seconds, "served", priority)
        if transfer.state is TransferState.DONE and message.is_whole_blocks:
            self._shortcuts.learn_served(*way, grid)
        return transfer

    def _written(self, call: int, transfer: StreamTransfer) -> None:
        """Answer a request whose transfer has ended.

        If the link has ended, there is no answer: the end tells the peer more than an answer could.
        """
        self._under_way.pop(call, None)
        if not self._session.is_open:
            return
        if transfer.state is TransferState.DONE:
            self._succeeded((call, *_figures(transfer)))
        elif transfer.error is not None:
            self._say(_refusal(call, transfer.error))
        else:
            self._say(_refusal(call, TransferError("the request was stopped"), stopped=True))
        self._start_waiting()

    def _succeeded(self, ended: OtherPulled) -> None:
        if self._ended is None:
            self._say(_report_all([ended]))
        else:
            self._ended.append(ended)

    def _start(self, message: Pull, selection: Selection, target: RemoteCache) -> None:
        # Without its lists: each is walked whenever garbage is collected.
        bare = message.model_copy(update={"src_blocks": [], "dst_blocks": [], "parts": None})
        self._session.spawn(self._work_on(bare, selection, target))

    def _work_on(
        self, message: Pull, selection: Selection, target: RemoteCache
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        # before the task runs: a stop may come in the same piece as its request
        scope = self._under_way[message.call] = Scope()

        async def run() -> None:
            answer: Pulled | None = None
            try:
                with scope:
                    answer = await self._answer(message, selection, target)
            finally:
                self._under_way.pop(message.call, None)
                self._drop(selection.count_blocks(), target)
            self._say(answer or _refusal(message.call, TransferError("the request was stopped"), stopped=True))
            if self._in_line.has(message.priority):
                await checkpoint()  # if the link has ended, none of them starts
            self._start_next(message.priority)
            self._start_waiting()

        return run

    def _start_next(self, priority: int) -> None:
        """Start the first request in line in the place of a task that has ended."""
        request = self._in_line.next(priority)
        if request is not None:
            message = request.message()
            self._start(message, selection_of(message), request.target)
            self._moved.wake()

    def _say(self, answer: Pulled) -> None:
        self._critical.answered(answer)
        self._served.answered(answer)
        self._session.post(answer)

    def stop(self, call: int) -> None:
        """Stop a request that the peer gives up.

        If the request was answered, the answer is repeated, because it may have been lost. If the request has not come yet,
        it is not served when it comes.
        """
        running = self._under_way.get(call)
        if running is not None:
            running.cancel()
            return
        if self.checksums.stop(call):
            return
        waiting = self._in_line.remove(call)
        if waiting is not None:
            self._drop(waiting.blocks, waiting.target)
            self._moved.wake()
            self._say(_refusal(call, TransferError("the request was stopped"), stopped=True))
            return
        self._served.is_new(call)
        said = self._served.answer(call)
        self._session.post(said or _refusal(call, TransferError("the request is not under way"), stopped=True))

    async def _answer(self, message: Pull, selection: Selection, target: RemoteCache) -> Pulled:
        try:
            if not self._session.is_open:
                raise self._session.copy_of_failure()
            with self._serving_a_request() or nullcontext():
                return await self._serve(message, selection, target)
        except LLMException as error:
            return _refusal(message.call, error)

    async def _serve(self, message: Pull, selection: Selection, target: RemoteCache) -> Pulled:
        entry, name, slot = self._find(message)
        if not self._consumption.is_possible(entry, name, slot):
            return await self._write(message, selection, target, entry, name, slot)
        async with self._consumption.claim(
            entry, slot
        ):  # another pull finds the key afterwards, or finds that it is gone
            return await self._write(message, selection, target, *self._find(message))

    async def _write(
        self, message: Pull, selection: Selection, target: RemoteCache, entry: Entry, name: Name, slot: int
    ) -> Pulled:
        grid = plan(selection, entry, target, src_slot=slot)
        sums: list[int] = []
        entry.lease()
        try:
            link_channel = await self._session.channels.reach(entry.epoch, target.epoch)
            priority = TransferPriority(message.priority)
            transfer = self._running.submit(
                "put", link_channel, entry, target, grid, message.seconds, "served", priority
            )
            await transfer.join()
            if transfer.error is not None:
                raise transfer.error
            if transfer.is_cancelled:
                raise TransferError("the request was stopped: its destination was revoked")
            if message.checksum:
                sums = await self.checksums.of(entry, grid.remote_side, message.seconds)
        finally:
            entry.release()
        if message.offsets is None:
            self._consumption.pulled(entry, name, slot, selection.layers.of_source(entry))
        return _report(message.call, transfer, sums)

    def _find(self, message: Pull) -> tuple[Entry, Name, int]:
        name = Name(message.name.kind, message.name.id, message.name.model_id)
        found = self._registry.offered(name)
        if found is None:
            raise CacheNotFound(f"there is no cache or slot with the name {tuple(name)}")
        entry, slot = found
        check_reader(self._session, entry)
        if name.kind == "id":
            slot = message.slot
        check_key(self._session, entry, entry.is_for(self._session.cluster_id, name, slot))
        if slot >= (1 if entry.blocks else entry.pieces):
            raise CacheNotFound(f"cache {entry.cache_id} has no batch index {slot}")
        return entry, name, slot


def _refusal(call: int, error: LLMException, stopped: bool = False) -> Pulled:
    return Pulled(call=call, status=status_of(error), reason=reason_of(error), stopped=stopped)


def _unknown(message: Pull) -> Pulled:
    why = ParamInvalid(f"the destination, cache {message.target}, was never announced, or has been revoked")
    return _refusal(message.call, why).model_copy(update={"is_unknown": True})


def _figures(transfer: StreamTransfer) -> TransferReport:
    queued, seconds = max(0.0, transfer.queue_seconds), max(0.0, transfer.transfer_seconds)
    return TransferReport(transfer.nbytes, transfer.ranges, queued, seconds)


def _report(call: int, transfer: StreamTransfer, checksums: list[int]) -> Pulled:
    return _report_all([(call, *_figures(transfer))]).model_copy(update={"checksums": checksums})


def _report_all(ended: list[OtherPulled]) -> Pulled:
    call, nbytes, ranges, queued, seconds = ended[0]
    return Pulled(
        call=call,
        status=int(LLMStatusCode.LLM_SUCCESS),
        reason="",
        nbytes=nbytes,
        ranges=ranges,
        queue_seconds=queued,
        transfer_seconds=seconds,
        also=ended[1:],
    )
