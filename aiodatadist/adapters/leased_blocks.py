"""Blocks of a worker's caches that are kept for one peer, and pulled by it.

Who owns what
    A request's blocks are a lease in each cache of the worker: one cache where all tensors have blocks of the same size. The
    names of a request's leases follow from the first one's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from time import perf_counter

import anyio
from pydantic import Field

from aiodatadist.adapters.ended import Ended, Tell
from aiodatadist.adapters.peer_links import PeerAddress, PeerLinks
from aiodatadist.cache_manager import CacheManager
from aiodatadist.concurrency.scope import Scope
from aiodatadist.concurrency.spawner import Spawner
from aiodatadist.errors import IncompatiblePeer, LinkTimeout, LLMException, PeerLost
from aiodatadist.link import BlockLease, LeaseEnd
from aiodatadist.values.descriptors import Cache
from aiodatadist.values.lease_ticket import LeaseTicket

logger = logging.getLogger(__name__)


class WorkerAddress(PeerAddress):
    """Where a worker's blocks are, as JSON carries it.

    Attributes:
        cache_ids: one for each size of a block.
        layout: what has to be the same at both ends, in words and numbers.
    """

    cache_ids: tuple[int, ...] = Field(min_length=1)
    layout: dict[str, str | int]


@dataclass(frozen=True)
class PullOrder:
    """Blocks that a peer keeps, to be pulled.

    Attributes:
        request: the engine's name for it.
        source: where they are.
        lease: their lease's name there.
        blocks, into: their numbers there, and the local ones, as many.
    """

    request: str
    source: WorkerAddress
    lease: str
    blocks: tuple[int, ...]
    into: tuple[int, ...]


def lease_name(lease: str, number: int) -> str:
    """Of the lease in a cache."""
    return sha256(f"{lease} {number}".encode()).hexdigest()[: len(lease)] if number else lease


def tickets(source: WorkerAddress, lease: str, blocks: Sequence[int]) -> list[LeaseTicket]:
    """For each of the source's caches."""
    return [
        LeaseTicket(
            cluster_id=source.cluster_id,
            lease=lease_name(lease, number),
            cache_id=cache_id,
            blocks=tuple(blocks),
            seconds=0.0,
        )
        for number, cache_id in enumerate(source.cache_ids)
    ]


class _Kept:
    """The leases of one request. ``over`` is told once, when all have ended."""

    def __init__(self, request: str, count: int, tell: Tell) -> None:
        self._request = request
        self._left = count
        self._tell = tell
        self._how = LeaseEnd.TAKEN

    def ended(self, lease: BlockLease) -> None:
        if lease.ended is not None and lease.ended is not LeaseEnd.TAKEN:
            self._how = lease.ended
        self._left -= 1
        if self._left == 0:
            self._tell(lambda ended: ended.let_go(self._request, f"lease_{self._how}"))


