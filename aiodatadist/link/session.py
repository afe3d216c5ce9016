"""What all parts of a link share: who the peer is, what it was told and told us, what is under way, and why it ended."""

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
from aiodatadist.link.channels import Channels, channel_name
from aiodatadist.link.cost_model import Estimate
from aiodatadist.link.layer_events import LayerEvents
from aiodatadist.link.leases import PeerLeases
from aiodatadist.link.lifecycle import AWAIT_LINK, Cause, Event, Lifecycle, LinkState
from aiodatadist.link.notifications import NotificationQueue
from aiodatadist.link.questions import PendingQuestions
from aiodatadist.link.remote_operation import RemoteOperation
from aiodatadist.link.running import RunningTransfers
from aiodatadist.link.state import LinkHost
from aiodatadist.link.statistics import LinkCounters
from aiodatadist.link.wire import Wire
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
    """One peer, as the requester, the responder and layered transfers see it. ``Link`` adds how it begins, goes on and ends.

    Attributes:
        cluster_id: the peer's; known once the link is ready.
        instance, heartbeat: the peer's, from its hello.
        life: the state of the link, and why it ended. Only events change it.
        running: transfers on the link's streams.
        operations: transfers for which the peer is asked, until they end.
    """

    def __init__(self, wire: Wire, device: Device, transport: Transport, host: LinkHost) -> None:
        self._wire = wire
        self._device = device
        self._host = host
        self._tasks: Spawner | None = None
        self._to_start: list[Callable[[], Coroutine[Any, Any, None]]] = []  # when it is served
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

    def close_broken(self) -> None:
        """Close broken channels now that the link ends: its tasks wait for transfers that end with such a channel."""
        self.life.on(Event.STOP_LISTENING)
        self.channels.close_broken()

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

    def give_up(self, why: str) -> None:
        """Break the link off for a reason that is about the peer."""
        self.break_off(LinkError(f"cluster {self.cluster_id} {why}"))

    def break_off(self, failure: LinkError, cause: Cause | None = None) -> None:
        """End the link at once: nothing on it can be trusted from here on."""
        if self.life.is_open:
            self._end(Event.BREAK, failure, cause)
            self.running.stop()
            self._end_serving()

    def _end_serving(self) -> None:
        """Stop to listen to the peer, and end the tasks of the link. May be called by any task on the loop."""
        self.life.on(Event.STOP)
        if self._scope is not None:
            self._scope.cancel()
