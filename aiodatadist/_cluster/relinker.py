"""Relinking: broken links that this end's calls made are re-established, as ``LLMConfig.relink`` says.

Who owns what
    A :class:`_Wanted` stands for a link that ``link_clusters`` made here and that no call has ended since. While it is
    broken, one of the engine's tasks tries to make it again. Each has at most one such task, and none while a caller's own
    ``link_clusters`` makes the link.

In which order
    A link is reported as linked, lost and unlinked in the round of the loop in which it becomes so. Attempts are
    reported before the wait for them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from aiodatadist._cluster.link_changes import ChangeFeed, LinkChange, LinkPhase
from aiodatadist._concurrency.scope import Scope
from aiodatadist._concurrency.signal import Signal
from aiodatadist._counting import Incident
from aiodatadist._link import AwaitedLink, Link
from aiodatadist._values.addresses import host_port, is_address
from aiodatadist.errors import AuthError, IncompatiblePeer, LinkClosed, LinkError, LLMException, LLMStatusCode

if TYPE_CHECKING:
    from aiodatadist._config.relink_policy import RelinkPolicy
    from aiodatadist._counting import Totals

logger = logging.getLogger(__name__)

Address = tuple[str, int]
UNPROVED_SECONDS = 1.0
"""Seconds of an attempt after which another connection looks at the address again, if nothing was proved over the first.

