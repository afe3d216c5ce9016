"""The links of a cluster: those that are being made, those that exist, and those that others replaced.

Who owns what
    The engine's tasks make, serve and end links; this table lists them. A link is in :attr:`LinkTable.opening` until it
    is ready or nothing is left of it. Then it is the link of its peer. It is among the replaced ones while it is being
    released because another one came.

In which order
    A link is filed before any caller is told of it. A client's half is ready first, and is announced once the server
    has been heard.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.abc

from aiodatadist._concurrency.signal import Signal
from aiodatadist._counting import Incident, forget_oldest
from aiodatadist._link import AWAIT_LINK, DRAIN_TIMEOUT, Link, LinkStatistics
from aiodatadist._values.foreign import printable
from aiodatadist.errors import LinkClosed, LinkError, LLMStatusCode, NotLinked

if TYPE_CHECKING:
    from aiodatadist._cluster.relinker import Relinker
    from aiodatadist._counting import Totals
    from aiodatadist._wire.messages import Hello

logger = logging.getLogger(__name__)

MAX_LINKS = 512
"""The most links of a cluster, whichever end made them. Half-made links have their own limits (``HalfLinks``)."""
PART_TIMEOUT = 2 * DRAIN_TIMEOUT
"""Seconds that links have to finish ending, before a caller that needs them gone is told that they are not."""


RIVAL_SECONDS = 10.0
"""Seconds that a process waits for the end of another one's link under the same cluster id."""


class TableHost(Protocol):
    """The properties of the engine that the table needs."""

    @property
    def cluster_id(self) -> int: ...
    @property
    def totals(self) -> Totals: ...
    @property
    def check_here(self) -> Callable[[], None]: ...
    @property
    def is_stopping(self) -> bool: ...
    def tasks(self) -> anyio.abc.TaskGroup: ...


