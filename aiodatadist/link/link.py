"""One peer: the connection that carries control messages, the channels that carry bytes, and what is under way."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.abc

from aiodatadist.cache.catalogue import Catalogue, RemoteCache
from aiodatadist.cache.names import Key, Name
from aiodatadist.concurrency.in_callbacks import Event, Spawner
from aiodatadist.device import Program, Stream, StreamTransfer, TransferState, give_way
from aiodatadist.errors import (
    CacheNotFound,
    LinkClosed,
    LinkError,
    LinkTimeout,
    LLMException,
    LLMStatusCode,
    NotLinked,
    PeerLost,
    ProtocolError,
    StuckError,
)
from aiodatadist.link.channels import Channels, LinkChannel, channel_name
from aiodatadist.link.cost_model import Estimate
from aiodatadist.link.layer_events import LayerEvents
from aiodatadist.link.leases import PeerLeases
from aiodatadist.link.link_handshake import LinkHandshake
from aiodatadist.link.notifications import NotificationQueue, decode
from aiodatadist.link.questions import PendingQuestions
from aiodatadist.link.remote_operation import RemoteOperation, TransferSpec, failed
from aiodatadist.link.requester import Requester
from aiodatadist.link.responder import Responder
from aiodatadist.link.state import LinkHost, LinkState
from aiodatadist.link.statistics import LinkCounters
from aiodatadist.link.wire import Wire
from aiodatadist.transport import StillWritten
from aiodatadist.wire.handshake import Handshake
from aiodatadist.wire.messages import (
    Bye,
    CacheEntry,
    Connect,
    Disconnect,
    Found,
    Grant,
    Hello,
    Landed,
    Lookup,
    Message,
    Note,
    Outdated,
    Ping,
    Pong,
    Pull,
    Pulled,
    Renew,
    Renewed,
    Retire,
    Revoke,
    Revoked,
    Stop,
    Taken,
    Watch,
)

if TYPE_CHECKING:
    from aiodatadist.cache.table import Entry
    from aiodatadist.device import Device
    from aiodatadist.transport import Transport
    from aiodatadist.values.grid import Grid

logger = logging.getLogger(__name__)

T = TypeVar("T")

DRAIN_TIMEOUT = 5.0
"""Seconds that a peer has for ending its transfers when a link is closed in good order."""
ALONE = 1e-4
"""Seconds in the queue of its stream: a transfer that waited less had the stream to itself, and says what the link costs."""
MAX_HELD = 1 << 20
"""Caches that a peer may tell us of."""


_DONE = {"get": "pulled", "put": "pushed"}


class Link:
    """A link to one peer. Transfers that we ask for run one after the other, and so do those that the peer asks us for.

    Attributes:
        cluster_id: the peer's; known once the link is ready.
        failure: why it is closed or broken.
        instance, heartbeat: the peer's, from its hello.
        heartbeat_token: what a connection for this link's heartbeats has to say to us.
        is_filed: it was made, and somebody serves it.
        is_shut: its channels are closed: nothing of the peer's can land here any more, but for what is withheld.
    """

    def __init__(self, wire: Wire, device: Device, transport: Transport, host: LinkHost) -> None:
        self._wire = wire
        self._device = device
        self._transport = transport
        self._host = host
        self._tasks: Spawner | None = None
        self._streams: dict[str, Stream] = {}
        self._transfers: dict[StreamTransfer, RemoteCache] = {}
        self.is_shut = self._is_written = False
        self._taken_back: set[StreamTransfer] = set()
        self._idle = Event()
        self._closed = Event()
        self._leaving = Event()
        self._broken = Event()
        self._reason = ""
        self._patience = 0.0
        self._vanished = self._has_said_so = False
        self.calls = PendingQuestions(wire.post)
        self._waiting: set[anyio.CancelScope] = set()
        self._untaken = 0
        self.channels = Channels(transport, wire.post, self.calls, self.spawn, self._channel_name)
        self.peer_leases = PeerLeases(self, host.timeout, wire.post, self.spawn, self._give_up)
        self.requester = Requester(self)
        self._service = Responder(self, host.registry)
        self._names = (0, 0)
        self.cluster_id = 0
        self.instance = ""
        self.heartbeat = 0.0
        self.heartbeat_token = secrets.token_hex(32)
        self.is_registered = False
        self.state = LinkState.OPENING
        self.failure: LinkError | None = None
        self.catalogue = Catalogue()
        self.notification_queue = NotificationQueue(wire.post)
        self.layer_events = LayerEvents(wire.post)
        self.counters = LinkCounters()
        self.estimate = Estimate()

    @property
    def is_ready(self) -> bool:
        return self.state is LinkState.READY

    @property
    def is_open(self) -> bool:
        """The peer hears us."""
        return self.state in {LinkState.READY, LinkState.CLOSING}

    @property
    def grace(self) -> float:
        """Seconds that the device has for letting go after an abort."""
        return self._device.limits.grace

    def _channel_name(self) -> str:
        return channel_name(*self._names)

    def spawn(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start something that ends with the link."""
        if self._tasks is not None:
            self._tasks.start_soon(call)

    # ---- opening ----

    async def shake_hands(
        self,
        handshake: Handshake,
        connect: Connect | None,
        first: Message | None,
        admit: Callable[[Hello], None],
        attach: Callable[[str], Awaitable[None]] | None,
    ) -> None:
        """Agree with the peer and open the channel. The caller sets the deadline.

        Args:
            connect: makes us the client.
            first: what the client said already.
            bring: the client's: bring heartbeats, given what a connection for them has to say. Raises LinkError.

        Raises:
            LinkError: it cannot be; the peer was told, if it was our doing.
        """

        def met(peer: Hello) -> None:
            self.cluster_id, self.instance, self.heartbeat = peer.cluster_id, peer.instance, peer.heartbeat
            self._names = (handshake.me, peer.cluster_id)
            admit(peer)

        opening = LinkHandshake(handshake, self._wire, self.channels, self._transport, met)
        ready = await opening.agree(connect, first, self.heartbeat_token, attach)
        self.channels.on_first(ready.epoch)
        self.state = LinkState.READY

    # ---- transfers ----

    def check_ready(self) -> None:
        """Raises NotLinked or what ended the link."""
        if self.state is LinkState.READY:
            return
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args, peer=self.cluster_id, hint="link again")
        raise NotLinked(f"the link to cluster {self.cluster_id} is {self.state.value}", peer=self.cluster_id)

    def start(self, job: TransferSpec, what: str) -> StreamTransfer | RemoteOperation:
        """Start a job. Whatever goes wrong with it, it is in the outcome.

        When all is known and within reach it is on the stream when this returns. Else a task of the link's talks to the
        peer first.
        """
        if job.request is not None:
            return self.requester.begin(job, what)
        known = self.within_reach(job.entry, job.key)
        if known is None:
            return self.requester.begin(job, what)
        remote, slot, link_channel = known
        try:
            return self.submit(
                job.direction, link_channel, job.entry, remote, job.plan(remote, slot), job.seconds, "ours"
            )
        except LLMException as error:
            error.peer = self.cluster_id
            return failed(what, error)

    def within_reach(self, entry: Entry, key: Key) -> tuple[RemoteCache, int, LinkChannel] | None:
        """What a key stands for at the peer, and a channel that reaches it from a cache of ours; None: the peer has to be
        asked first."""
        found = self.catalogue.find(key)
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
    ) -> StreamTransfer:
        """Hand bytes to the device; the destination is the grid's local side."""
        program = Program()
        if direction == "get":
            link_channel.channel.add_get(program, grid)
        else:
            link_channel.channel.add_put(program, grid.mirrored())
        return self.launch(program, direction, link_channel, entry, remote, seconds, stream)

    def launch(
        self,
        program: Program,
        direction: str,
        link_channel: LinkChannel,
        entry: Entry,
        remote: RemoteCache,
        seconds: float,
        stream: str,
    ) -> StreamTransfer:
        """Start a program on one of the link's streams: both caches are leased until the device let go."""
        if stream not in self._streams:
            self._streams[stream] = self._device.open_stream(f"link to {self.cluster_id}, {stream}")
        transfer = self._streams[stream].submit(program, seconds)
        entry.lease()
        remote.use()
        link_channel.uses += 1
        self._transfers[transfer] = remote
        self.counters.started()

        def ended(done: StreamTransfer) -> None:
            self._settle(done, entry)
            del self._transfers[transfer]
            remote.release()
            self.channels.release(link_channel)
            if done.state is TransferState.DONE and done.queue_seconds < ALONE:
                self.estimate.add(done.nbytes, done.transfer_seconds)
            self.counters.ended("served" if stream == "served" else _DONE[direction], done)
            self.check_idle()

        transfer.add_done_callback(ended)
        return transfer

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
                transfer.replace_outcome(
                    CacheNotFound(f"cluster {self.cluster_id} took its cache back", peer=self.cluster_id)
                )
        suspect = transfer.error is not None and transfer.error.status_code is LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR
        if self.failure is not None and (suspect or transfer.state is TransferState.CANCELLED):
            transfer.replace_outcome(self.copy_of_failure())
        elif suspect and transfer.error is not None:
            died = f"cluster {self.cluster_id}: the peer's process is gone, or gave up its memory: {transfer.error.args[0]}"
            self.break_off(PeerLost(died))
            transfer.replace_outcome(PeerLost(died, peer=self.cluster_id))
        elif transfer.error is not None:
            transfer.error.peer = self.cluster_id

    def lose(self, entry: Entry) -> None:
        """Nobody knows when bytes stop to land in it: it is never used again."""
        entry.poison()
        for region in entry.regions():
            self._device.mark_stuck(region.address, region.nbytes)

    def copy_of_failure(self) -> LinkError:
        failure = self.failure or LinkClosed(f"the link to cluster {self.cluster_id} was closed")
        return type(failure)(*failure.args, peer=self.cluster_id)

    @property
    def _is_idle(self) -> bool:
        """Nothing is under way, apart from what only the end of the channel can end."""
        return not self._transfers and self.requester.is_idle

    def check_idle(self) -> None:
        if self._is_idle:
            self._idle.set()
            self._idle = Event()

    # ---- words ----

    async def ping(self, seconds: float) -> None:
        """Raises LinkTimeout: no answer in time; or what ended the link."""
        with anyio.move_on_after(seconds) as limit:
            await self.while_it_lasts(lambda: self.calls.ask(lambda call: Ping(call=call), Pong))
        if limit.cancelled_caught:
            raise LinkTimeout(f"cluster {self.cluster_id} did not answer within {seconds:g} s", peer=self.cluster_id)

    async def while_it_lasts(self, work: Callable[[], Awaitable[T]]) -> T:
        """What the work gives. Raises NotLinked, or what ended the link, if that comes first."""
        self.check_ready()
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                result = await work()
            finally:
                self._waiting.discard(scope)
            if self.failure is None:  # else it ended in the tick in which the work did
                return result
        raise self.copy_of_failure()

    async def notify(self, payload: bytes) -> None:
        """Behind everything that was asked for before. If cancelled, it is sent or not."""
        self.check_ready()
        pending = self.notification_queue.reserve(payload)
        pending.ready()
        try:
            await self._or_the_end(pending.sent)
        finally:
            if not pending.sent.is_set():
                pending.drop()

    async def _or_the_end(self, event: Event) -> None:
        """Until it is set. Raises what ended the link."""
        async with anyio.create_task_group() as group:

            async def end() -> None:
                await self._closed.wait()
                group.cancel_scope.cancel()

            group.start_soon(end)
            await event.wait()
            group.cancel_scope.cancel()
        if not event.is_set():
            raise self.copy_of_failure()

    def revoke(self, entry: Entry) -> Event:
        """Take a cache back that the peer was told of; the event is set when it gave it back."""
        return self.peer_leases.revoke(entry)

    def turn(self) -> AbstractContextManager[None]:
        """Around what the peer asked us to write. Raises LLMException: not now."""
        return self._host.turn(self.cluster_id)

    def post(self, message: Message) -> None:
        self._wire.post(message)

    # ---- what the peer says ----

    def _reactions(self) -> dict[type, Callable[[Any], object]]:
        """What to do, without waiting, about each message of a ready link."""
        return {
            Lookup: self._service.find,
            Found: self._on_answer,
            Pulled: self._on_answer,
            Pong: self._on_answer,
            Grant: lambda message: self._hold(message.cache),
            Revoke: self._on_revoke,
            Revoked: lambda message: self.peer_leases.on_revoked(message.cache_id),
            Pull: lambda message: self.spawn(self._service.begin(message)),
            Stop: lambda message: self._service.stop(message.call),
            Note: self._on_note,
            Watch: lambda message: self.layer_events.on_watch(message.cache_id, message.on),
            Landed: self.layer_events.on_landed,
            Taken: lambda _: self.notification_queue.taken(),
            Ping: lambda message: self._wire.post(Pong(call=message.call)),
            Renew: self.channels.on_renew,
            Renewed: self.channels.on_renewed,
            Retire: self.channels.on_retire,
            Outdated: self.channels.on_outdated,
        }

    def _on_answer(self, message: Found | Pulled | Pong) -> None:
        """Learnt at once, in the order in which the peer speaks: it may take the cache back in its next message."""
        call = self.calls.find(message)
        if isinstance(message, Found) and message.cache is not None:
            self._hold(message.cache, call.name if call is not None else None, message.slot)
        if call is not None:
            call.answer = message
            call.answered.set()

    def _hold(self, cache: CacheEntry, name: Name | None = None, slot: int = 0) -> None:
        if len(self.catalogue) >= MAX_HELD:
            raise ProtocolError(f"the peer told us of more than {MAX_HELD} caches")
        self.catalogue.learn(cache, name, slot)

    def _on_revoke(self, message: Revoke) -> None:
        """The peer takes a cache back: say so when no transfer of ours touches it."""
        remote = self.catalogue.withdraw(message.cache_id)

        async def answer() -> None:
            if remote is not None:
                with anyio.move_on_after(message.seconds):
                    await remote.wait_idle()
                for transfer in [t for t, used in self._transfers.items() if used is remote]:
                    self._taken_back.add(transfer)
                    transfer.cancel()
                await remote.wait_idle()
            self._wire.post(Revoked(cache_id=message.cache_id))

        self.spawn(answer)

    def _on_note(self, message: Note) -> None:
        self._untaken += 1
        if self._untaken > 64:
            raise ProtocolError("the peer sends notifications faster than they are taken")

        def taken() -> None:
            self._untaken -= 1
            if self.is_open:
                self._wire.post(Taken())

        self._host.heard(self, decode(message), taken)

    # ---- until it ends ----

    async def serve(self) -> None:
        """Until the link is over: listen to the peer and, when asked to, part from it. Then give everything back."""
        try:
            async with anyio.create_task_group() as group:
                self._tasks = Spawner(group)
                group.start_soon(self._part)
                group.start_soon(self._pump)
                group.start_soon(self._watch, group.cancel_scope)
                try:
                    await self._listen()
                finally:
                    self.calls.end()
                group.cancel_scope.cancel()
        finally:
            self._tasks = None
            await self._give_back()

    async def _watch(self, scope: anyio.CancelScope) -> None:
        await self._broken.wait()
        scope.cancel()

    async def _pump(self) -> None:
        try:
            await self._wire.pump()
        except PeerLost as error:
            self.lost(str(error.args[0]))

    async def _listen(self) -> None:
        try:
            await self._hear()
        except LinkError as error:
            if self.state is LinkState.READY:
                self._end(type(error)(f"cluster {self.cluster_id}: {error.args[0]}"), LinkState.BROKEN)
                self._stop()
            elif self.state is LinkState.CLOSING:
                self._vanished = True

    async def _hear(self) -> None:
        """Until one end has had the last word."""
        reactions = self._reactions()
        while True:
            message = await self._wire.receive()
            self._has_said_so |= isinstance(message, (Bye, Disconnect))
            if isinstance(message, Bye) and self.state is LinkState.CLOSING:
                return
            if isinstance(message, Disconnect) and self.is_open:
                self._end(LinkClosed(f"cluster {self.cluster_id} unlinked: {message.reason}"), LinkState.CLOSING)
                self.spawn(self._say_bye)
            elif (react := reactions.get(type(message))) is not None:
                react(message)
            else:
                raise ProtocolError(f"cluster {self.cluster_id} said {message.type!r} on a {self.state.value} link")
            if self._wire.is_congested:
                await self._wire.flush()
            await give_way()  # many messages come in one piece

    async def _say_bye(self) -> None:
        """The peer leaves: it hears on while our transfers end."""
        await self._drain(DRAIN_TIMEOUT)
        self._wire.post(Bye())
        with anyio.move_on_after(DRAIN_TIMEOUT):
            await self._wire.flush()
        self._broken.set()

    async def _part(self) -> None:
        """When asked to: drain, and tell the peer. In the link's own task, so that no caller can be cancelled half-way."""
        await self._leaving.wait()
        await self._drain(self._patience)
        self._wire.post(Disconnect(reason=self._reason))

    def _end(self, failure: LinkError, state: LinkState) -> None:
        """Decide that it is over, and why: no new transfer starts."""
        if self.failure is None:
            self.failure = failure
            self.layer_events.stop_sending(self.copy_of_failure())
            for scope in self._waiting:
                scope.cancel()
            level = logging.WARNING if state is LinkState.BROKEN else logging.INFO
            logger.log(level, "link to cluster %d: %s", self.cluster_id, failure)
        self.state = state

    def lost(self, why: str) -> None:
        """The peer is dead, or might as well be."""
        self.break_off(PeerLost(f"cluster {self.cluster_id}: {why}"))

    def _give_up(self, why: str) -> None:
        self.break_off(LinkError(f"cluster {self.cluster_id} {why}"))

    def break_off(self, failure: LinkError) -> None:
        """Nothing can be trusted on it from here on: the link ends itself."""
        if self.is_open:
            self._vanished = self.state is LinkState.CLOSING
            self._end(failure, LinkState.BROKEN)
            self._stop()
            self._broken.set()

    def _stop(self) -> None:
        """Ask what is under way to stop; it ends with ``failure``."""
        for transfer in list(self._transfers):
            transfer.cancel()
        self.requester.cancel()

    async def _drain(self, seconds: float) -> None:
        """Let what is under way finish; stop what takes longer."""
        with anyio.move_on_after(seconds):
            while not self._is_idle:
                await self._idle.wait()
            await self.notification_queue.wait_empty()
        self._stop()
        while not self._is_idle:  # bounded: they answer a cancellation within their grace
            await self._idle.wait()

    async def disconnect(self, reason: str, timeout: float) -> None:
        """End it in good order: no new transfers, those under way end, the peer agrees.

        If cancelled, the link is ended all the same.

        Raises:
            LinkTimeout: the peer did not answer in time; the link stays half closed until it does, or is abandoned.
            PeerLost: the peer was gone already. Our half is ended.
        """
        if self.state is LinkState.READY:
            self._end(LinkClosed(f"the link to cluster {self.cluster_id} was unlinked: {reason}"), LinkState.CLOSING)
            self._reason, self._patience = reason, timeout
            self._leaving.set()
        with anyio.move_on_after(timeout) as limit:
            await self._closed.wait()
        if limit.cancelled_caught:
            raise LinkTimeout(f"cluster {self.cluster_id} did not answer within {timeout:.3f} s", peer=self.cluster_id)
        if self._vanished and not self._has_said_so:
            raise PeerLost(f"cluster {self.cluster_id} went away without a word", peer=self.cluster_id)

    async def abandon(self, failure: LinkError) -> None:
        """End this half at once, without telling anybody."""
        if self.failure is None:
            self._end(failure, LinkState.CLOSED)
        self._stop()
        await self._wire.aclose()
        self._broken.set()
        await self._closed.wait()

    async def _give_back(self) -> None:
        """Streams, channels, connection, in this order; each in bounded time. Runs once, also when cancelled."""
        if self.failure is None:
            self._end(LinkClosed(f"the link to cluster {self.cluster_id} was closed"), LinkState.CLOSED)
        elif self.state is LinkState.CLOSING:
            self.state = LinkState.CLOSED
        self._stop()
        try:
            with anyio.move_on_after(DRAIN_TIMEOUT + 3 * self.grace, shield=True):
                is_quiet = [await self._quietly(stream) for stream in self._streams.values()]
                if all(is_quiet):  # else the device may still use a channel
                    self.is_shut = await self._shut()
            with anyio.move_on_after(1, shield=True):
                await self._quietly(self._wire)
        finally:
            self.requester.end(self.copy_of_failure())
            self._end_peer_leases()
            self.layer_events.end(self.copy_of_failure())
            self._closed.set()

    async def _shut(self) -> bool:
        """Close the channels; False when it is not known what the peer can reach."""
        try:
            await self.channels.aclose()
        except StillWritten as error:
            logger.warning("link to cluster %d: what it held is withheld until it lets go: %s", self.cluster_id, error)
            self._is_written = True
            return True
        except LLMException as error:
            logger.warning("link to cluster %d: %s", self.cluster_id, error)
            return False
        except Exception:  # out of threads, for instance
            logger.exception("link to cluster %d: a channel could not be closed", self.cluster_id)
            return False
        return True

    def _end_peer_leases(self) -> None:
        """What the peer held is free, withheld while it may be writing there, or lost."""
        written: list[Entry] = []
        if self._is_written:
            self.peer_leases.end(written.append)
            self._host.registry.withhold(written, self, self.channels)
        else:
            self.peer_leases.end(None if self.is_shut else self.lose)

    async def _quietly(self, part: Any) -> bool:
        """Close a part; False when it may still be in use."""
        try:
            await part.aclose()
        except LLMException as error:
            level = logging.ERROR if isinstance(error, StuckError) else logging.WARNING
            logger.log(level, "link to cluster %d: %s", self.cluster_id, error)
            return False
        except Exception:  # out of threads, for instance
            logger.exception("link to cluster %d: a part of it could not be closed", self.cluster_id)
            return False
        return True

    async def discard(self) -> None:
        """Give back a link that never became ready."""
        if self.failure is None:
            self.failure = LinkClosed("the link was never made")
        self.state = LinkState.CLOSED
        await self._give_back()

    async def wait_closed(self) -> LinkError:
        """Until everything was given back; why it ended."""
        await self._closed.wait()
        return self.failure or LinkClosed(f"the link to cluster {self.cluster_id} was closed")

    def __repr__(self) -> str:
        busy = len(self._transfers) + len(self.requester)
        return f"<Link to cluster {self.cluster_id} {self.state.value} {busy} transfers>"