Another process may have held the port, and may keep the connection when the cluster is there again.
"""


class Linking(Protocol):
    """The properties of the engine that the relinker needs."""

    @property
    def cluster_id(self) -> int: ...
    @property
    def totals(self) -> Totals: ...
    def peek_link(self, cluster_id: int) -> Link | None: ...
    def spawn(self, call: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> bool: ...
    async def link_once(self, address: Address, cluster_id: int, seconds: float, patience: float) -> None:
        """Make one attempt at a link. Raises LinkError if no link was made."""
        ...


class _Wanted:
    """A link that a call made, with the address of the peer and the time limit of an attempt.

    Attributes:
        lost_at: when it broke; None if it exists, or a caller is making it for the first time.
        reason: why it broke, or why the last attempt failed.
        attempts: the number of attempts since.
        made_at: when the link was made the last time; None if it has broken since.
        brief: the number of links in a row that broke soon after they were made. Each counts as a failed attempt in the
            delays: a peer may link and break off again and again.
        instance: the peer's instance when the link was made the last time.
        pauses: the number of ``link_clusters`` calls that are making it.
        scope: the scope of the task that re-establishes it; None if there is none.
        woken: wakes the task because there is a link.
        over: set at the end of the task.
    """

    def __init__(self, cluster_id: int, address: Address, seconds: float) -> None:
        self.cluster_id = cluster_id
        self.address = address
        self.seconds = seconds
        self.instance = ""
        self.lost_at: float | None = None
        self.reason: LinkError | None = None
        self.attempts = 0
        self.made_at: float | None = None
        self.brief = 0
        self.pauses = 0
        self.scope: Scope | None = None
        self.woken = Signal()
        self.over = Signal()
        self.awaited: AwaitedLink | None = None

    def is_there(self) -> None:
        self.lost_at = self.reason = None
        self.attempts = 0
        self.made_at = anyio.current_time()

    def is_lost(self, reason: LinkError, brief_seconds: float) -> None:
        """Note that the link broke; it was brief if it lasted less than ``brief_seconds``."""
        now, made_at = anyio.current_time(), self.made_at
        self.lost_at, self.reason, self.made_at = now, reason, None
        if made_at is not None:
            self.brief = self.brief + 1 if now - made_at < brief_seconds else 0


class Relinker:
    """The wanted links of one cluster, and the reports about all its links.

    Args:
        policy: None if broken links are not re-established.
    """

    def __init__(self, policy: RelinkPolicy | None, engine: Linking, changes: ChangeFeed) -> None:
        self._policy = policy
        self._engine = engine
        self._totals = engine.totals
        self._changes = changes
        self._wanted: dict[int, _Wanted] = {}
        self._is_over = False

    @property
    def is_on(self) -> bool:
        return self._policy is not None

    @property
    def is_at_work(self) -> bool:
        """True if a link is being re-established."""
        return any(wanted.lost_at is not None for wanted in self._wanted.values())

    def is_making(self, cluster_id: int) -> bool:
        """Return True if the link to this cluster broke, and is being re-established."""
        wanted = self._wanted.get(cluster_id)
        return wanted is not None and wanted.lost_at is not None

    def end(self) -> None:
        """Stop relinking, because the cluster is finalized; whatever waits for a link fails."""
        self._is_over = True
        # emptied first: what fails below runs callbacks, which may ask for these links
        wanted, self._wanted = self._wanted, {}
        for each in wanted.values():
            self._drop(each, LinkClosed("the cluster was finalized"))
            each.over.set()

    # ---- what callers want ----

    def remember(self, cluster_id: int, address: Address, seconds: float | None) -> None:
        """Note that a call of this end's made this link, in at most ``seconds``; if None, it is not to be re-established."""
        if self._policy is None or self._is_over or seconds is None:
            return
        wanted = self._wanted.get(cluster_id)
        if wanted is None:
            wanted = self._wanted[cluster_id] = _Wanted(cluster_id, address, seconds)
            link = self._engine.peek_link(cluster_id)
            if link is not None:
                wanted.instance = link.session.instance
                link.remake_if_lost(True)
        else:
            wanted.address, wanted.seconds = address, seconds
            self._check_there(wanted)

    @asynccontextmanager
    async def paused(self, cluster_id: int, seconds: float) -> AsyncIterator[None]:
        """Pause the attempts at a link while a caller makes it.

        They end first, within ``seconds``, and continue if the caller does not succeed.
        """
        wanted = self._wanted.get(cluster_id)
        if wanted is None:
            yield
            return
        wanted.pauses += 1
        try:
            await self._stop(wanted, seconds)
            yield
        finally:
            wanted.pauses -= 1
            self._go_on(wanted)

    async def forget(self, cluster_id: int, seconds: float) -> None:
        """Forget a link, because a caller ends it.

        When this returns, no attempt at it is under way, unless ``seconds`` were too few to stop one; that one makes no
        link either.
        """
        wanted = self._wanted.pop(cluster_id, None)
        if wanted is None:
            return
        link = self._engine.peek_link(cluster_id)
        if link is not None:
            link.remake_if_lost(False)  # the peer's link stays if links have owners
        why = LinkClosed(f"the link to cluster {cluster_id} was unlinked")
        self._drop(wanted, why)
        if wanted.lost_at is not None and not self._is_linked(cluster_id):
            self._tell(LinkPhase.UNLINKED, cluster_id, why)
        await self._stop(wanted, seconds)

    def awaited(self, cluster_id: int) -> AwaitedLink | None:
        """Return a broken link that is being re-established, if transfers wait for it; None otherwise."""
        wanted = self._wanted.get(cluster_id)
        if wanted is None or self._policy is None or not self._policy.wait:
            return None
        link = self._engine.peek_link(cluster_id)
        if link is not None and link.life.was_unlinked:
            return None
        if wanted.awaited is None:
            wanted.awaited = AwaitedLink(cluster_id, self._policy.wait, lambda: wanted.reason, lambda: wanted.instance)
        return wanted.awaited

    # ---- what becomes of links ----

    def replaced(self, link: Link) -> None:
        """Note that another link replaced this one before it had ended."""
        wanted = self._wanted.get(link.cluster_id)
        self._tell_end(link, LinkClosed(f"cluster {link.cluster_id} was linked again"))
        if wanted is not None and link.life.was_unlinked:
            self._end_wanted(wanted, link.session.copy_of_failure())
        elif wanted is not None:
            self._is_lost(wanted, link.session.copy_of_failure())

    def linked(self, link: Link) -> None:
        """Note that both ends have a link, whichever made it."""
        wanted = self._wanted.get(link.cluster_id)
        self._tell(LinkPhase.LINKED, link.cluster_id, attempt=0 if wanted is None else wanted.attempts)
        if wanted is not None:
            wanted.instance = link.session.instance
            if link.life.ownership.is_ours:
                self._is_there(wanted, link)
            wanted.woken.wake()
            self._go_on(wanted)  # the task joins a link that only the peer owns

    def ended(self, link: Link) -> None:
        """Note that a link that both ends had has ended, and was the last one with its peer."""
        failure = link.session.copy_of_failure()
        self._tell_end(link, failure)
        wanted = self._wanted.get(link.cluster_id)
        if wanted is None:
            return
        if link.life.was_unlinked:
            self._end_wanted(wanted, failure)
        else:
            self._is_lost(wanted, failure)
            self._go_on(wanted)

    def _is_lost(self, wanted: _Wanted, reason: LinkError) -> None:
        wanted.is_lost(reason, 0.0 if self._policy is None else self._policy.max_delay)

    def _tell_end(self, link: Link, otherwise: LinkError) -> None:
        reason = otherwise if link.session.failure is None else link.session.copy_of_failure()
        phase = LinkPhase.UNLINKED if link.life.was_unlinked else LinkPhase.LOST
        self._changes.tell(LinkChange(link.cluster_id, phase, link.generation, reason))

    def _end_wanted(self, wanted: _Wanted, why: LinkError) -> None:
        del self._wanted[wanted.cluster_id]
        self._drop(wanted, why)

    # ---- one link ----

    def _tell(
        self,
        phase: LinkPhase,
        cluster_id: int,
        reason: LLMException | None = None,
        attempt: int = 0,
        next_delay: float | None = None,
    ) -> None:
        generation = self._totals.generations[cluster_id]
        self._changes.tell(LinkChange(cluster_id, phase, generation, reason, attempt, next_delay))

    def _is_linked(self, cluster_id: int) -> bool:
        """Return True if there is a link that both ends have, and that this one may use."""
        link = self._engine.peek_link(cluster_id)
        return link is not None and link.life.is_usable and link.life.ownership.is_ours

    def _check_there(self, wanted: _Wanted) -> None:
        """Note that the link exists, even if it did not become ready just now.

        This end may have come to own a link of the peer's.
        """
        link = self._engine.peek_link(wanted.cluster_id)
        if wanted.lost_at is not None and link is not None and self._is_linked(wanted.cluster_id):
            self._is_there(wanted, link)

    def _is_there(self, wanted: _Wanted, link: Link) -> None:
        if wanted.lost_at is not None:
            self._totals.incidents.add(
                Incident.LINK_MADE_AGAIN,
                logger,
                "cluster %d is linked to cluster %d again, after %.1f s and %d attempts",
                *(self._engine.cluster_id, wanted.cluster_id, anyio.current_time() - wanted.lost_at, wanted.attempts),
            )
        wanted.is_there()
        link.remake_if_lost(True)
        if wanted.awaited is not None and wanted.awaited:
            self._engine.spawn(wanted.awaited.begin_all, link.transfers)

    def _drop(self, wanted: _Wanted, why: LinkError) -> None:
        if wanted.scope is not None:
            wanted.scope.cancel()
        if wanted.awaited is not None:
            wanted.awaited.fail(why)

    async def _stop(self, wanted: _Wanted, seconds: float) -> None:
        if wanted.scope is not None:
            wanted.scope.cancel()
            with anyio.move_on_after(seconds):
                await wanted.over.wait()

    def _go_on(self, wanted: _Wanted) -> None:
        """Start the link's task, if it needs one and has none."""
        is_wanted = self._wanted.get(wanted.cluster_id) is wanted and wanted.lost_at is not None
        if not is_wanted or wanted.pauses or wanted.scope is not None or self._is_linked(wanted.cluster_id):
            return
        scope = wanted.scope = Scope()
        wanted.over = Signal()
        if not self._engine.spawn(self._relink, wanted, scope):
            wanted.scope = None

    async def _relink(self, wanted: _Wanted, scope: Scope) -> None:
        """Try until it is linked, given up, or taken over by a caller."""
        flow = self._totals.relinking
        flow.running += 1
        try:
            with scope:
                while not await self._try_again(wanted):
                    pass
        finally:
            flow.running -= 1
            wanted.scope = None
            wanted.over.set()
        self._go_on(wanted)  # it broke again in this round of the loop, or a caller's pause ended before this task did

    async def _try_again(self, wanted: _Wanted) -> bool:
        """Wait, and make one attempt. Return True if no further one is needed or wanted."""
        # If the link breaks just now, its end starts this task again.
        if self._is_linked(wanted.cluster_id) or wanted.lost_at is None:
            return True
        delay = self._next_delay(wanted)
        if delay is None:
            self._give_up(wanted)
            return True
        wanted.attempts += 1
        self._tell(LinkPhase.RELINKING, wanted.cluster_id, wanted.reason, wanted.attempts, delay)
        with anyio.move_on_after(delay):
            await wanted.woken.wait()
        if self._is_linked(wanted.cluster_id):
            return True
        error = await self._attempt(wanted)
        if error is None or wanted.lost_at is None:  # the peer's own link came in the meantime
            return True
        wanted.reason = error
        # Without a proof, whatever answers at the address could end relinking. A name may lead elsewhere the next time.
        if error.is_proved and isinstance(error, (AuthError, IncompatiblePeer)) and is_address(wanted.address[0]):
            self._give_up(wanted)
            return True
        words = "cluster %d: the link to cluster %d at %s is still being re-established; attempt %d: %s"
        told = self._engine.cluster_id, wanted.cluster_id, host_port(*wanted.address), wanted.attempts, error
        # Logs attempts 1, 2, 4, 8, ...: the others would only repeat the reason.
        level = logging.DEBUG if wanted.attempts & wanted.attempts - 1 else logging.INFO
        self._totals.incidents.add(Incident.RELINK_FAILED, logger, words, *told, level=level)
        return False

    def _next_delay(self, wanted: _Wanted) -> float | None:
        """Return the seconds to wait before the next attempt; None if the time for attempts is over.

        The last attempt comes at the end of that time.
        """
        policy = self._policy
        if policy is None or wanted.lost_at is None:
            return None
        delay = policy.delay(wanted.attempts + 1 + wanted.brief)
        if policy.duration is None:
            return delay
        left = wanted.lost_at + policy.duration - anyio.current_time()
        return None if left <= 0 else min(delay, left)

    async def _attempt(self, wanted: _Wanted) -> LinkError | None:
        """Make one attempt; return its error, or None."""
        flow, lost_at = self._totals.relinking, wanted.lost_at
        try:
            await self._engine.link_once(wanted.address, wanted.cluster_id, wanted.seconds, UNPROVED_SECONDS)
        except LinkError as error:
            if error.status_code is not LLMStatusCode.LLM_ALREADY_LINK or not self._is_linked(wanted.cluster_id):
                flow.failed(error.status_code.name)
                return error
        except BaseException:
            flow.failed("CANCELLED")
            raise
        flow.took(anyio.current_time() - (lost_at or anyio.current_time()))
        self._check_there(wanted)
        return None

    def _give_up(self, wanted: _Wanted) -> None:
        """Stop trying: from now on only a call makes a link."""
        if self._wanted.get(wanted.cluster_id) is wanted:
            del self._wanted[wanted.cluster_id]
        self._totals.relinks_given_up += 1
        why = wanted.reason or LinkClosed("the link broke")
        self._totals.incidents.add(
            Incident.RELINK_GIVEN_UP,
            logger,
            "cluster %d gives up the link to cluster %d after %d attempts: %s",
            *(self._engine.cluster_id, wanted.cluster_id, wanted.attempts, why),
        )
        self._tell(LinkPhase.GIVEN_UP, wanted.cluster_id, why, wanted.attempts)
        if wanted.awaited is not None:
            wanted.awaited.fail(why)
