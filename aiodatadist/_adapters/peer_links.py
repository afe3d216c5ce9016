"""Links to other engines' workers: established when they are first needed, and again if they are needed after a loss.

Releasing a lost link takes time, during which the peer may still write through it, while the same cluster may already
have another link. So a request of a peer, or to a peer, belongs to one link, and ends with that link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Annotated, ClassVar, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from aiodatadist._adapters.dials import Dial, Dials, Stage
from aiodatadist._adapters.peers import NotAPeer, Peers, is_same_host
from aiodatadist._concurrency.alarms import Alarms
from aiodatadist._concurrency.scope import Scope
from aiodatadist._concurrency.signal import Signal
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._counting import Incident
from aiodatadist._datadist import LLMDataDist
from aiodatadist._link.link import Link
from aiodatadist._values.addresses import host_port, is_address, is_host_name
from aiodatadist.errors import LinkClosed, LinkError, LinkTimeout, LLMException, LLMStatusCode, PeerLost

logger = logging.getLogger(__name__)

MAX_PLACES = 64
"""Most places that are remembered of one link.

A further one replaces the one used longest ago, which is then dialled again.
"""
MAX_LINKED_PLACES = 512
"""Most places that are remembered because clusters were found there, the same number as a worker may have links."""
STARTED_AT_A_TIME = 32
"""Requests that start in one turn of the event loop, because the dial that they waited for has ended."""
SPARE = 64
"""Most callers at a time that tell unlinked peers what these may miss. Further callers are refused."""


def checked_host(text: str) -> str:
    """Return the text if it is an address or the name of a host. Raises ValueError if it is neither."""
    if not is_address(text) and not is_host_name(text):
        raise ValueError("must be an IP address or the name of a host")
    return text


class PeerAddress(BaseModel):
    """The address on which a worker listens, as JSON has it.

    ``host`` is an IP address, or a name that is looked up for each link.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, strict=True)

    cluster_id: int = Field(ge=0, lt=2**64)
    host: Annotated[str, Field(min_length=1, max_length=253), AfterValidator(checked_host)]
    port: int = Field(ge=1, le=65535)

    @property
    def place(self) -> str:
        """Host and port as one text."""
        return host_port(self.host, self.port)


Start = Callable[[LLMException | None], object]
"""Called with why there is no link, or None if it is not known yet whether there will be one."""


class LinkedPeer(NamedTuple):
    """A peer at the other end of one link, with the link's ``generation``. Another link has another peer."""

    cluster_id: int
    generation: int


@dataclass
class _Attempt:
    """An attempt to link; or, if the cluster has a link, to find out which cluster listens at another address.

    Attributes:
        seconds: time limit from when its dial begins.
        in_line: requests without a task; they start when the dial has ended.
        instance: instance of the cluster that listens there.
    """

    dial: Dial
    seconds: float
    in_line: dict[Scope, tuple[str, Start]] = field(default_factory=dict)
    over: Signal = field(default_factory=Signal)
    error: LLMException | None = None
    instance: str = ""


@dataclass
class _Watched:
    """A link that was used. ``places`` are the other places where its peer was met."""

    link: Link
    places: dict[str, None] = field(default_factory=dict)


