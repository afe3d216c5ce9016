"""Links to other engines' workers: made when they are first needed, and made again when they are needed after they broke.

A link that broke takes time to be given back, and until then the peer may write through it. Meanwhile there may be another
one to the same cluster. So what a peer asks, and what it is asked, belongs to one link, and ends with that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from aiodatadist.adapters.peers import NotAPeer, Peers, is_same_host
from aiodatadist.cluster.host_names import HostNames
from aiodatadist.concurrency.signal import Signal
from aiodatadist.concurrency.spawner import Spawner
from aiodatadist.datadist import LLMDataDist
from aiodatadist.errors import LinkClosed, LinkError, LinkTimeout, LLMException, LLMStatusCode, PeerLost
from aiodatadist.link.link import Link
from aiodatadist.values.addresses import host_port, is_address, is_host_name
from aiodatadist.values.cluster_info import LLMClusterInfo

logger = logging.getLogger(__name__)


def _is_host(text: str) -> str:
    if not is_address(text) and not is_host_name(text):
        raise ValueError("must be an IP address or the name of a host")
    return text


class PeerAddress(BaseModel):
    """Where a worker listens, as JSON carries it. ``host``: an address, or a name that is looked up for each link."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    cluster_id: int = Field(ge=0, lt=2**64)
    host: Annotated[str, Field(min_length=1, max_length=253), AfterValidator(_is_host)]
    port: int = Field(ge=1, le=65535)

    @property
    def place(self) -> str:
        return host_port(self.host, self.port)


class LinkedPeer(NamedTuple):
    """A peer at the other end of one link; at the end of the next one it is another. ``generation``: of that link."""

    cluster_id: int
    generation: int


@dataclass
class _Attempt:
    """To make a link."""

    over: Signal = field(default_factory=Signal)
    error: LLMException | None = None


class PeerLinks:
    """One worker's.

    Args:
        seconds: that making a link may take, and ending one in good order.
        on_closed: called with the peer of a link that was used and is given back: nothing lands through it any more.
        peers: whom this worker dials.
    """

    def __init__(
        self,
        datadist: LLMDataDist,
        tasks: Spawner,
        seconds: float,
        on_closed: Callable[[LinkedPeer], None],
        peers: Peers,
    ) -> None:
        self._datadist = datadist
        self._peers = peers
        self._names = HostNames()
        self._engine = datadist._running()
        self._tasks = tasks
        self._seconds = seconds
        self._on_closed = on_closed
        self._attempts: dict[tuple[int, str], _Attempt] = {}
        self._watched: dict[LinkedPeer, Link] = {}

    async def link(self, peer: PeerAddress) -> LinkedPeer:
        """Until there is a link that can be used: one that broke is given back first. All who want one at the same time share
        an attempt.

        Raises:
            NotAPeer: this worker does not dial that address, or the cluster's link leads elsewhere.
            LinkTimeout: there is none within ``seconds``. LLMException: there cannot be.
        """
        self._peers.check(peer.host, peer.port, peer.cluster_id)
        link = self._ready(peer.cluster_id)
        if link is None:
            await self._make(peer)
            link = self._ready(peer.cluster_id)
        if link is None:
            raise LinkTimeout(f"no link to {peer.place}: it broke as soon as it was made")
        await self._check_place(link, peer)
        return self._watch(link)

    def current(self, peer: LinkedPeer) -> Link:
        """The peer's link. Raises PeerLost: it is over."""
        link = self._ready(peer.cluster_id)
        if link is None or link.generation != peer.generation:
            raise PeerLost(f"the link over which cluster {peer.cluster_id} was asked, or asked, is over")
        return link

    def hears(self, peer: LinkedPeer) -> bool:
        """A peer said something: its link is watched from here on. False: it is over by now."""
        try:
            self._watch(self.current(peer))
        except PeerLost:
            return False
        return True

    async def end(self, peer: LinkedPeer) -> None:
        """No byte lands through its link any more, whether the peer answers within ``seconds`` or not, unless the caches say
        that it is being written to (:meth:`~aiodatadist.CacheManager.wait_usable`)."""
        link = self._watched.get(peer)
        if link is None:
            return
        try:
            await link.disconnect("its peer did not answer", self._seconds)
        except LinkTimeout:
            await link.abandon(LinkClosed(f"cluster {peer.cluster_id} did not answer"))
        except LinkError as error:
            logger.debug("the link to cluster %d was over: %s", peer.cluster_id, error)

    # ---- which one ----

    def may_dial(self, peer: PeerAddress) -> bool:
        """Return True if the address is one of ``peers``."""
        return not self._peers.why_not(peer.host, peer.port, peer.cluster_id)

    async def _check_place(self, link: Link, peer: PeerAddress) -> None:
        """Raises NotAPeer: if the link leads to another place than the peer's address.

        A cluster id is only claimed: a relay to another cluster claims that cluster's id.
        """
        if link.dialled is not None and link.dialled[1] == peer.port and is_same_host(link.dialled[0], peer.host):
            return
        try:
            addresses = await self._names.addresses_of(peer.host, peer=peer.cluster_id)
        except OSError:
            addresses = []
        # The port of a connection that the peer made is not the one on which the peer listens.
        is_its_port = link.dialled is None or link.place[1] == peer.port
        if not is_its_port or not any(is_same_host(link.place[0], address) for address in addresses):
            raise NotAPeer(
                f"offer refused: the link to cluster {peer.cluster_id} leads to {host_port(*link.place)}, "
                f"and not to {peer.place}"
            )

    # ---- making one ----

    def _ready(self, cluster_id: int) -> Link | None:
        link = self._engine.links.peek(cluster_id)
        return link if link is not None and link.is_ready and link.is_mutual else None

    async def _make(self, peer: PeerAddress) -> None:
        key = peer.cluster_id, peer.place
        attempt = self._attempts.get(key)
        if attempt is None:
            attempt = self._attempts[key] = _Attempt()
            self._tasks.start_soon(self._try, peer, attempt)
        await attempt.over.wait()
        if attempt.error is not None:
            raise copy(attempt.error)

    async def _try(self, peer: PeerAddress, attempt: _Attempt) -> None:
        attempt.error = LinkTimeout(f"no link to {peer.place}: this end is closed")
        try:
            millis = round(1000 * self._seconds)
            info = LLMClusterInfo(peer.cluster_id)
            info.append_remote_ip_info(peer.host, peer.port)
            linked = await self._datadist.link_clusters([info], millis)
            if linked.status in {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK}:
                attempt.error = None
            else:
                attempt.error = LinkTimeout(f"no link to {peer.place}: {linked.errors[0]}", status_code=linked.status)
        except LLMException as error:
            attempt.error = error
        except (ValueError, RuntimeError) as error:  # it can be no host's name or address
            attempt.error = LinkTimeout(f"no link to {peer.place}: {error}")
        finally:
            del self._attempts[peer.cluster_id, peer.place]
            attempt.over.set()

    # ---- until it is over ----

    def _watch(self, link: Link) -> LinkedPeer:
        peer = LinkedPeer(link.cluster_id, link.generation)
        if peer not in self._watched:
            self._watched[peer] = link
            self._tasks.start_soon(self._until_closed, peer, link)
        return peer

    async def _until_closed(self, peer: LinkedPeer, link: Link) -> None:
        await link.wait_closed()
        del self._watched[peer]
        self._on_closed(peer)
