"""The blocks of finished requests that one worker keeps for other engines.

A request's blocks are a lease in each cache of the worker. Its time is short, because a router may never bring the offer
to another engine. As soon as an engine has the offer, it holds the lease, and says so from time to time, while its own
request waits for room. The lease lives as long as a holder does: the end of a holder's link ends what it held within
seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from aiodatadist._adapters.ended import Tell
from aiodatadist._adapters.hold_messages import Held
from aiodatadist._adapters.lease_holders import LeaseHolders
from aiodatadist._adapters.peer_links import LinkedPeer
from aiodatadist._adapters.pull_orders import lease_name
from aiodatadist._cache_manager import CacheManager
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._counting import Incident, Incidents
from aiodatadist._link import BlockLease, LeaseEnd
from aiodatadist._values.descriptors import Cache
from aiodatadist._values.digests import LeaseDigests
from aiodatadist._values.foreign import printable
from aiodatadist.errors import LLMException

logger = logging.getLogger(__name__)

SHORTEST_SECONDS = 0.1
"""Least seconds that a lease has after its last holder is gone."""


class _Kept:
    """The leases of one request. Their end is reported once, when all have ended.

    Attributes:
        digests: of the first cache's blocks and of the prompt: the holder of the lease must have them.
        until: the time on the loop's clock up to which holders can prolong the lease.
    """

    def __init__(
        self,
        request: str,
        digests: LeaseDigests,
        leases: Sequence[BlockLease],
        seconds: float,
        until: float,
        takers: int,
    ) -> None:
        self.request = request
        self.digests = digests
        self.until = until
        self.holders = LeaseHolders(takers)
        self._seconds = seconds
        self.leases = list(leases)
        self._how = LeaseEnd.TAKEN
        self._left = len(leases)

    def renew(self) -> None:
        """Start the time of the leases again."""
        self.within(min(self._seconds, self.until - asyncio.get_running_loop().time()))

    def within(self, seconds: float) -> None:
        """Let peers begin within these seconds from now, if they are any."""
        if seconds > 0:
            for lease in self.leases:
                lease.renew(seconds)

    def ended(self, lease: BlockLease) -> LeaseEnd | None:
        """Note the end of one lease; return how all have ended once they have."""
        assert lease.ended is not None
        if lease.ended is LeaseEnd.WITHDRAWN and self.holders.is_over and not self.holders.has_taken:
            self._how = LeaseEnd.RELEASED
        elif self.holders.has_taken:
            self._how = LeaseEnd.TAKEN
        elif lease.ended is not LeaseEnd.TAKEN:
            self._how = lease.ended
        self._left -= 1
        return None if self._left else self._how


class KeptLeases:
    """The leases that one worker keeps. Every request is reported once.

    Args:
        caches: with the same number of blocks each.
        groups: by cache: the group of layers whose blocks it has; None if all have the same ones.
        pull_seconds: time limit of a peer's pull.
        hold_seconds: seconds for which peers can prolong a lease, from its beginning.
        patience_seconds: seconds that further requests have to come for a lease whose last holder is gone.
    """

    def __init__(
        self,
        manager: CacheManager,
        caches: Sequence[Cache],
        pull_seconds: float,
        hold_seconds: float,
        patience_seconds: float,
        tasks: Spawner,
        tell: Tell,
        incidents: Incidents,
        groups: Sequence[int] | None = None,
    ) -> None:
        self._manager = manager
        self._caches = caches
        self._groups = groups
        self._pull_seconds = pull_seconds
        self._hold_seconds = hold_seconds
        self._grace = max(patience_seconds, SHORTEST_SECONDS)
        self._tasks = tasks
        self._tell = tell
        self._incidents = incidents
        self._kept: dict[str, _Kept] = {}

    def keep(
        self,
        request: str,
        lease: str,
        blocks: list[int],
        digest: bytes,
        seconds: float,
        takers: int,
        others: Sequence[list[int]] = (),
    ) -> None:
        """Lease a request's blocks. Reported in ``sent``.

        Args:
            blocks: those of the first group of layers; ``others`` has those of the others.
            digest: that which peers must have, of the prompt and of how the blocks hold it.
            takers: the number of requests of other engines that may take the blocks.
        """
        leases: list[BlockLease] = []
        try:
            named = [(n, cache, self._of_group(n, (blocks, *others))) for n, cache in enumerate(self._caches)]
            for number, cache, mine in [each for each in named if each[2]] or named:
                name, limit = lease_name(lease, number), self._pull_seconds
                made = self._manager.lease_blocks(
                    cache, mine, seconds, name=name, pull_timeout=limit, prompt_digest=digest, takers=takers
                )
                leases.append(made)
        except (LLMException, TypeError, ValueError) as error:
            words = "request %s: its blocks are not kept: %s"
            self._incidents.add(Incident.KEEP_FAILED, logger, words, printable(request), error)
            for made in leases:
                self._tasks.start_soon(made.withdraw)
            self._tell(lambda ended: ended.let_go(request, "lease_failed"))
            return
        _, cache, mine = next(each for each in named if each[2])
        digests = LeaseDigests.of(cache.cache_id, mine, digest)
        until = asyncio.get_running_loop().time() + max(self._hold_seconds, seconds)
        kept = self._kept[lease] = _Kept(request, digests, leases, seconds, until, takers)
        for made in leases:
            made.add_done_callback(partial(self._ended, lease, kept))

    def _of_group(self, number: int, blocks: Sequence[list[int]]) -> list[int]:
        """Return the blocks of a cache's group; none if the request has none of them."""
        group = 0 if self._groups is None else self._groups[number]
        return blocks[group] if group < len(blocks) else []

    def _ended(self, name: str, kept: _Kept, lease: BlockLease) -> None:
        if lease.refused:
            self._tell(lambda ended: ended.counters.update(claims_refused=lease.refused))
        how = kept.ended(lease)
        if how is not None:
            self._kept.pop(name, None)
            self._tell(lambda ended: ended.let_go(kept.request, f"lease_{how}"))

    def held(self, peer: LinkedPeer, held: Sequence[Held]) -> None:
        """Prolong the leases that a peer holds. Those that it does not know by their digests are left alone."""
        for each in held:
            kept = self._of(each)
            if kept is not None and kept.holders.hold(peer, each.holder):
                kept.renew()

    def let_go(self, peer: LinkedPeer, held: Sequence[Held]) -> None:
        """Note that requests of a peer have ended. A lease ends with the last one that may take it."""
        for each in held:
            kept = self._of(each)
            if kept is None:
                continue
            if kept.holders.let_go(peer, each.holder, each.share, has_taken=each.has_taken):
                for lease in kept.leases:
                    self._tasks.start_soon(lease.withdraw)
            elif kept.holders.are_none and not kept.holders.is_over:
                kept.within(self._grace)  # those that are missing come at the same time, or never

    def _of(self, held: Held) -> _Kept | None:
        """Return what is kept under a name, if its digests are these."""
        kept = self._kept.get(held.lease)
        return kept if kept is not None and kept.digests == (held.blocks, held.prompt) else None

    def lost(self, peer: LinkedPeer) -> None:
        """End what only this peer held, unless another engine comes for it soon: its link has ended."""
        for kept in self._kept.values():
            if kept.holders.lost(peer):
                kept.within(self._grace)