class PeerLinks:
    """The links of one worker.

    Args:
        seconds: time limit for waiting for a dial, for establishing a link, and for closing one in order.
        on_closed: called with the peer of a used link once it is closed: nothing more lands through it.
        peers: the peers that this worker dials.
    """

    def __init__(
        self,
        datadist: LLMDataDist,
        tasks: Spawner,
        seconds: float,
        on_closed: Callable[[LinkedPeer], None],
        peers: Peers,
    ) -> None:
        self._peers = peers
        self._engine = datadist._running()
        self._tasks = tasks
        self._seconds = seconds
        self._on_closed = on_closed
        self._dials = Dials()
        self._alarms = Alarms(Dial.give_way)  # of dials that wait in line
        self._spare = 0
        self._is_closed = False
        self._attempts: dict[tuple[int, str, int], _Attempt] = {}
        self._in_line: dict[Scope, _Attempt] = {}
        self._linked_places: dict[tuple[int, str], None] = {}
        self._watched: dict[LinkedPeer, _Watched] = {}

    def line_up(self, peer: PeerAddress, request: str, scope: Scope, seconds: float, start: Start) -> None:
        """Call ``start``, which starts a request's task: at once, or when the dial that the request waits for has ended.

        If the dial fails, ``start`` gets the reason, and the request passes it to :meth:`link`.

        Args:
            scope: the request's own, which names it to :meth:`leave_line`.
            seconds: the request's time limit. If it is shorter than a link's, the request starts at once, and its task
                watches the time.
        """
        key, link = self._wanted(peer)
        attempt = self._attempts.get(key)
        if self._is_closed or seconds <= self._seconds or self._starts_at_once(peer, link):
            start(None)
        elif attempt is None:
            dial = self._new_dial(peer, request)
            if dial.stage is Stage.FREE:
                start(None)
                return
            attempt = self._attempts[key] = _Attempt(dial, self._seconds)
            self._stand(attempt, request, scope, start)
            self._begin(key, peer, link, attempt)
        elif attempt.dial.scope.cancel_called:  # which is no failure of this request's
            start(None)
        else:
            self._stand(attempt, request, scope, start)

    def leave_line(self, scope: Scope) -> None:
        """Start a request now, because it was cancelled. No effect if it has started."""
        attempt = self._in_line.pop(scope, None)
        if attempt is not None:
            request, start = attempt.in_line.pop(scope)
            attempt.dial.part(request)
            start(None)

    def close(self) -> None:
        """Start all requests in line, and any later one at once, because their tasks are about to be cancelled."""
        self._is_closed = True
        for scope in list(self._in_line):
            self.leave_line(scope)

    async def link(self, peer: PeerAddress, request: str, failed: LLMException | None = None) -> LinkedPeer:
        """Wait for a usable link; return its peer. A lost link is released first.

        Callers that name the same place at the same time share an attempt.

        Args:
            request: the request that needs the link. The places of different requests take turns.
            failed: why there is no link, if the request stood in line.

        Raises:
            NotAPeer: if this worker does not dial that address, or the cluster's link leads elsewhere and the cluster
                was not met at that address.
            LinkTimeout: if there is no link within ``seconds``.
            LLMException: if there cannot be a link.
        """
        return await self._link(peer, request, failed)

    async def _link(self, peer: PeerAddress, request: str | None, failed: LLMException | None = None) -> LinkedPeer:
        self._peers.check(peer.host, peer.port, peer.cluster_id)
        link = self._ready(peer.cluster_id)
        if link is None:
            if failed is not None:
                raise failed
            attempt = await self._reach(peer, None, request)
            link = self._ready(peer.cluster_id)
            if link is None and attempt.error is not None:
                raise copy(attempt.error)
        if link is None:
            raise LinkTimeout(f"no link to {peer.place}: it broke as soon as it was established")
        linked = self._watch(link)
        places = self._watched[linked].places
        await self._check_place(link, peer, places, request, failed)
        if link.dialled is not None or peer.place in places:
            self._remember(peer)
        return linked

    async def link_to_tell(self, peer: PeerAddress) -> LinkedPeer:
        """Wait for a link like :meth:`link`, to say something that a peer may miss. Waits for no other dial.

        Raises LinkTimeout also, at once, if the peer is not linked at that place and cannot be dialled now.
        """
        if self._is_linked_at(peer):
            return await self._link(peer, None)
        if not self._may_spare(peer):
            raise LinkTimeout(
                f"no link to {peer.place}: it is not linked, and peers that requests need are dialled first"
            )
        self._spare += 1
        try:
            return await self._link(peer, None)
        finally:
            self._spare -= 1

    def may_tell(self, peer: PeerAddress) -> bool:
        """Return True if :meth:`link_to_tell` would wait for a link now."""
        return (self._is_linked_at(peer) or self._may_spare(peer)) and not self._why_not(peer)

    def current(self, peer: LinkedPeer) -> Link:
        """Return the peer's link. Raises PeerLost if it has ended."""
        link = self._ready(peer.cluster_id)
        if link is None or link.generation != peer.generation:
            raise PeerLost(f"the link to cluster {peer.cluster_id} that carried this request has ended")
        return link

    def hears(self, peer: LinkedPeer) -> bool:
        """Watch the link of a peer that sent a message; return False if the link has ended."""
        try:
            self._watch(self.current(peer))
        except PeerLost:
            return False
        return True

    async def end(self, peer: LinkedPeer) -> None:
        """Close the peer's link, so that nothing more lands through it, even if the peer does not answer.

        The peer has ``seconds`` to answer. If it was stopped while it wrote, the caches say so:
        :meth:`~aiodatadist.CacheManager.wait_usable`.
        """
        watched = self._watched.get(peer)
        if watched is None:
            return
        link = watched.link
        try:
            await link.disconnect("its peer did not answer", self._seconds)
        except LinkTimeout:
            await link.abandon(LinkClosed(f"cluster {peer.cluster_id} did not answer"))
        except LinkError as error:
            logger.debug("the link to cluster %d had already ended: %s", peer.cluster_id, error)

    # ---- which one ----

    def _why_not(self, peer: PeerAddress) -> str:
        return self._peers.why_not(peer.host, peer.port, peer.cluster_id)

    def _is_linked_at(self, peer: PeerAddress) -> bool:
        """Return True if nothing needs to be dialled or looked up before the peer can be told something."""
        link = self._ready(peer.cluster_id)
        if link is None:
            return False
        watched = self._watched.get(LinkedPeer(link.cluster_id, link.generation))
        return _leads_plainly_to(link, peer) or (watched is not None and peer.place in watched.places)

    def _may_spare(self, peer: PeerAddress) -> bool:
        return self._spare < SPARE and not self._dials.was_silent(peer.place)

    async def _check_place(
        self,
        link: Link,
        peer: PeerAddress,
        places: dict[str, None],
        request: str | None,
        failed: LLMException | None,
    ) -> None:
        """Raise NotAPeer if the link leads to another place than the peer's address, and its cluster is not met there.

        A cluster id is only a claim: a relay to another cluster claims that cluster's id.
        """
        if peer.place in places:
            del places[peer.place]
            places[peer.place] = None  # moved to the end: the place used longest ago is forgotten first
            return
        if await self._leads_to(link, peer):
            return
        attempt = None if failed is not None else await self._reach(peer, link, request)
        error = failed if attempt is None else attempt.error
        if error is not None or (attempt is not None and attempt.instance != link.session.instance):
            why = error or f"another instance of cluster {peer.cluster_id} listens there"
            raise NotAPeer(
                f"offer refused: the link to cluster {peer.cluster_id} leads to {host_port(*link.place)}, "
                f"not to {peer.place}: {why}"
            )
        places[peer.place] = None
        if len(places) > MAX_PLACES:
            del places[next(iter(places))]

    async def _leads_to(self, link: Link, peer: PeerAddress) -> bool:
        """Return True if the link was made to the peer's address."""
        if _leads_plainly_to(link, peer):
            return True
        # The port of a connection that the peer made is not the one on which the peer listens.
        if link.dialled is not None and link.place[1] != peer.port:
            return False
        try:
            share = self._peers.share_of(peer.host)
            addresses = await self._engine.initiator.host_names.addresses_of(peer.host, share=share)
        except OSError:
            addresses = []
        return any(is_same_host(link.place[0], address) for address in addresses)

    # ---- requests in line ----

    def _wanted(self, peer: PeerAddress) -> tuple[tuple[int, str, int], Link | None]:
        """Return the key of the attempt that a request needs, and the link that its cluster has."""
        link = self._ready(peer.cluster_id)
        return (peer.cluster_id, peer.place, 0 if link is None else link.generation), link

    def _starts_at_once(self, peer: PeerAddress, link: Link | None) -> bool:
        """Return True if a request at this place needs no dial, is refused, or has to wait in a task for something else."""
        if self._why_not(peer) or not is_address(peer.host):
            return True
        if link is None:
            return not self._is_first(peer, link)
        return self._is_linked_at(peer) or is_same_host(link.place[0], peer.host)

    def _is_first(self, peer: PeerAddress, link: Link | None) -> bool:
        """Return True if an attempt waits for no earlier link's end."""
        return link is not None or self._engine.links.peek(peer.cluster_id) is None

    def _stand(self, attempt: _Attempt, request: str, scope: Scope, start: Start) -> None:
        attempt.dial.join(request)
        attempt.in_line[scope] = request, start
        self._in_line[scope] = attempt

    def _start_those_in_line(self, attempt: _Attempt) -> None:
        """Start an attempt's requests, some in each turn of the loop, because its dial has ended."""
        for scope in list(islice(attempt.in_line, STARTED_AT_A_TIME)):
            request, start = attempt.in_line.pop(scope)
            del self._in_line[scope]
            attempt.dial.part(request)
            start(None if attempt.error is None else copy(attempt.error))
        if attempt.in_line:
            asyncio.get_running_loop().call_soon(self._start_those_in_line, attempt)

    # ---- making one ----

    def _ready(self, cluster_id: int) -> Link | None:
        link = self._engine.links.peek(cluster_id)
        return link if link is not None and link.life.is_usable else None

    async def _reach(self, peer: PeerAddress, link: Link | None, request: str | None) -> _Attempt:
        """Wait for an attempt at a place. ``link`` is the link that the cluster has at another place."""
        key = peer.cluster_id, peer.place, 0 if link is None else link.generation
        attempt = self._attempts.get(key)
        # it was cancelled, which is no failure of this caller's
        while attempt is not None and attempt.dial.scope.cancel_called:
            await attempt.over.wait()
            attempt = self._attempts.get(key)
        if attempt is None:
            attempt = self._attempts[key] = _Attempt(self._new_dial(peer, request), self._seconds)
            attempt.dial.join(request)
            self._begin(key, peer, link, attempt)
        else:
            attempt.dial.join(request)
        try:
            await attempt.over.wait()
        finally:
            attempt.dial.part(request)
        return attempt

    def _new_dial(self, peer: PeerAddress, request: str | None) -> Dial:
        # where a cluster was found before, no other dial is waited for
        is_known = (peer.cluster_id, peer.place) in self._linked_places
        return Dial(self._dials, peer.place, self._peers.share_of(peer.host), is_free=is_known or request is None)

    def _begin(self, key: tuple[int, str, int], peer: PeerAddress, link: Link | None, attempt: _Attempt) -> None:
        """Start an attempt's task, at once or when there is room for its dial."""
        dial, start = attempt.dial, partial(self._tasks.start_soon, self._try, key, peer, link, attempt)
        if dial.stage is Stage.FREE or not self._is_first(peer, link) or not is_address(peer.host):
            start()
            return
        clock = asyncio.get_running_loop().time  # also in a callback, where no task is
        lined_up = clock()
        alarm = self._alarms.set(lined_up + self._seconds, dial)

        def begin() -> None:
            self._alarms.drop(alarm)
            attempt.seconds = max(0.001, self._seconds - round(clock() - lined_up, 3))
            start()

        def leave() -> None:
            self._alarms.drop(alarm)
            self._failed(peer, attempt, LinkTimeout(dial.stage.value))
            self._over(key, attempt)

        dial.wait_for_turn(begin, leave)

    async def _try(self, key: tuple[int, str, int], peer: PeerAddress, link: Link | None, attempt: _Attempt) -> None:
        attempt.error = LinkTimeout(f"no link to {peer.place}: this end is closed")
        dial = attempt.dial
        try:
            with dial.scope:
                await self._dial(peer, link, attempt)
                attempt.error = None
            if dial.scope.cancelled_caught:
                raise LinkTimeout(dial.stage.value)
            self._dials.learn(dial, answered=True)
        except LLMException as error:
            self._failed(peer, attempt, error)
        finally:
            self._over(key, attempt)

    def _failed(self, peer: PeerAddress, attempt: _Attempt, error: LLMException) -> None:
        self._dials.learn(attempt.dial, answered=not isinstance(error, LinkTimeout))
        attempt.error = LinkTimeout(f"no link to {peer.place}: {error}", status_code=error.status_code)
        told = self._engine.cluster_id, peer.cluster_id, attempt.error
        self._engine.totals.incidents.add(Incident.LINK_FAILED, logger, "cluster %d: cluster %d: %s", *told)

    def _over(self, key: tuple[int, str, int], attempt: _Attempt) -> None:
        attempt.dial.ended()
        del self._attempts[key]
        attempt.over.set()
        self._start_those_in_line(attempt)

    def _remember(self, peer: PeerAddress) -> None:
        """Note that the cluster was found at the peer's address."""
        known = peer.cluster_id, peer.place
        self._linked_places.pop(known, None)
        self._linked_places[known] = None
        if len(self._linked_places) > MAX_LINKED_PLACES:
            del self._linked_places[next(iter(self._linked_places))]

    async def _dial(self, peer: PeerAddress, link: Link | None, attempt: _Attempt) -> None:
        """Make the attempt. Raises LLMException if it fails."""
        initiator, address = self._engine.initiator, (peer.host, peer.port)
        if link is not None:
            attempt.instance = await initiator.meet(address, peer.cluster_id, attempt.seconds, attempt.dial)
            return
        try:
            await initiator.link_in_attempts(address, peer.cluster_id, attempt.seconds, attempt.dial)
        except LinkError as error:
            if error.status_code is not LLMStatusCode.LLM_ALREADY_LINK:
                raise

    # ---- its end ----

    def _watch(self, link: Link) -> LinkedPeer:
        peer = LinkedPeer(link.cluster_id, link.generation)
        if peer not in self._watched:
            self._watched[peer] = _Watched(link)
            self._tasks.start_soon(self._until_closed, peer, link)
        return peer

    async def _until_closed(self, peer: LinkedPeer, link: Link) -> None:
        await link.wait_closed()
        del self._watched[peer]
        self._on_closed(peer)


def _leads_plainly_to(link: Link, peer: PeerAddress) -> bool:
    """Return True if the link was made to the peer's address as it is written, or by the peer at that address."""
    if link.dialled is None:
        return is_same_host(link.place[0], peer.host)
    return link.dialled[1] == peer.port and is_same_host(link.dialled[0], peer.host)