class LinkTable:
    """The links of one engine, on its event loop.

    Attributes:
        opening: links that are being made, at either end.
        coming: the number of links that each cluster is making with this one.
        news: woken when a link became ready, or ended, or will never be made.
        is_to_itself: True if the cluster is linked to itself, for which there is no link object.
    """

    def __init__(self, engine: TableHost, relinker: Relinker) -> None:
        self._engine = engine
        self._relinker = relinker
        self._links: dict[int, Link] = {}
        self._replaced: set[Link] = set()  # still being released
        self._refusals: dict[int, str] = {}  # why this end's last attempt at a cluster failed
        self._ends: dict[int, str] = {}  # why the last link to a cluster ended
        self.peek: Callable[[int], Link | None] = self._links.get
        self.opening: set[Link] = set()
        self.coming: Counter[int] = Counter()
        self.news: Signal = Signal()
        self.is_to_itself = False

    @property
    def current(self) -> list[Link]:
        """The link of each peer that has one, including links that are being ended."""
        return list(self._links.values())

    # ---- a link's life ----

    def file(self, link: Link) -> None:
        """Make a link that became ready the one of its peer. A link that it replaces is dropped."""
        old = self._links.get(link.cluster_id)
        if old is not None:
            self._replaced.add(old)
            self._engine.tasks().start_soon(old.abandon, LinkClosed(f"cluster {link.cluster_id} was linked again"))
            if old.life.is_mutual:
                self._relinker.replaced(old)
        self._links[link.cluster_id] = link
        link.file(self._engine.totals.linked(link.cluster_id))

    def tell_of(self, link: Link) -> None:
        """Announce a link that both ends have.

        A client's half is ready first. A caller that heard of it then, and told the peer by other means, might be
        quicker than the link.
        """
        self._relinker.linked(link)
        self.news.wake()
        told = self._engine.cluster_id, link.cluster_id, link.way
        self._engine.totals.incidents.add(
            Incident.LINK_MADE, logger, "cluster %d is linked to %d, over %s", *told, level=logging.INFO
        )

    async def serve(self, link: Link) -> None:
        """Serve a link until it has ended. Whatever goes wrong on it affects no other link."""
        try:
            await link.serve()
        except Exception:
            told = "cluster %d: the link to cluster %d failed", self._engine.cluster_id, link.cluster_id
            self._engine.totals.incidents.add(Incident.DEFECT, logger, *told, level=logging.ERROR, exc_info=True)
        finally:
            if link.life.cause is not None:
                self._engine.totals.links_ended[link.life.cause.word] += 1
            self._replaced.discard(link)
            # otherwise another link has replaced this one, and is reported by itself
            if self._links.get(link.cluster_id) is link:
                del self._links[link.cluster_id]
                if link.session.failure is not None:
                    self._ends.pop(link.cluster_id, None)
                    why = self._ends[link.cluster_id] = str(link.session.failure.args[0])
                    forget_oldest(self._ends)
                    self.remember(link.cluster_id, f"the last link ended: {why}")
                if link.life.is_mutual:
                    self._relinker.ended(link)
            self.news.wake()

    async def settle(self, link: Link) -> None:
        """Take a link out of those that are being made: it is ready, or nothing is left of it when this returns.

        That may take time: its half of a channel may wait, long after the peer gave up, in a call that cannot be
        interrupted.
        """
        try:
            if not link.life.is_filed:
                await link.discard()
        finally:
            self.opening.discard(link)
            self.news.wake()

    def remember(self, cluster_id: int, why: str) -> None:
        """Keep the reason why there is no link, for callers that try to use it later."""
        self._refusals.pop(cluster_id, None)
        self._refusals[cluster_id] = why
        forget_oldest(self._refusals)

    def forget_refusal(self, cluster_id: int) -> None:
        """Drop that reason, because there is a link."""
        self._refusals.pop(cluster_id, None)

    # ---- questions ----

    def check_not_linked(self, cluster_id: int, peer: Hello | None = None) -> None:
        """Raise LinkError if a cluster is linked already.

        ``peer`` is the cluster if it asks for the link. A link that it had and lost is then out of date. For a link to
        another process with its id see :meth:`outlive_other`. Without ``peer``, a link that this end does not own does
        not count.
        """
        existing = self._links.get(cluster_id)
        is_linked = existing is not None and existing.session.is_ready
        if existing is not None and peer is None:
            is_linked &= existing.life.ownership.is_ours
        elif existing is not None and peer is not None:
            is_linked &= (
                existing.life.is_mutual
                and existing.session.instance == peer.instance
                # both ends count their links: a peer that has had more since has lost this one
                and existing.peer_links >= peer.links
            )
        if is_linked or (cluster_id == self._engine.cluster_id and self.is_to_itself):
            raise LinkError(
                f"cluster {cluster_id} is linked already",
                status_code=LLMStatusCode.LLM_ALREADY_LINK,
                hint="use that link, or unlink_clusters() first",
            )

    async def outlive_other(self, peer: Hello) -> None:
        """Wait until the link to another process with a peer's cluster id has ended. Return at once if there is none.

        That process is asked for a sign of life now. If it died, its connections tell so, or its heartbeats end.

        Raises LinkError if it lives, or is not known to be dead within ``RIVAL_SECONDS``.
        """
        link = self._other_process(peer.cluster_id, peer.instance)
        if link is None:
            return
        with anyio.move_on_after(RIVAL_SECONDS):
            try:
                await link.session.ping()
            except LinkError:  # the link has ended
                return
        raise _taken(link)

    def check_no_other(self, cluster_id: int, instance: str) -> None:
        """Raise LinkError if another process with this cluster id has a link now, so no link replaces a live one."""
        link = self._other_process(cluster_id, instance)
        if link is not None:
            raise _taken(link)

    def _other_process(self, cluster_id: int, instance: str) -> Link | None:
        link = self._links.get(cluster_id)
        is_other = link is not None and link.session.is_ready and link.session.instance != instance
        return link if is_other else None

    def check_room(self, cluster_id: int) -> None:
        """Raise LinkError if there is no room for a link to this cluster, and it has no link that would be replaced."""
        if cluster_id not in self._links and len(self._links) >= MAX_LINKS:
            raise LinkError(
                f"{len(self._links)} links: the limit is {MAX_LINKS}", status_code=LLMStatusCode.LLM_PARAM_INVALID
            )

    def find(self, cluster_id: int) -> Link:
        """Return the link to a cluster, if this end may use it.

        Raises what :meth:`any` raises, and NotLinked if only the peer owns the link.
        """
        link = self.any(cluster_id)
        if not link.life.ownership.is_ours:
            raise NotLinked(
                f"cluster {cluster_id} is not linked from here: with transfer_backend 'hixl' only that end may use its link",
                peer=cluster_id,
                hint="link_clusters() at this end, too",
            )
        return link

    def any(self, cluster_id: int) -> Link:
        """Return the link to a cluster.

        Raises NotLinked if there is none, and ForkError or LLMException if the caller is not on the engine's event
        loop.
        """
        self._engine.check_here()
        link = self._links.get(cluster_id)
        if link is None:
            refusal = self._refusals.get(cluster_id)
            if refusal is not None:
                is_making = self._relinker.is_making(cluster_id)
                hint = AWAIT_LINK if is_making else "link_clusters() again"
                error = NotLinked(f"cluster {cluster_id} is not linked; {refusal}", peer=cluster_id, hint=hint)
                error.retryable = is_making
                raise error
            raise NotLinked(f"cluster {cluster_id} is not linked", peer=cluster_id, hint="link_clusters() first")
        return link

    async def wait_closed(self, cluster_id: int) -> str:
        """Wait until the link to a cluster has ended, and return the reason: at once, if it has ended before.

        Raises NotLinked if there was none that is remembered.
        """
        self._engine.check_here()
        if cluster_id not in self._links and cluster_id in self._ends:
            return self._ends[cluster_id]
        return str((await self.any(cluster_id).wait_closed()).args[0])

    async def wait_parted(self) -> None:
        """Wait until the links that the peers have ended are gone completely, for ``PART_TIMEOUT`` at most."""
        with anyio.move_on_after(PART_TIMEOUT):
            for link in [*self._replaced, *(link for link in self._links.values() if not link.session.is_ready)]:
                await link.wait_closed()

    @property
    def has_any(self) -> bool:
        """True if there are links, or links that are being made, re-established, or released."""
        return bool(self._links or self.opening or self._replaced) or self.is_to_itself or self._relinker.is_at_work

    async def wait_opened(self) -> None:
        """Wait until no link is being made, and nothing is left of those that failed or were replaced."""
        while self.opening or self._replaced:
            await self.news.wait()

    def statistics(self) -> list[LinkStatistics]:
        now = time.time()
        return [
            link.transfers.running.counters.snapshot(
                *(link.cluster_id, link.life.state.value, link.generation, link.credential),
                _certificate_seconds(link, now),
                link.way,
            )
            for link in list(self._links.values())
        ]

    def credentials(self) -> Counter[str]:
        """Return the number of links by the name of the key that was proved. Any thread may call it."""
        return Counter(link.credential for link in list(self._links.values()))

    def certificates(self) -> dict[str, float]:
        """Return the seconds until the certificates of linked peers expire, by name. Any thread may call it."""
        now, found = time.time(), dict[str, float]()
        for link in list(self._links.values()):
            if (seconds := _certificate_seconds(link, now)) is not None:
                found[link.credential] = min(seconds, found.get(link.credential, seconds))
        return found

    def states(self) -> Counter[str]:
        """Return the number of links in each state, including those that are being made. Any thread may call it."""
        return Counter(link.life.state.value for link in (*self._links.values(), *self.opening, *self._replaced))

    async def wait_linked(self, cluster_id: int) -> None:
        """Wait until a cluster is linked. Raises NotLinked if the engine stops before that."""
        while not ((link := self._links.get(cluster_id)) and link.life.is_usable):
            if self._engine.is_stopping:
                raise NotLinked(
                    f"cluster {self._engine.cluster_id} is finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED
                )
            await self.news.wait()


def _certificate_seconds(link: Link, now: float) -> float | None:
    expires = None if link.proved is None else link.proved.expires
    return None if expires is None else expires - now


def _taken(link: Link) -> LinkError:
    return LinkError(
        f"cluster {link.cluster_id} is linked already: another process has this id, from {printable(link.place[0])}",
        status_code=LLMStatusCode.LLM_ALREADY_LINK,
        hint="give each process its own cluster id; a process that has ended makes room by itself",
    )
