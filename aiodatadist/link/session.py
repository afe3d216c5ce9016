"""The session: what all parts of a link share, such as the peer, the conversation, the transfers and the failure."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from aiodatadist.cache.catalogue import Catalogue
from aiodatadist.concurrency.signal import Signal
from aiodatadist.concurrency.spawner import Spawner
from aiodatadist.counting import Incident
from aiodatadist.errors import (
    LinkClosed,
    LinkError,
    NotLinked,
    PeerLost,
)
from aiodatadist.link.control.layer_events import LayerEvents
from aiodatadist.link.control.notifications import NotificationQueue
from aiodatadist.link.control.peer_leases import PeerLeases
from aiodatadist.link.control.questions import PendingQuestions
from aiodatadist.link.control.wire import Wire
from aiodatadist.link.data.channels import Channels, channel_name
from aiodatadist.link.data.cost_model import Estimate
from aiodatadist.link.data.remote_operation import RemoteOperation
from aiodatadist.link.data.statistics import LinkCounters
from aiodatadist.link.host import LinkHost
from aiodatadist.link.lifecycle import AWAIT_LINK, Cause, Event, Lifecycle, LinkState
from aiodatadist.link.transfers.running import RunningTransfers
from aiodatadist.wire.messages import Message

if TYPE_CHECKING:
    from aiodatadist.cache.digester import Digester
    from aiodatadist.cache.registry import CacheRegistry
    from aiodatadist.cache.table import Entry
    from aiodatadist.counting import Incidents, Totals
    from aiodatadist.device import Device
    from aiodatadist.transport import Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Session:
    """A link, as the requester, the responder and layered transfers see it. ``Link`` adds its life.

    Attributes:
        cluster_id: the peer's cluster id; known once the link is ready.
        instance: the peer's instance, from its hello.
        heartbeat: the peer's heartbeat interval, from its hello.
        life: the state of the link, and why it ended. Only events change it.
        running: the transfers on the link's streams.
        operations: the transfers for which the peer is asked, until they end.
        questions: the questions that the peer has not answered.
        catalogue: the peer's caches that this end knows.
        channels: the channels of the link.
        peer_leases: this end's caches that the peer knows.
        notification_queue: the notifications on their way to the peer.
        layer_events: the layers that either end watches.
        counters: what the link has done.
        estimate: the measured costs of the link.
    """

    def __init__(self, wire: Wire, device: Device, transport: Transport, host: LinkHost) -> None:
        self._wire = wire
        self._device = device
        self._host = host
        self._tasks: Spawner | None = None
        self._to_start: list[Callable[[], Coroutine[Any, Any, None]]] = []  # once the link is served
        self._waiting: set[anyio.CancelScope] = set()
        self._scope: anyio.CancelScope | None = None
        self._names = (0, 0)
        self.cluster_id = 0
        self.instance = ""
        self.heartbeat = 0.0
        self.life = Lifecycle()
        self.operations: set[RemoteOperation] = set()
        self.running = RunningTransfers(self, device, host.totals)
        self.questions = PendingQuestions(wire.post, self.post_again)
        self.catalogue = Catalogue()
        self.channels = Channels(
            transport,
            wire.post,
            self.questions,
            self.spawn,
            self._channel_name,
            self.running.on_out_of_use,
            host.totals.incidents,
        )
        self.peer_leases = PeerLeases(self, host.timeout, wire.post, self.spawn, self.give_up, self.post_again)
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
        """The most seconds that the device takes to let go after a cancellation."""
        return self._device.limits.quiesce

    def _channel_name(self) -> str:
        return channel_name(*self._names)

    def post(self, message: Message) -> None:
        """Send a message soon, without waiting."""
        self._wire.post(message)

    def posting_together(self) -> AbstractContextManager[None]:
        """Return a context. What is posted within it is sent together, at its end."""
        return self._wire.together()

    def post_again(self, message: Message) -> None:
        """Repeat a message that was not answered."""
        self._host.totals.messages_repeated += 1
        self._wire.post(message)

    def spawn(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task that ends with the link. If the link is not served yet, the task starts when it is."""
        if self._tasks is not None:
            self._tasks.start_soon(call)
        elif self.life.is_listening:
            self._to_start.append(call)

    def serving_a_request(self) -> AbstractContextManager[None] | None:
        """Return a context to enter around the answer to a request of the peer, or None.

        Entering it raises LLMException if something else is under way.
        """
        return self._host.serving_a_request(self.cluster_id)

    @property
    def registry(self) -> CacheRegistry:
        """The caches of this end."""
        return self._host.registry

    @property
    def digester(self) -> Digester:
        """The digester, which computes checksums of the caches of this end."""
        return self._host.digester

    def quiet_seconds(self) -> float | None:
        """Return how many seconds ago bytes of the peer came on the link's own connection; None if that is not known."""
        return self._wire.quiet_seconds()

    @property
    def peer_minor(self) -> int:
        """The peer's minor version of the protocol. Nothing newer is sent to it."""
        return self._wire.peer_minor

    def _knows_numbers(self) -> bool:
        """Return True if the peer's version numbers notifications and revocations, so that this end may do so, too."""
        return self.peer_minor >= 1

    @property
    def check_here(self) -> Callable[[], None]:
        """A function that raises LLMException if its caller is not on the cluster's event loop.

        In a forked child it raises ForkError.
        """
        return self._host.check_here

    @property
    def totals(self) -> Totals:
        """The totals of this end, over all its links."""
        return self._host.totals

    @property
    def incidents(self) -> Incidents:
        """The incidents of this end, over all its links."""
        return self._host.totals.incidents

    def revoke(self, entry: Entry) -> Signal:
        """Ask the peer to release a cache that it was told of. The event is set when that is done, or when the link ends."""
        return self.peer_leases.revoke(entry)

    # ---- transfers ----

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

    def close_broken(self) -> None:
        """Close broken channels now that the link ends: its tasks wait for transfers that end with such a channel."""
        self.life.on(Event.STOP_LISTENING)
        self.channels.close_broken()

    # ---- until it ends ----

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
        """Return a copy of what ended the link, for one caller. It is retryable if the link is made again."""
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
        """End the link at once: the peer is dead, or cannot be told from a dead one."""
        self.break_off(PeerLost(f"cluster {self.cluster_id}: {why}"), cause)

    def give_up(self, why: str) -> None:
        """End the link at once, because of something that the peer did or failed to do."""
        self.break_off(LinkError(f"cluster {self.cluster_id} {why}"))

    def break_off(self, failure: LinkError, cause: Cause | None = None) -> None:
        """End the link at once: nothing on it can be trusted from here on."""
        if self.life.is_open:
            self._end(Event.BREAK, failure, cause)
            self.running.stop()
            self._end_serving()

    def _end_serving(self) -> None:
        """Stop listening to the peer, and end the tasks of the link. Any task on the loop may call this."""
        self.life.on(Event.STOP)
        if self._scope is not None:
            self._scope.cancel()
