"""Blocks that this cluster keeps for a peer until the peer has pulled or released them, is lost, or takes too long.

A peer claims a lease while it begins to pull. If the claim arrives while the lease lasts, the blocks have been kept so far,
and from then on they are kept until the peer says how its pull ended. So a claim costs a pull no time.

::

    puller                                     owner
    claim    ->                                if the lease lasts, the blocks are kept until the pull's time is over
    reads the blocks meanwhile
             <-  claimed
    unclaim  ->   taken, released or failed    failed: as before the claim, another attempt may be made

A ticket travels through routers and clients, so its bearer may not be the peer that the blocks are for, and may have changed
it. The peer computes digests of the blocks that its ticket names and of its own prompt, and the owner compares them with the
lease's. If one differs the claim is refused, what was read is not used, and the lease stays for its true taker. Nor can a
release end the lease without the digests.

A puller that is killed loses its link. The end of the link ends the puller's claim, and the lease with ``PEER_LOST``: by then
the channels are closed, and nothing is read any longer.

The owner limits the time of a pull. ``claimed`` tells a peer that asked for more, and the peer fails what takes longer. A
peer is refused if its version is too old to be told.

Several peers may share the blocks, and each says how many they are. A lease is taken when all of them have the blocks. When
one of them does not want the lease, it ends for all as soon as those that pull have ended: they are workers of one engine.

If the owner itself says that several ``takers`` may come, they are different requests. One that does not want the blocks,
fails or is lost then ends nothing for the others: the lease ends when all have taken the blocks, with its time, or by its
owner.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from aiodatadist._concurrency.signal import Signal
from aiodatadist._config.quotas import DEFAULT_QUOTAS, Quotas
from aiodatadist._counting import Incident, Totals, guarded
from aiodatadist._device import give_way
from aiodatadist._link.control.early_claims import EarlyClaims, ReleasedNames
from aiodatadist._link.control.peer_claim import PeerClaim
from aiodatadist._link.control.peer_leases import SLACK_SECONDS
from aiodatadist._link.control.served_requests import KNOWN
from aiodatadist._values.digests import UNSAID, LeaseDigests, Refusal
from aiodatadist._values.durations import check_seconds
from aiodatadist._values.lease_ticket import LeaseTicket, new_lease_name
from aiodatadist._values.peer_budget import Budget
from aiodatadist.errors import ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._cache.table import Entry

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_REMEMBERED = 4096
"""The number of ended leases that are remembered, so that claims of them are refused at once."""


class LeaseEnd(StrEnum):
    """Why blocks are no longer kept.

    Attributes:
        TAKEN: all peers that share the blocks have them.
        RELEASED: a peer does not want them.
        PEER_LOST: the link to the peer that was pulling them ended.
        EXPIRED: no peer claimed them in time, or the peer that did sent nothing within the time of its pull.
        WITHDRAWN: this cluster took them back, or was finalized.
    """

    TAKEN = "taken"
    RELEASED = "released"
    PEER_LOST = "peer_lost"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"


class BlockLease:
    """Blocks of a cache that are kept for a peer. Returned by ``CacheManager.lease_blocks``.

    A lease does not protect the blocks from being overwritten: it tells this end's allocator when they may be used again. It
    belongs to the event loop of its cluster. Called elsewhere, its methods raise LLMException; in a forked child, ForkError.

    Attributes:
        name: the name by which peers claim the lease.
        blocks: the numbers of the blocks.
        ended: why the lease ended. While it is None, the blocks must not be used for anything else.
        refused: the number of claims that named other blocks or another prompt.
    """

    def __init__(
        self,
        name: str,
        cluster_id: int,
        entry: Entry,
        blocks: array[int],
        seconds: float,
        pull_seconds: float,
        check_here: Callable[[], None],
        prompt_digest: bytes | None,
        count_refusal: Callable[[Refusal], object],
        for_cluster: int | None = None,
        takers: int = 1,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._check_here = check_here
        self._count_refusal = count_refusal
        self._cluster_id = cluster_id
        self._cache_id = entry.cache_id
        self._over = Signal()
        self._callbacks: list[Callable[[BlockLease], object]] = []
        self._deadline = loop.time() + seconds
        self._timer = loop.call_at(self._deadline, self._close, LeaseEnd.EXPIRED)
        self._pull_seconds = pull_seconds
        self._claims: dict[tuple[object, int], PeerClaim] = {}
        # numbers of claims that have ended, by peer: a lost answer makes the peer repeat a claim, which must not count again
        self._past: defaultdict[object, dict[int, None]] = defaultdict(dict)
        self._takers = self._taken = 0
        self._for_cluster = for_cluster
        self._requests = takers
        self._closed: LeaseEnd | None = None
        self.name = name
        self.blocks: Sequence[int] = blocks
        self._digests = LeaseDigests.of(entry.cache_id, blocks, prompt_digest)
        self.ended: LeaseEnd | None = None
        self.refused: int = 0

    def ticket(self) -> LeaseTicket:
        """Return what a peer needs to pull the blocks. Raises ParamInvalid if they can no longer be claimed."""
        self._check_here()
        if self._closed is not None:
            raise ParamInvalid(f"lease {self.name} is {self._closed}: there is nothing to pull")
        return LeaseTicket.model_construct(  # takes a third of the time: these values need no validation
            cluster_id=self._cluster_id,
            lease=self.name,
            cache_id=self._cache_id,
            blocks=tuple(self.blocks),
            seconds=max(self._deadline - asyncio.get_running_loop().time(), 0.0),
        )

    async def wait_ended(self) -> LeaseEnd:
        """Wait until the blocks may be used again, and return why. Cancelling the wait changes nothing."""
        self._check_here()
        await self._over.wait()
        assert self.ended is not None
        return self.ended

    def renew(self, timeout: float) -> bool:
        """Let peers begin within ``timeout`` seconds from now, whatever time they had. Return False if it is too late.

        A pull that is under way has its own time, and is unaffected.

        Raises:
            TypeError, ValueError, ParamInvalid: if ``timeout`` is not a number of seconds.
        """
        self._check_here()
        seconds = check_seconds(timeout, "timeout")
        if self._closed is not None:
            return False
        loop = asyncio.get_running_loop()
        self._timer.cancel()
        self._deadline = loop.time() + seconds
        self._timer = loop.call_at(self._deadline, self._close, LeaseEnd.EXPIRED)
        return True

    async def withdraw(self) -> LeaseEnd:
        """Take the blocks back, and wait until they may be used again.

        From now on no peer may claim them. A pull that is under way may finish within its own time limit. If cancelled, the
        blocks are taken back all the same.
        """
        self._check_here()
        self._close(LeaseEnd.WITHDRAWN)
        await give_way()
        return await self.wait_ended()

    def add_done_callback(self, callback: Callable[[BlockLease], object]) -> None:
        """Call ``callback`` on the event loop when the lease ends, or at once if it has ended.

        If the callback raises, the exception is logged and has no other effect.
        """
        self._check_here()
        if self.ended is None:
            self._callbacks.append(callback)
        else:
            self._tell(callback)

    # ---- by the peers ----

    def _claim(self, claim: PeerClaim) -> None:
        """Accept or refuse a peer's claim, and answer it.

        At most as many peers pull at a time as still have to take the blocks. A repeated claim counts once, and is refused
        when its pull has ended. A claim with other digests is refused, and changes nothing.
        """
        claim.why = (
            Refusal.ANOTHER_CLUSTER if self._is_for_another(claim.peer) else self._digests.refusal(claim.digests)
        )
        if claim.why is not None:
            if self._is_first(claim.peer, claim.call):
                self.refused += 1
                self._count_refusal(claim.why)
            claim.answer(False)
            return
        known = self._claims.get((claim.peer, claim.call))
        if known is not None:
            known.answer(True)  # the answer carries the limit that the first one had
            return
        if claim.call in self._past.get(claim.peer, ()):
            claim.answer(False)
            return
        takers = self._takers or claim.takers
        # each of the owner's takers is one or several workers, which all pull
        is_kept = self._closed is None and claim.takers == takers and claim.takers % self._requests == 0
        is_kept &= self._taken + len(self._claims) < takers
        # An older peer cannot be told of a shorter limit, and would use what it reads after that.
        is_kept &= claim.is_limited or claim.seconds <= self._pull_seconds
        if is_kept:
            claim.seconds = min(claim.seconds, self._pull_seconds)
            self._takers = takers
            self._claims[claim.peer, claim.call] = claim
            claim.within(claim.seconds + SLACK_SECONDS, lambda: self._drop(claim, LeaseEnd.EXPIRED))
        claim.answer(is_kept)

    def _unclaim(self, peer: object, call: int, why: LeaseEnd | None, digests: LeaseDigests = UNSAID) -> None:
        """End a peer's claim, because its pull ended or because it does not want the blocks.

        A peer that does not pull cannot end what another one pulls, and only a peer with the lease's digests can end the
        lease.

        Args:
            why: how the pull ended. None if it failed: the peer may claim the blocks again.
        """
        claim = self._claims.get((peer, call))
        if claim is not None:
            self._drop(claim, why)
            return
        if call and not self._is_first(peer, call):
            return  # a repeated message
        if self._digests.refusal(digests) is not None or self._is_for_another(peer):
            return
        if why is not None and self._requests == 1 and (not self._claims or self._takers > 1):
            self._close(why)

    def _is_for_another(self, peer: object) -> bool:
        """Return True if the lease is for one cluster, and ``peer`` is the link to another one."""
        return self._for_cluster is not None and getattr(peer, "cluster_id", self._for_cluster) != self._for_cluster

    def _is_first(self, peer: object, call: int) -> bool:
        """Note that a claim of this number has ended. Return True if none was known to have ended before."""
        past = self._past[peer]
        is_first = call not in past
        past[call] = None
        if len(past) > KNOWN:
            del past[next(iter(past))]
        return is_first

    def _peer_gone(self, peer: object) -> None:
        """End the claims of a peer whose link has ended."""
        for claim in [claim for claim in self._claims.values() if claim.peer is peer]:
            self._drop(claim, LeaseEnd.PEER_LOST)
        self._past.pop(peer, None)

    def _drop(self, claim: PeerClaim, why: LeaseEnd | None) -> None:
        """End a claim, because its pull has ended. ``why`` is None if the pull failed, and may be tried again."""
        claim.settled()
        del self._claims[claim.peer, claim.call]
        self._is_first(claim.peer, claim.call)
        if why is LeaseEnd.TAKEN:
            self._taken += 1
            # the others still read these blocks
            if self._taken < self._takers:
                why = None
        elif self._requests > 1:
            why = None  # it ends nothing for other requests
        if why is not None:
            self._closed = why
        if not self._claims and not self._taken:
            self._takers = 0  # the next claim sets it
        if self._closed is not None and not self._claims:
            self._end(self._closed)

    def _close(self, why: LeaseEnd) -> None:
        """Accept no further claim. The lease ends with those that there are."""
        self._closed = self._closed or why
        if not self._claims:
            self._end(self._closed)

    def _end(self, why: LeaseEnd) -> None:
        if self.ended is not None:
            return
        self.ended = why
        self._closed = self._closed or why
        self._timer.cancel()
        for claim in self._claims.values():
            claim.settled()
        self._claims.clear()
        self._past.clear()
        self._over.set()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._tell(callback)

    def _tell(self, callback: Callable[[BlockLease], object]) -> None:
        guarded(partial(callback, self), logger, "%r: a done callback failed", self)

    def __repr__(self) -> str:
        state = self.ended or ("being pulled" if self._claims else "kept")
        return f"<BlockLease {self.name}: {len(self.blocks)} blocks of cache {self._cache_id}, {state}>"


class BlockLeases:
    """The block leases of one cluster, on its event loop."""

    def __init__(self, totals: Totals, check_here: Callable[[], None], quotas: Quotas = DEFAULT_QUOTAS) -> None:
        self._check_here = check_here
        self._totals = totals
        self._lasting: dict[str, BlockLease] = {}
        self._past: OrderedDict[str, None] = OrderedDict()
        self._released: ReleasedNames[tuple[str, LeaseDigests]] = ReleasedNames(quotas.released_names)
        self._warned: OrderedDict[int, None] = OrderedDict()  # of peers of older versions
        self._early = EarlyClaims(quotas.early_claims)

    def __len__(self) -> int:
        return len(self._lasting)

    def open(
        self,
        cluster_id: int,
        entry: Entry,
        blocks: array[int],
        seconds: float,
        pull_seconds: float,
        name: str | None = None,
        prompt_digest: bytes | None = None,
        for_cluster: int | None = None,
        takers: int = 1,
    ) -> BlockLease:
        """Open a lease on blocks of a cache. Raises ParamInvalid if there is a lease of this name.

        Args:
            seconds: how long the lease waits for a claim.
            pull_seconds: how long one pull may take.
            name: the name of the lease; a new one if it is None.
            for_cluster: the only cluster that may claim it, or release it; None if each may.
            takers: the number of requests that may take the blocks.
        """
        name = name or new_lease_name()
        if name in self._lasting:
            raise ParamInvalid(f"name is {name}: a lease of this name exists already")
        lease = self._lasting[name] = BlockLease(
            name,
            cluster_id,
            entry,
            blocks,
            seconds,
            pull_seconds,
            self._check_here,
            prompt_digest,
            self.count,
            for_cluster,
            takers,
        )
        self._totals.leases_opened += 1
        lease.add_done_callback(self._ended)
        if name in self._past:
            lease._close(LeaseEnd.RELEASED)
        for digests in (lease._digests, UNSAID) if for_cluster is None else ():  # it may not be that cluster's release
            if (name, digests) in self._released:  # by its peer, before the lease was opened
                lease._unclaim(None, 0, LeaseEnd.RELEASED, digests)
        for claim in self._early.take(name):
            lease._claim(claim)
        return lease

    def _ended(self, lease: BlockLease) -> None:
        if lease.ended is not None:
            self._totals.leases_ended[lease.ended.value] += 1
        self._lasting.pop(lease.name, None)
        _remember(self._past, lease.name)

    def count(self, why: Refusal) -> None:
        """Count a claim that was refused."""
        self._totals.claims_refused[why.name.lower()] += 1

    def warn_of(self, cluster_id: int, version: str) -> None:
        """Warn, once for each peer, that a peer's version is too old to compare which blocks are pulled."""
        if cluster_id not in self._warned:
            words = "cluster %d has version %s of the protocol: which blocks are kept is not compared; update it"
            self._totals.incidents.add(Incident.PEER_OUTDATED, logger, words, cluster_id, version)
        _remember(self._warned, cluster_id)

    def claim(self, name: str, claim: PeerClaim, patience: float) -> None:
        """Pass a claim on to its lease, or let it wait for a lease that is not open yet.

        If too many of the peer's claims wait, the oldest one is refused: it has had the longest time, and an honest claim
        needs to wait only as long as its lease is late.

        Args:
            patience: seconds for which the peer wants the claim to wait; this end's limit is ``EARLY_CLAIM_SECONDS``.
        """
        lease = self._lasting.get(name)
        if lease is not None:
            lease._claim(claim)
        elif self._early.is_known(claim):
            return  # a repeated message: the first one waits
        elif name in self._past or (name, claim.digests) in self._released or not patience:
            claim.answer(False)
        else:
            if (oldest := self._early.make_room(claim.peer)) is not None:
                self._totals.budget_refusals[Budget.EARLY_CLAIMS.value] += 1
                oldest.answer(False)
            self._early.add(name, claim, patience)

    def unclaim(self, peer: object, call: int, name: str, why: LeaseEnd | None, digests: LeaseDigests = UNSAID) -> None:
        """End a peer's claim of a lease, as the lease's own method does.

        If there is no such lease yet, remember that the peer released it.
        """
        self._early.drop(peer, call)
        lease = self._lasting.get(name)
        if lease is not None:
            lease._unclaim(peer, call, why, digests)
        elif why is not None:
            self._released.add(peer, (name, digests))

    def peer_gone(self, peer: object) -> None:
        """End all claims of a peer whose link has ended."""
        self._early.peer_gone(peer)
        self._released.peer_gone(peer)
        # a copy: leases that end leave the table
        for lease in list(self._lasting.values()):
            lease._peer_gone(peer)

    def end(self) -> None:
        """End all leases and claims, because the cluster is finalized."""
        self._early.end()
        for lease in list(self._lasting.values()):
            lease._end(LeaseEnd.WITHDRAWN)


def _remember(known: OrderedDict[T, None], this: T) -> None:
    """Remember a key. If there are too many, forget the oldest."""
    known[this] = None
    if len(known) > MAX_REMEMBERED:
        known.popitem(last=False)
