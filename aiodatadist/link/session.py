"""What all parts of a link share: who the peer is, what it was told and told us, what is under way, and why it ended."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from aiodatadist.cache.catalogue import Catalogue, RemoteCache
from aiodatadist.cache.names import Key
from aiodatadist.concurrency.signal import Signal
from aiodatadist.concurrency.spawner import Spawner
from aiodatadist.counting import Incident
from aiodatadist.device import Program, Stream, StreamTransfer, TransferState
from aiodatadist.errors import (
    CacheNotFound,
    LinkClosed,
    LinkError,
    LLMException,
    LLMStatusCode,
    NotLinked,
    PeerLost,
    StuckError,
)
from aiodatadist.link.channels import Channels, LinkChannel, channel_name
from aiodatadist.link.cost_model import Estimate
from aiodatadist.link.layer_events import LayerEvents
from aiodatadist.link.leases import PeerLeases
from aiodatadist.link.lifecycle import AWAIT_LINK, Cause, Event, Lifecycle, LinkState
from aiodatadist.link.notifications import NotificationQueue
from aiodatadist.link.questions import PendingQuestions
from aiodatadist.link.remote_operation import RemoteOperation
from aiodatadist.link.state import LinkHost
from aiodatadist.link.statistics import LinkCounters
from aiodatadist.link.wire import Wire
from aiodatadist.values.descriptors import type_name
from aiodatadist.values.transfer_priority import TransferPriority
from aiodatadist.wire.messages import Message

if TYPE_CHECKING:
    from aiodatadist.cache.digester import Digester
    from aiodatadist.cache.registry import CacheRegistry
    from aiodatadist.cache.table import Entry
    from aiodatadist.counting import Incidents, Totals
    from aiodatadist.device import Device
    from aiodatadist.transport import Transport
    from aiodatadist.values.grid import Grid

logger = logging.getLogger(__name__)

T = TypeVar("T")

ALONE_SECONDS = 1e-4
"""Seconds in the queue of its stream: a transfer that waited less had the stream to itself, and says what the link costs."""

ONE_QUEUE = "one queue"
"""The one stream of a link whose channels have one queue: a request of any stream starts those of all others."""
BROKEN_TIMEOUT = 30.0
"""Seconds for closing a channel on which a transfer was stopped half-way: the peer's transfers on it end first."""

DONE = {"get": "pulled", "put": "pushed"}
CALLS = {"get": "pull_blocks", "put": "push_blocks"}
"""What callers call it that moves blocks."""


def _is_suspect(error: LLMException | None) -> bool:
    """The device says that the other end is what failed."""
    return error is not None and error.status_code is LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR


def lane(stream: str, priority: TransferPriority) -> str:
    """The stream for transfers of a priority: those that are critical have one of their own. They wait for no window there,
    and small ones run in the submitting call while all else goes on beside them."""
    return f"{stream}, critical" if priority is TransferPriority.CRITICAL else stream


class _Running:
    """A transfer that is under way, with what it needs: the peer's cache, and a channel; None: it waits for one."""

    __slots__ = ("link_channel", "program", "remote", "transfer")

    def __init__(
        self, transfer: StreamTransfer, program: Program, remote: RemoteCache, link_channel: LinkChannel
    ) -> None:
        self.transfer = transfer
        self.program = program
        self.remote = remote
        self.link_channel: LinkChannel | None = link_channel


