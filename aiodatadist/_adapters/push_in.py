"""The decode end of pushed requests: tells peers where blocks belong, and waits until they have landed.

A request that is cancelled or late is reported once the prefill engine has said that no more bytes land; if it does not
say so, its link is ended. Once the link has ended, in whatever way, the request is reported when the memory is usable:
a prefill engine that was stopped while it wrote must continue or end first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from aiodatadist._adapters.ended import Ended, Tell
from aiodatadist._adapters.peer_links import LinkedPeer, PeerAddress, PeerLinks
from aiodatadist._adapters.push_messages import Drop, PushMessage, Refused, Sent, TransferKey, Want
from aiodatadist._adapters.regions import WORKERS
from aiodatadist._concurrency.scope import Scope
from aiodatadist._concurrency.signal import Signal
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._counting import Incident, Incidents
from aiodatadist._values.foreign import printable
from aiodatadist.errors import LLMException, ParamInvalid, TransferError, TransferTimeout

logger = logging.getLogger(__name__)


REPLICAS_AT_A_TIME = 7
"""Most replicas of a request's source that are linked at a time for it: with the source as many as for a pull."""


@dataclass(frozen=True)
class ExpectOrder:
    """An order for blocks that a peer will push.

    Attributes:
        request: the engine's name for it.
        source: the worker that computes it.
        transfer: the router's name, the same at both ends.
        first: number of the first wanted block of the request.
        into: the local blocks, for that one and those behind it.
        aux: place of what goes with the request, if anything does.
        prompt: digest of the request's prompt, as both engines compute it. None for engines that do not know prompts.
        workers: number of the peer's workers, if it is not the number of this engine's. The peer must have as many.
        number: 0 for the order for the blocks, whose end is reported. Others of the request only tell a replica of the
            source that its blocks come from another one.
    """

    request: str
    source: PeerAddress
    transfer: str
    first: int
    into: tuple[int, ...]
    aux: int | None = None
    prompt: bytes | None = None
    workers: int | None = None
    number: int = 0

    def at_replicas(self, sources: Sequence[PeerAddress]) -> Iterator[ExpectOrder]:
        """Yield orders for nothing to workers that have the same blocks as the source. They end with this one."""
        for number, source in enumerate(sources, 1):
            yield replace(self, source=source, into=(), aux=None, number=number)

    @property
    def is_reported(self) -> bool:
        """True for the order for the blocks."""
        return not self.number

    @property
    def key(self) -> TransferKey:
        """The key of the transfer."""
        return TransferKey.of(self.transfer, self.prompt)


@dataclass
class _Arrival:
    """The answer of a peer. ``peer`` may know where the blocks belong; it is None if it was not asked yet."""

    key: TransferKey
    number: int
    peer: LinkedPeer | None = None
    answer: Sent | Refused | None = None
    over: Signal = field(default_factory=Signal)

    def settle(self, answer: Sent | Refused) -> None:
        """Keep the first answer, and wake the order."""
        self.answer = self.answer or answer
        self.over.set()


@dataclass
class _Orders:
    """The orders of one request, by number.

    Attributes:
        scopes: those that have not ended.
        waiting: those to replicas that wait for others of the request to be linked.
        linking: those to replicas that are being linked.
    """

    scopes: dict[int, Scope] = field(default_factory=dict)
    waiting: dict[int, Callable[[], object]] = field(default_factory=dict)
    linking: set[int] = field(default_factory=set)

    def begin_next(self) -> None:
        """Link further replicas, if few are being linked."""
        while self.waiting and len(self.linking) < REPLICAS_AT_A_TIME:
            number = next(iter(self.waiting))
            self.linking.add(number)
            self.waiting.pop(number)()