class LeasedBlocks:
    """One worker's. Every order comes out once.

    Args:
        caches: with as many blocks each.
        pull_seconds: that a request's blocks may take, whatever they wait for.
        patience_seconds: in which a peer may hear of its own finished request.
        link_seconds: that telling a peer may take that its blocks are not needed.
    """

    def __init__(
        self,
        manager: CacheManager,
        caches: Sequence[Cache],
        layout: dict[str, str | int],
        pull_seconds: float,
        patience_seconds: float,
        link_seconds: float,
        links: PeerLinks,
        tasks: Spawner,
        tell: Tell,
    ) -> None:
        self._manager = manager
        self._caches = list(caches)
        self._layout = layout
        self._pull_seconds = pull_seconds
        self._patience_seconds = patience_seconds
        self._link_seconds = link_seconds
        self._links = links
        self._tasks = tasks
        self._tell = tell
        self._pulls: dict[str, Scope] = {}

    # ---- keeping ----

    def keep(self, request: str, lease: str, blocks: list[int], seconds: float) -> None:
        """It comes out in ``sent``."""
        millis, leases = max(1, round(1000 * seconds)), []
        try:
            for number, cache in enumerate(self._caches):
                leases.append(self._manager.lease_blocks(cache, blocks, millis, name=lease_name(lease, number)))
        except LLMException as error:
            logger.warning("request %s: its blocks are not kept: %s", request, error)
            for made in leases:
                self._tasks.start_soon(made.withdraw)
            self._tell(lambda ended: ended.let_go(request, "lease_failed"))
            return
        kept = _Kept(request, len(leases), self._tell)
        for made in leases:
            made.add_done_callback(kept.ended)

    # ---- pulling ----

    def pull(self, order: PullOrder) -> None:
        """It comes out in ``received``."""
        scope = self._pulls[order.request] = Scope()
        self._tasks.start_soon(self._pull, order, scope)

    def cancel(self, request: str) -> None:
        scope = self._pulls.get(request)
        if scope is not None:
            scope.cancel()

    async def _pull(self, order: PullOrder, scope: Scope) -> None:
        """Whatever happens, the order comes out, and the owner is told if it can be."""
        began, is_here, is_reachable, outcome = perf_counter(), False, True, "pull_cancelled"
        try:
            with scope:
                await self._carry_out(order)
                is_here, outcome = True, "pull_done"
        except LLMException as error:
            outcome, is_reachable = "pull_failed", not isinstance(error, (PeerLost, LinkTimeout))
            logger.warning("request %s: its blocks cannot be pulled: %s", order.request, error)
        finally:
            self._pulls.pop(order.request, None)
            self._tell(lambda e: self._count(e, order, is_here, outcome, perf_counter() - began))
        if not is_here and is_reachable:
            await self._release(order.source, order.lease)

    def _count(self, ended: Ended, order: PullOrder, is_here: bool, outcome: str, seconds: float) -> None:
        ended.came(order.request, outcome, () if is_here else order.into)
        if is_here:
            per_block = sum(cache.cache_desc.num_tensors * cache.cache_desc.stride for cache in self._caches)
            ended.counters["pulled_blocks"] += len(order.into)
            ended.counters["pulled_bytes"] += len(order.into) * per_block
            ended.took(seconds)

    async def _carry_out(self, order: PullOrder) -> None:
        """Raises LLMException: the first of the caches' that failed, when all have ended."""
        self._check_layout(order.source)
        await self._links.link(order.source)
        failures: list[LLMException] = []

        async def pull(ticket: LeaseTicket, cache: Cache) -> None:
            try:
                await self._manager.pull_leased(
                    ticket,
                    cache,
                    order.into,
                    timeout_in_millis=round(1000 * self._pull_seconds),
                    patience_in_millis=round(1000 * self._patience_seconds),
                )
            except LLMException as error:
                failures.append(error)

        async with anyio.create_task_group() as group:
            for ticket, cache in zip(tickets(order.source, order.lease, order.blocks), self._caches, strict=True):
                group.start_soon(pull, ticket, cache)
        if failures:
            raise failures[0]

    def _check_layout(self, source: WorkerAddress) -> None:
        """Raises IncompatiblePeer: names both values."""
        mine_of = {**self._layout, "caches": len(self._caches)}
        theirs_of = {**source.layout, "caches": len(source.cache_ids)}
        for name in mine_of.keys() | theirs_of.keys():
            mine, theirs = mine_of.get(name), theirs_of.get(name)
            if mine != theirs:
                raise IncompatiblePeer(f"{name} is {mine} here and {theirs} at {source.place}")

    def release(self, source: WorkerAddress, lease: str) -> None:
        """Tell a peer that its blocks are not needed, as well as that is possible."""
        self._tasks.start_soon(self._release, source, lease)

    async def _release(self, source: WorkerAddress, lease: str) -> None:
        """As well as that is possible: the owner gives its blocks back in any case, when their time is over."""
        with anyio.move_on_after(self._link_seconds, shield=True):
            try:
                await self._links.link(source)
                for ticket in tickets(source, lease, (0,)):
                    await self._manager.release_lease(ticket)
            except LLMException as error:
                logger.warning("cluster %d keeps the blocks of lease %s: %s", source.cluster_id, lease, error)