class Session:
    """One peer, as the requester, the responder and layered transfers see it. ``Link`` adds how it begins, goes on and ends.

    Transfers that this end asks for run one after the other, and so do those that the peer asks for.

    Attributes:
        cluster_id: the peer's; known once the link is ready.
        instance, heartbeat: the peer's, from its hello.
        life: the state of the link, and why it ended. Only events change it.
        operations: transfers for which the peer is asked, until they end.
    """

    def __init__(self, wire: Wire, device: Device, transport: Transport, host: LinkHost) -> None:
        self._wire = wire
        self._device = device
        self._host = host
        self._tasks: Spawner | None = None
        self._to_start: list[Callable[[], Coroutine[Any, Any, None]]] = []  # when it is served
        self._streams: dict[str, Stream] = {}
        self._transfers: dict[StreamTransfer, _Running] = {}
        self._unclean: dict[StreamTransfer, Callable[[bool], object]] = {}
        self._taken_back: set[StreamTransfer] = set()
        self._waiting: set[anyio.CancelScope] = set()
        self._idle = Signal()
        self._scope: anyio.CancelScope | None = None
        self._names = (0, 0)
        self.cluster_id = 0
        self.instance = ""
        self.heartbeat = 0.0
        self.life = Lifecycle()
        self.operations: set[RemoteOperation] = set()
        self.questions = PendingQuestions(wire.post, self.post_again)
        self.catalogue = Catalogue()
        self.channels = Channels(
            transport,
            wire.post,
            self.questions,
            self.spawn,
            self._channel_name,
            self._on_out_of_use,
            host.totals.incidents,
        )
        self.peer_leases = PeerLeases(self, host.timeout, wire.post, self.spawn, self._give_up, self.post_again)
        self.notification_queue = NotificationQueue(wire.post, self._knows_numbers, self.post_again)
        self.layer_events = LayerEvents(
            wire.post, host.check_here, self.questions, self._knows_numbers, self.post_again
        )
        self.counters = LinkCounters()
        self.estimate = Estimate()

    @property
    def is_ready(self) -> bool:
        """True if transfers may start."""
        return self.life.state is LinkState.READY

    @property
    def is_open(self) -> bool:
        """True if the peer hears this end."""
        return self.life.is_open

    @property
    def failure(self) -> LinkError | None:
        """Why the link ended; None if it has not."""
        return self.life.failure

    @property
    def quiesce_seconds(self) -> float:
        """How long the device may take until it lets go after a cancellation, at most."""
        return self._device.limits.quiesce

    def _channel_name(self) -> str:
        return channel_name(*self._names)

    def post(self, message: Message) -> None:
        self._wire.post(message)

    def posting_together(self) -> AbstractContextManager[None]:
        """Around what is to be sent at one go."""
        return self._wire.together()

    def post_again(self, message: Message) -> None:
        """What was said before, and was not answered."""
        self._host.totals.messages_repeated += 1
        self._wire.post(message)

    def spawn(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start something that ends with the link; as soon as the link is served, if that has not begun."""
        if self._tasks is not None:
            self._tasks.start_soon(call)
        elif self.life.is_listening:
            self._to_start.append(call)

    def serving_a_request(self) -> AbstractContextManager[None] | None:
        """What to enter around the answer to a request of the peer's, or None. Entering it raises LLMException: not now."""
        return self._host.serving_a_request(self.cluster_id)

    @property
    def registry(self) -> CacheRegistry:
        """The caches of this end."""
        return self._host.registry

    @property
    def digester(self) -> Digester:
        """Sums up what is in the caches of this end."""
        return self._host.digester

    def quiet_seconds(self) -> float | None:
        """How long ago bytes of the peer came on the link's own connection. None: not known."""
        return self._wire.quiet_seconds()

    @property
    def peer_minor(self) -> int:
        """The peer's minor version of the protocol: nothing newer is said to it."""
        return self._wire.peer_minor

    def _knows_numbers(self) -> bool:
        """The peer numbers notifications and revocations, and so may this end."""
        return self.peer_minor >= 1

    @property
    def check_here(self) -> Callable[[], None]:
        """Raises LLMException: its caller is not on the cluster's event loop. ForkError: nor in its process."""
        return self._host.check_here

    @property
    def totals(self) -> Totals:
        """What this end counts, over all its links."""
        return self._host.totals

    @property
    def incidents(self) -> Incidents:
        return self._host.totals.incidents

    def revoke(self, entry: Entry) -> Signal:
        """Take a cache back that the peer was told of; the event is set when it gave it back."""
        return self.peer_leases.revoke(entry)

    # ---- transfers ----

    def check_ready(self) -> None:
        """Raises NotLinked or what ended the link."""
        life = self.life
        if life.state is LinkState.READY:
            return
        if life.failure is not None:
            failure = self.copy_of_failure()
            failure.hint = AWAIT_LINK if failure.retryable else "link again"
            raise failure
        raise NotLinked(f"the link to cluster {self.cluster_id} is {life.state.value}", peer=self.cluster_id)

    def within_reach(self, entry: Entry, key: Key) -> tuple[RemoteCache, int, LinkChannel] | None:
        """What a key stands for at the peer, and a channel that reaches it from this end's cache; None: the peer has to be
        asked first."""
        found = self.catalogue.find(key) if entry.is_known else None
        link_channel = None if found is None else self.channels.find(entry.epoch, found[0].epoch)
        return None if found is None or link_channel is None else (*found, link_channel)

    def submit(
        self,
        direction: str,
        link_channel: LinkChannel,
        entry: Entry,
        remote: RemoteCache,
        grid: Grid,
        seconds: float,
        stream: str,
        priority: TransferPriority = TransferPriority.NORMAL,
    ) -> StreamTransfer:
        """Hand bytes to the device; the destination is the grid's local side.

        Raises:
            ParamInvalid: the peer's cache is in memory that the link does not reach.
        """
        self.channels.check_reaches(remote, f"cluster {self.cluster_id}")
        program = Program()
        if direction == "get":
            link_channel.channel.add_get(program, grid)
        else:
            link_channel.channel.add_put(program, grid.mirrored())
        return self.launch(program, direction, link_channel, entry, remote, seconds, lane(stream, priority), priority)

    def launch(
        self,
        program: Program,
        direction: str,
        link_channel: LinkChannel,
        entry: Entry,
        remote: RemoteCache,
        seconds: float,
        stream: str,
        priority: TransferPriority = TransferPriority.NORMAL,
    ) -> StreamTransfer:
        """Start a program on one of the link's streams: both caches are leased until the device let go."""
        if entry.data_type != remote.data_type:
            self._warn_of_types(entry, remote)
        if link_channel.channel.has_one_queue:
            transfer = self.stream(ONE_QUEUE, is_serial=True).submit(program, seconds, self._break_channel, priority)
        else:
            transfer = self.stream(stream).submit(program, seconds, priority=priority)
        what = "served" if stream.startswith("served") else DONE[direction]
        self.watch_over(transfer, program, what, link_channel, entry, remote)
        return transfer

    def watch_over(
        self,
        transfer: StreamTransfer,
        program: Program,
        what: str,
        link_channel: LinkChannel,
        entry: Entry,
        remote: RemoteCache,
    ) -> None:
        """Lease both caches, and use the channel, until the device let go. ``what``: pulled, pushed or served.

        Of one that is over, well, nothing is left to do but to count it.
        """
        if transfer.state is TransferState.DONE:
            is_critical = transfer.priority is TransferPriority.CRITICAL
            self.ran(what, transfer.nbytes, transfer.transfer_seconds, is_critical=is_critical)
            if what == "served":
                self._host.totals.begun(what, transfer)
            return
        entry.lease()
        remote.use()
        link_channel.uses += 1
        running = self._transfers[transfer] = _Running(transfer, program, remote, link_channel)
        self.counters.started()

        def ended(done: StreamTransfer) -> None:
            self._settle(done, entry)
            del self._transfers[transfer]
            remote.release()
            if running.link_channel is not None:
                self.channels.release(running.link_channel)
            was_beside = done.priority is TransferPriority.CRITICAL and bool(self._transfers)
            if done.state is TransferState.DONE and done.queue_seconds < ALONE_SECONDS and not was_beside:
                self.estimate.add(done.nbytes, done.transfer_seconds)
            self.counters.ended(what, done)
            self.check_idle()

        transfer.add_done_callback(ended)
        if what == "served":
            self._host.totals.begun(what, transfer)

    def ran(self, what: str, nbytes: int, seconds: float, *, is_critical: bool) -> None:
        """Count a transfer that was over in the call that started it."""
        if not is_critical or not self._transfers:  # else it shared the device, and says nothing of what it costs
            self.estimate.add(nbytes, seconds)
        self.counters.ran(what, nbytes, seconds)

    def _warn_of_types(self, entry: Entry, remote: RemoteCache) -> None:
        """Bytes are moved as they are. Said once for each of the peer's caches whose elements may be taken for others."""
        if entry.stride == remote.stride and not remote.is_of_other_type:
            remote.is_of_other_type = True
            self.incidents.add(
                Incident.TYPES_DIFFER,
                logger,
                "cache %d is %s, and cache %d of cluster %d is %s: bytes are moved, and not converted",
                *(entry.cache_id, type_name(entry.data_type)),
                *(remote.cache_id, self.cluster_id, type_name(remote.data_type)),
            )

    def stream(self, name: str, *, is_serial: bool = False) -> Stream:
        """One of the link's, opened when it is first wanted."""
        if name not in self._streams:
            self._streams[name] = self._device.open_stream(f"link to {self.cluster_id}, {name}", is_serial=is_serial)
        return self._streams[name]

    # ---- channels with one queue: a transfer that was stopped half-way ----

    def _break_channel(self, transfer: StreamTransfer, error: LLMException | None, finish: Callable[[], None]) -> None:
        """Requests of it are left in its channel's queue, where the next request would start them. So none comes, and the
        transfer ends, with its leases, when the channel is closed. If the peer is what failed, no further channel is opened
        with it: HCCL would wait for the peer, and no call could end that."""
        if _is_suspect(error):
            self._peer_failed(error)
        running = self._transfers[transfer]
        closed = Signal()

        def over(is_closed: bool) -> None:
            closed.set()
            if self._unclean.pop(transfer, None) is not None and not is_closed:
                transfer.stick(StuckError(f"cluster {self.cluster_id}: a channel with requests in it was not closed"))
            finish()

        async def insist() -> None:
            with anyio.move_on_after(BROKEN_TIMEOUT):
                await closed.wait()
            if not closed.is_set():
                self._give_up(f"did not leave a broken channel within {BROKEN_TIMEOUT:g} s")

        self._unclean[transfer] = over
        if running.link_channel is not None:
            self.channels.broken(running.link_channel, over)
        if not self.life.is_listening:
            self.channels.close_broken()
        self.spawn(insist)
        self.check_idle()

    def _on_out_of_use(self, link_channel: LinkChannel) -> None:
        """What waits for this channel takes the next one, which is opened now, unless the link ends anyway."""
        self.spawn(lambda: self._open_next(link_channel))
        waiting = [r for r in self._transfers.values() if r.link_channel is link_channel and r.transfer.is_waiting]
        if waiting:
            stream = self.stream(ONE_QUEUE)
            stream.hold()
            for running in waiting:
                running.link_channel = None
                link_channel.uses -= 1
            self.spawn(lambda: self._move_on(stream, link_channel, waiting))

    async def _open_next(self, old: LinkChannel) -> None:
        if self.is_ready:
            await self.channels.open_next(old)

    async def _move_on(self, stream: Stream, old: LinkChannel, waiting: Sequence[_Running]) -> None:
        try:
            fresh = await self.channels.reach(old.mine, old.theirs)
        except LinkError as error:
            for running in waiting:
                running.transfer.fail(type(error)(*error.args, peer=self.cluster_id))
        else:
            for running in waiting:
                if not running.transfer.is_done:
                    fresh.channel.take_over(running.program)
                    running.link_channel = fresh
                    fresh.uses += 1
        finally:
            for running in waiting:
                if running.link_channel is None:  # it failed already, or the link ends: nothing starts on the old one
                    running.transfer.cancel()
            stream.go_on()

    def close_broken(self) -> None:
        """Close broken channels now that the link ends: its tasks wait for transfers that end with such a channel."""
        self.life.on(Event.STOP_LISTENING)
        self.channels.close_broken()

    def end_unclean(self) -> None:
        """The link is over, and what was left in its channels is not known to be gone: those transfers are stuck."""
        for over in list(self._unclean.values()):
            over(False)

    def idle_stream(self, kind: str) -> str:
        """The name of a stream of the link's on which nothing is under way."""
        for number in itertools.count():
            name = f"{kind} {number}"
            if name not in self._streams or self._streams[name].is_idle:
                return name
        raise AssertionError

    def _settle(self, transfer: StreamTransfer, entry: Entry) -> None:
        """Give the lease back, if the device let go, and say what a failure means for the link."""
        if transfer.state is TransferState.STUCK:
            self.lose(entry)
            why = transfer.error.args[0] if transfer.error is not None else "a transfer is stuck"
            self.break_off(LinkError(f"cluster {self.cluster_id}: {why}"))
        else:
            entry.release()
        if transfer in self._taken_back:
            self._taken_back.discard(transfer)
            if transfer.is_cancelled:
                transfer.replace_error(
                    CacheNotFound(f"cluster {self.cluster_id} took its cache back", peer=self.cluster_id)
                )
        suspect = _is_suspect(transfer.error)
        if self.life.failure is not None and (suspect or transfer.state is TransferState.CANCELLED):
            transfer.replace_error(self.copy_of_failure())
        elif suspect:
            transfer.replace_error(PeerLost(self._peer_failed(transfer.error), peer=self.cluster_id))
        elif transfer.error is not None:
            transfer.error.peer = self.cluster_id

    def _peer_failed(self, error: LLMException | None) -> str:
        """A transfer found that out before the connection or the heartbeats did: the link is over. Why, in words."""
        words = "" if error is None else error.args[0]
        died = f"cluster {self.cluster_id}: the peer's process is gone, or gave up its memory: {words}"
        self.break_off(PeerLost(died), Cause.DEVICE_ERROR)
        return died

    def take_back(self, remote: RemoteCache) -> None:
        """Cancel the transfers that use a cache which the peer takes back: they fail with CacheNotFound."""
        for transfer in [t for t, running in self._transfers.items() if running.remote is remote]:
            self._taken_back.add(transfer)
            transfer.cancel()

    def lose(self, entry: Entry) -> None:
        """It is not known when bytes stop to land in it: it is never used again."""
        entry.poison()
        for region in entry.regions():
            self._device.mark_stuck(region.address, region.nbytes)

    # ---- until it ends ----

    async def while_it_lasts(self, operation: Callable[[], Awaitable[T]]) -> T:
        """What the operation gives. Raises NotLinked, or what ended the link, if that comes first."""
        self.check_ready()
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                result = await operation()
            finally:
                self._waiting.discard(scope)
            if self.life.failure is None:  # else it ended in the tick in which the operation did
                return result
        raise self.copy_of_failure()

    def copy_of_failure(self) -> LinkError:
        """For one caller, who may try again if the link is made again."""
        failure = self.life.failure or LinkClosed(f"the link to cluster {self.cluster_id} was closed")
        copied = type(failure)(*failure.args, peer=self.cluster_id, hint=failure.hint)
        copied.retryable = self.life.is_retryable
        return copied

    def _end(self, event: Event, failure: LinkError, cause: Cause | None = None) -> None:
        """Tell the life of the link about an event that ends it. No transfer starts from here on."""
        if self.life.on(event, failure, cause):
            self.layer_events.stop_sending(self.copy_of_failure())
            for scope in self._waiting:
                scope.cancel()
            is_lost = self.life.state is LinkState.BROKEN
            kind, level = (Incident.LINK_LOST, logging.WARNING) if is_lost else (Incident.LINK_ENDED, logging.INFO)
            self.incidents.add(kind, logger, "link to cluster %d: %s", self.cluster_id, failure, level=level)

    def lost(self, why: str, cause: Cause | None = None) -> None:
        """The peer is dead, or might as well be."""
        self.break_off(PeerLost(f"cluster {self.cluster_id}: {why}"), cause)

    def _give_up(self, why: str) -> None:
        self.break_off(LinkError(f"cluster {self.cluster_id} {why}"))

    def break_off(self, failure: LinkError, cause: Cause | None = None) -> None:
        """End the link at once: nothing on it can be trusted from here on."""
        if self.life.is_open:
            self._end(Event.BREAK, failure, cause)
            self._stop()
            self._end_serving()

    def _end_serving(self) -> None:
        """Stop to listen to the peer, and end the tasks of the link. May be called by any task on the loop."""
        self.life.on(Event.STOP)
        if self._scope is not None:
            self._scope.cancel()

    def _stop(self) -> None:
        """Ask what is under way to stop; it ends with ``failure``."""
        for transfer in list(self._transfers):
            transfer.cancel()
        for operation in list(self.operations):
            operation.cancel()

    @property
    def _is_idle(self) -> bool:
        """Nothing is under way, apart from what only the end of a channel can end."""
        return self._transfers.keys() <= self._unclean.keys() and all(
            operation.is_doubtful for operation in self.operations
        )

    def check_idle(self) -> None:
        """Something has ended. Only a link that ends waits for the last of them."""
        if self.life.state is not LinkState.READY and self._is_idle:
            self._idle.wake()