class IncomingPushes:
    """The expected pushes of one worker.

    Args:
        caches: the name of the first cache; the others' follow.
        layout: properties that a peer's cache must have.
        seconds: time limit for a request's blocks, from when they are expected.
        patience: seconds in which a peer must confirm that it has dropped a request.
        wait_usable: waits until no lost peer can write into the cache any longer. Raises LLMException if one may write
            for ever.
        lose: called with the reason why the cache must no longer be used.
    """

    def __init__(
        self,
        caches: int,
        layout: dict[str, str | int],
        seconds: float,
        patience: float,
        links: PeerLinks,
        tasks: Spawner,
        post: Callable[[LinkedPeer, PushMessage], Awaitable[None]],
        tell: Tell,
        wait_usable: Callable[[], Awaitable[None]],
        lose: Callable[[LLMException], object],
        incidents: Incidents | None = None,
    ) -> None:
        self._incidents = incidents or Incidents()
        self._caches = caches
        self._layout = layout
        self._seconds = seconds
        self._patience = patience
        self._links = links
        self._tasks = tasks
        self._post = post
        self._tell = tell
        self._wait_usable = wait_usable
        self._lose = lose
        self._is_closed = False
        self._numbers = itertools.count(1)
        self._arrivals: dict[int, _Arrival] = {}
        self._in_use: set[TransferKey] = set()
        self._orders: dict[str, _Orders] = {}

    # ---- what the engine says ----

    def expect(self, order: ExpectOrder) -> None:
        """Tell a peer where its portions belong. Reported in ``received``."""
        orders = self._orders.setdefault(order.request, _Orders())
        if order.number in orders.scopes:
            words = "request %s: its blocks are already expected: a second order is ignored"
            self._incidents.add(Incident.ORDER_REPEATED, logger, words, printable(order.request))
            return
        scope = orders.scopes[order.number] = Scope()
        times = perf_counter(), asyncio.get_running_loop().time() + self._seconds
        start = partial(self._tasks.start_soon, self._expect, order, scope, *times)
        line_up = partial(self._links.line_up, order.source, order.request, scope, self._seconds, start)
        if order.is_reported:
            line_up()
        else:
            orders.waiting[order.number] = lambda: start(None) if scope.cancel_called else line_up()
            orders.begin_next()

    def cancel(self, request: str) -> None:
        """Stop the order of a request."""
        orders = self._orders.get(request)
        if orders is None:
            return
        for scope in list(orders.scopes.values()):
            scope.cancel()
            self._links.leave_line(scope)
        while orders.waiting:  # each tells its replica that nothing is needed
            orders.waiting.popitem()[1]()

    def close(self) -> None:
        """Note that all links are about to end: peers need not confirm that nothing more lands."""
        self._is_closed = True

    def decline(self, source: PeerAddress, key: TransferKey) -> None:
        """Tell a peer that the blocks are not needed, if possible. Nothing is reported."""
        self._tasks.start_soon(self._decline, source, key)

    # ---- what peers say ----

    def settle(self, peer: LinkedPeer, answer: Sent | Refused) -> None:
        """Take a peer's answer."""
        arrival = self._arrivals.get(answer.number)
        if arrival is not None and arrival.peer == peer:
            arrival.settle(answer)

    def lost(self, peer: LinkedPeer) -> None:
        """Note that this peer's link has ended: nothing more lands through it."""
        for arrival in self._arrivals.values():
            if arrival.peer == peer:
                arrival.settle(Refused(transfer=arrival.key.name, reason="the link to the prefill engine has ended"))

    # ---- one request ----

    async def _expect(
        self, order: ExpectOrder, scope: Scope, began: float, until: float, failed: LLMException | None
    ) -> None:
        """Carry out an order, and report it whatever the outcome.

        ``failed``: why its peer is not linked, if it stood in line.
        """
        is_here, outcome = False, "push_cancelled"
        arrival = _Arrival(order.key, next(self._numbers))
        try:
            with scope:
                await checkpoint_if_cancelled()  # nothing is dialled for one that was cancelled in line
                await self._arrive(order, arrival, until, failed)
                is_here, outcome = True, "push_arrived"
        except LLMException as error:
            outcome = "push_missed"
            words = "request %s: its blocks do not come: %s"
            self._incidents.add(Incident.PUSH_MISSED, logger, words, printable(order.request), error)
        finally:
            try:
                await self._call_off(order, arrival)
            finally:
                self._ended(order)
                missing = () if is_here else order.into
                if order.is_reported:
                    self._tell(lambda e: self._came(e, order.request, outcome, missing, perf_counter() - began))
        if outcome == "push_cancelled" and arrival.peer is None:
            await self._decline(order.source, order.key)

    def _linked(self, order: ExpectOrder) -> None:
        """Let another replica of the order's request be linked."""
        orders = self._orders[order.request]
        orders.linking.discard(order.number)
        if self._is_closed:
            for number in orders.waiting:
                del orders.scopes[number]
            orders.waiting.clear()
        orders.begin_next()

    def _ended(self, order: ExpectOrder) -> None:
        orders = self._orders[order.request]
        del orders.scopes[order.number]
        self._linked(order)
        if not orders.scopes:
            del self._orders[order.request]

    @staticmethod
    def _came(ended: Ended, request: str, outcome: str, missing: tuple[int, ...], seconds: float) -> None:
        ended.came(request, outcome, missing)
        if not missing:
            ended.took(seconds)

    async def _arrive(self, order: ExpectOrder, arrival: _Arrival, until: float, failed: LLMException | None) -> None:
        """Wait for the blocks. Raises LLMException if they do not come."""
        if order.key in self._in_use and order.is_reported:
            raise ParamInvalid(f"transfer_id is {printable(order.transfer)!r}: another request of this engine has it")
        if order.is_reported:
            self._in_use.add(order.key)
        self._arrivals[arrival.number] = arrival
        with anyio.move_on_at(until):
            peer = arrival.peer = await self._links.link(order.source, order.request, failed)
            self._linked(order)
            want = Want(
                transfer=order.transfer,
                number=arrival.number,
                prompt=order.key.prompt,
                first=order.first,
                into=order.into,
                count=len(order.into),
                caches=self._caches,
                aux=order.aux,
                layout=self._layout if order.workers is None else {**self._layout, WORKERS: order.workers},
            )
            await self._post(peer, want)
            await arrival.over.wait()
        if arrival.answer is None:
            raise TransferTimeout(f"the blocks have not arrived within {self._seconds:g} seconds")
        if isinstance(arrival.answer, Refused):
            raise TransferError(printable(arrival.answer.reason))

    async def _call_off(self, order: ExpectOrder, arrival: _Arrival) -> None:
        """Wait until no more bytes of the request can land."""
        if arrival.number not in self._arrivals or self._is_closed:
            return
        try:
            if arrival.peer is not None and arrival.answer is None:
                with anyio.CancelScope(shield=True):  # bounded: by ``patience``, then by the end of the link
                    await self._drop(order, arrival, arrival.peer)
            if arrival.peer is not None and not isinstance(arrival.answer, Sent):
                await self._wait_usable()
        except LLMException as error:
            self._lose(error)
        finally:
            del self._arrivals[arrival.number]
            if order.is_reported:
                self._in_use.discard(arrival.key)

    async def _drop(self, order: ExpectOrder, arrival: _Arrival, peer: LinkedPeer) -> None:
        """Wait until the peer has answered, or its link is closed."""
        with anyio.move_on_after(self._patience):
            with suppress(LLMException):  # its link has ended, but the peer may still write through it
                await self._post(peer, Drop(transfer=order.transfer, number=arrival.number, prompt=arrival.key.prompt))
            await arrival.over.wait()
        if arrival.answer is None:
            words = "request %s: %s does not answer: its link is closed"
            self._incidents.add(Incident.PEER_SILENT, logger, words, printable(order.request), order.source.place)
            await self._links.end(peer)

    async def _decline(self, source: PeerAddress, key: TransferKey) -> None:
        try:
            await self._post(await self._links.link_to_tell(source), Drop(transfer=key.name, prompt=key.prompt))
        except LLMException as error:
            words = "cluster %d keeps the blocks of %s: %s"
            self._incidents.add(Incident.RELEASE_FAILED, logger, words, source.cluster_id, key, error)
