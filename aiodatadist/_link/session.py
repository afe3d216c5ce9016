"""The session: one peer, the conversation with it, and the failure that ends both. All parts of a link share it."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.abc

from aiodatadist._cache.catalogue import Catalogue
from aiodatadist._cache.reach import PeerReach
from aiodatadist._concurrency.signal import Signal
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._counting import Incident, Incidents, Totals
from aiodatadist._link.control.layer_events import LayerEvents, LayerReceiver
from aiodatadist._link.control.loans import Loans
from aiodatadist._link.control.notifications import NotificationQueue
from aiodatadist._link.control.peer_leases import PeerLeases
from aiodatadist._link.control.peer_share import PeerShare
from aiodatadist._link.control.questions import PendingQuestions
from aiodatadist._link.control.wire import Wire
from aiodatadist._link.data.channels import Channels, channel_name
from aiodatadist._link.host import LinkHost
from aiodatadist._link.lifecycle import AWAIT_LINK, Cause, Event, Lifecycle, LinkState, Service
from aiodatadist._transport import Access
from aiodatadist._values.digests import UNSAID, LeaseDigests
from aiodatadist._values.peer_rights import PeerRights, RightName
from aiodatadist._wire.messages import Hello, Message, Ping, Pong, Unclaim
from aiodatadist.errors import (
    FeatureNotEnabled,
    LinkClosed,
    LinkError,
    LinkTimeout,
    LLMException,
    NotLinked,
    ParamInvalid,
    PeerLost,
)

if TYPE_CHECKING:
    from aiodatadist._cache.table import Entry
    from aiodatadist._transport import Transport

logger = logging.getLogger(__name__)

_ACCESS = ((Access.NONE, Access.WRITE), (Access.READ, Access.ALL))
"""The rights of a peer to a cache, by "may read" and "may write", made once: a union of flags takes longer."""

TELL_SECONDS = 1.0
"""Seconds from the end of a data connection to the end of its link, if the peer does not part, or is found dead, before."""

T = TypeVar("T")


class Session:
    """The conversation with one peer, from the handshake to the failure that ends it.

    It knows nothing of transfers. Whatever must stop when the link breaks registers with :meth:`call_when_broken`.

    Attributes:
        host: the cluster that the link belongs to.
        wire: carries the messages.
        post: sends a message soon, without waiting.
        cluster_id: the peer's cluster id; known once the link is ready.
        instance: the peer's instance, from its hello.
        heartbeat: the peer's heartbeat interval, from its hello.
        life: the state of the link, and why it ended. Only events change it.
        rights: what the peer may do; nothing until it is proved.
        closed: set once all resources of the link have been released.
        totals: the totals of this end, over all its links.
        incidents: the incidents of this end, over all its links.
        share: what the peer uses, over all its links.
        questions: the questions that the peer has not answered.
        catalogue: the peer's caches that this end knows.
        channels: the channels of the link.
        peer_leases: this end's caches that the peer knows.
        notification_queue: the notifications on their way to the peer.
        layer_events: the layers that either end watches.
    """

    def __init__(self, wire: Wire, transport: Transport, host: LinkHost) -> None:
        self.host = host
        self.wire = wire
        self.post: Callable[[Message], None] = wire.post
        repeated = LinkError("a message that had come before was ignored")
        wire.on_repeated = lambda: self.report(Incident.FRAME_REPEATED, repeated)
        self.totals: Totals = host.totals
        self.incidents: Incidents = host.totals.incidents
        self._tasks: Spawner | None = None
        self._scope: anyio.CancelScope | None = None
        self._to_start: list[Callable[[], Coroutine[Any, Any, None]]] = []  # once the link is served
        self._to_stop: list[Callable[[], object]] = []
        self._waiting: set[anyio.CancelScope] = set()
        self._names = (0, 0)
        self.cluster_id: int = 0
        self.instance: str = ""
        self.heartbeat: float = 0.0
        self.rights: PeerRights = PeerRights()
        self.life: Lifecycle = Lifecycle()
        self.closed: Signal = Signal()
        self.questions: PendingQuestions = PendingQuestions(wire.post, self.post_again)
        quotas = host.peer_shares.quotas
        self.share: PeerShare = host.peer_shares.unknown()  # until meet()
        self.catalogue: Catalogue = Catalogue(quotas.caches, quotas.tensors)
        self.channels: Channels = Channels(
            transport,
            wire.post,
            self.questions,
            self.spawn,
            lambda: channel_name(*self._names),
            self.incidents,
            quotas.channels,
        )
        self.channels.losses.on_loss = lambda why: self.spawn(partial(_lost_unless_told, self, why))
        self.peer_leases: PeerLeases = PeerLeases(
            self, host.timeout, wire.post, self.spawn, self.give_up, self.post_again
        )
        # In request/response mode the peer writes what this end pulls, and reads nothing by itself.
        most = Access.ALL if host.one_sided else Access.WRITE
        self.channels.begin_lending = lambda channel: self.peer_leases.lend_by(
            Loans(channel, lambda entry: self.access_to(entry) & most)
        )
        self.notification_queue: NotificationQueue = NotificationQueue(wire.post, self._knows_numbers, self.post_again)
        self.layer_events: LayerEvents = LayerEvents(
            wire.post, host.check_here, self.questions, self._knows_numbers, self.post_again
        )

    def meet(self, me: int, peer: Hello, rights: PeerRights) -> None:
        """Note who the peer is, as its proved hello says, and what it may do. Channels are opened afterwards."""
        self.rights = rights
        self.cluster_id, self.instance, self.heartbeat = peer.cluster_id, peer.instance, peer.heartbeat
        self.channels.shows = lambda: PeerReach(
            self.host.registry.table.entries(), self.cluster_id, rights, self.host.one_sided
        )
        self._names = me, peer.cluster_id
        self.share = self.host.peer_shares.of(peer.cluster_id)
        self.wire.limit(self.share.inflow)

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
    def peer_minor(self) -> int:
        """The peer's minor version of the protocol. Nothing newer is sent to it."""
        return self.wire.peer_minor

    def _knows_numbers(self) -> bool:
        """Return True if the peer's version numbers notifications and revocations, so that this end may do so, too."""
        return self.peer_minor >= 1

    def may_use(self, entry: Entry) -> tuple[bool, bool]:
        """Return whether the peer may read a cache of this end, and whether it may write into it.

        A peer reads by itself, or in request/response mode by asking for it. Then private memory is not opened for it.
        """
        rights = self.rights
        reads, writes = entry.audience.lets(self.cluster_id)
        # What a channel lends opens no other memory.
        is_open = rights.private or not entry.is_private or self.channels.traits.needs_loans
        can_ask = is_open or not self.host.one_sided
        return rights.read and can_ask and reads, rights.write and is_open and writes

    def check_writer(self, entry: Entry, why: str) -> None:
        """Raise ParamInvalid if the peer may not write into a cache of this end. ``why`` says why it must."""
        _, may_write = self.may_use(entry)
        if not may_write:
            raise ParamInvalid(
                f"cluster {self.cluster_id} may not write into cache {entry.cache_id}: {why}",
                hint="policy.json here, or the cache's writers, must allow it",
            )

    def may_be_critical(self) -> bool:
        """Return True if the peer may make critical requests. If not, count and log that it made one."""
        if not self.rights.critical:
            self.lacks_right("critical", "its request is served as a normal one")
        return self.rights.critical

    def access_to(self, entry: Entry) -> Access:
        """Return what the peer may do with a cache of this end."""
        reads, writes = self.may_use(entry)
        return _ACCESS[reads][writes]

    def lacks_right(self, right: RightName, what: str) -> None:
        """Count, and log, that the peer asked for something without the right to it."""
        told = "cluster %d has no right to %s: %s", self.cluster_id, right, what
        self.incidents.add(Incident.RIGHT_MISSING, logger, *told)

    # ---- words ----

    def post_again(self, message: Message) -> None:
        """Repeat a message that was not answered."""
        self.totals.messages_repeated += 1
        self.post(message)

    def post_if_open(self, message: Message) -> None:
        """Send a message soon, unless the peer no longer hears this end."""
        if self.life.is_open:
            self.post(message)

    async def ping(self, seconds: float = math.inf) -> None:
        """Wait until the peer has received everything that was sent before.

        Raises LinkTimeout if there is no answer in time, or what ended the link.
        """

        async def ask() -> None:
            with suppress(FeatureNotEnabled):  # an answer, too: the peer says that it does not know the question
                await self.questions.ask(lambda call: Ping(call=call), Pong)

        with anyio.move_on_after(seconds) as limit:
            await self.while_it_lasts(ask)
        if limit.cancelled_caught:
            raise LinkTimeout(f"cluster {self.cluster_id} did not answer within {seconds:g} s", peer=self.cluster_id)

    async def announce(self, receiver: LayerReceiver) -> None:
        """Wait until the peer knows that the receiver's layers are watched. Raises what ended the link."""
        await self.while_it_lasts(lambda: self.layer_events.announce(receiver))

    async def notify(self, payload: bytes) -> None:
        """Send a notification behind all earlier ones, and wait until it is sent. If cancelled, it may be sent or not."""
        self.check_ready()
        pending = self.notification_queue.reserve(payload)
        pending.ready()
        try:
            await self._or_the_end(pending.sent)
        finally:
            if not pending.sent.is_set():
                pending.drop()  # later ones would wait for it

    async def _or_the_end(self, event: Signal) -> None:
        """Wait until the event is set. Raises what ended the link, if that comes first."""
        async with anyio.create_task_group() as group:

            async def end() -> None:
                await self.closed.wait()
                group.cancel_scope.cancel()

            group.start_soon(end)
            await event.wait()
            group.cancel_scope.cancel()
        if not event.is_set():
            raise self.copy_of_failure()

    def release_lease(self, lease: str, digests: LeaseDigests = UNSAID) -> None:
        """Tell the peer that this end does not want the blocks of a lease."""
        blocks, prompt = digests
        self.post(Unclaim(call=0, lease=lease, end="released", blocks_digest=blocks, prompt_digest=prompt))

    def revoke(self, entry: Entry) -> Signal:
        """Ask the peer to release a cache that it was told of. The event is set when that is done, or when the link ends."""
        return self.peer_leases.revoke(entry)

    # ---- tasks ----

    def spawn(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task that ends with the link. If the link is not served yet, the task starts when it is."""
        if self._tasks is not None:
            self._tasks.start_soon(call)
        elif self.life.is_listening:
            self._to_start.append(call)

    def start_tasks(self, group: anyio.abc.TaskGroup) -> None:
        """Run the tasks of the link in a group from now on, first those that were to start before."""
        self._tasks, self._scope = Spawner(group), group.cancel_scope
        while self._to_start:
            group.start_soon(self._to_start.pop(0))
        # told to end before it had a group
        if self.life.service is Service.STOPPED:
            group.cancel_scope.cancel()

    def stop_tasks(self) -> None:
        """Stop listening to the peer, and end the tasks of the link. Any task on the loop may call this."""
        self.life.on(Event.STOP)
        if self._scope is not None:
            self._scope.cancel()

    def stop_listening(self) -> None:
        """Note that the peer is no longer listened to.

        Questions get no answer from now on. Broken channels are closed, because the tasks of the link wait for transfers
        that end with such a channel.
        """
        self.questions.end()
        self.life.on(Event.STOP_LISTENING)
        self.channels.close_broken()

    def end_tasks(self) -> None:
        """Note that the group has ended: no task of the link runs any longer, and none starts."""
        self._tasks = None

    # ---- until it ends ----

    def check_ready(self) -> None:
        """Raise NotLinked or what ended the link, unless transfers may start."""
        life = self.life
        if life.state is LinkState.READY:
            return
        if life.failure is not None:
            failure = self.copy_of_failure()
            failure.hint = AWAIT_LINK if failure.retryable else "link again"
            raise failure
        raise NotLinked(f"the link to cluster {self.cluster_id} is {life.state.value}", peer=self.cluster_id)

    async def while_it_lasts(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Await an operation and return its result. Raises NotLinked, or what ended the link, if that comes first."""
        self.check_ready()
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                result = await operation()
            finally:
                self._waiting.discard(scope)
            if self.life.failure is None:  # otherwise the link ended in the tick in which the operation did
                return result
        raise self.copy_of_failure()

    def copy_of_failure(self) -> LinkError:
        """Return a copy of what ended the link, for one caller. It is retryable if the link is being re-established."""
        # a copy for each: an exception that is raised twice collects the tracebacks of both
        failure = self.life.failure or LinkClosed(f"the link to cluster {self.cluster_id} was closed")
        copied = type(failure)(*failure.args, peer=self.cluster_id, hint=failure.hint)
        copied.retryable = self.life.is_retryable
        return copied

    def call_when_broken(self, call: Callable[[], object]) -> None:
        """Call ``call`` when the link breaks, before its tasks are told to end. ``call`` must not raise."""
        self._to_stop.append(call)

    def end(self, event: Event, failure: LinkError, cause: Cause | None = None) -> None:
        """Tell the life of the link about an event that ends it. No transfer starts from here on."""
        if self.life.on(event, failure, cause):
            self.layer_events.stop_sending(self.copy_of_failure())
            # what they wait for is an answer of the peer, which cannot come
            for scope in self._waiting:
                scope.cancel()
            is_lost = self.life.state is LinkState.BROKEN
            kind, level = (Incident.LINK_LOST, logging.WARNING) if is_lost else (Incident.LINK_ENDED, logging.INFO)
            self.report(kind, failure, level)

    def report(self, kind: Incident, error: LLMException, level: int = logging.WARNING) -> None:
        """Log an error of the link, in a line that names its cluster once."""
        words = str(error)
        for name in (f"cluster {self.cluster_id}: ", f"link to {self.cluster_id}, "):
            words = words.removeprefix(name)
        self.incidents.add(kind, logger, "link to cluster %d: %s", self.cluster_id, words, level=level)

    def lost(self, why: str, cause: Cause | None = None) -> None:
        """End the link at once: the peer is dead, or cannot be distinguished from a dead one."""
        self.break_off(PeerLost(f"cluster {self.cluster_id}: {why}"), cause)

    def give_up(self, why: str) -> None:
        """End the link at once, because of something that the peer did or failed to do."""
        self.break_off(LinkError(f"cluster {self.cluster_id} {why}"))

    def break_off(self, failure: LinkError, cause: Cause | None = None) -> None:
        """End the link at once: nothing on it can be trusted from here on."""
        if self.life.is_open:
            self.end(Event.BREAK, failure, cause)
            for stop in self._to_stop:
                stop()
            self.stop_tasks()

    def __repr__(self) -> str:
        return f"<Link to cluster {self.cluster_id} {self.life.state.value}>"


async def _lost_unless_told(session: Session, why: str) -> None:
    """End a link because a data connection ended, unless the peer says that it parts, or is found dead, before.

    The connections of a peer that parts, or dies, end in any order. Its last word comes on the link's own.
    """
    with anyio.move_on_after(TELL_SECONDS):
        await session.closed.wait()
    session.lost(why, Cause.DATA_CONNECTION_LOST)
