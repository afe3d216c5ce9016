"""Blocks of other workers' caches that are kept for this one, and pulled.

A request's blocks are a lease in each cache of the worker: one cache if all tensors have blocks of the same size. The
names of a request's leases follow from the first one's.

Of an order only this end's own prompt is trusted, because the rest comes through a router. The owner compares the
blocks, and a digest of the prompt, of the composition of its blocks, and of its own rank and the number of ranks. An
order that is wrong about any of these would put the right bytes into the wrong places.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, sha256
from time import perf_counter
from typing import Annotated

import anyio
from anyio.lowlevel import checkpoint_if_cancelled
from pydantic import FailFast, Field, Strict

from aiodatadist._adapters.block_shapes import MAX_CACHES, BlockShape, End, Layout, check_cut, parts_between
from aiodatadist._adapters.ended import Ended, Tell
from aiodatadist._adapters.hold_messages import Held
from aiodatadist._adapters.holds import Holds
from aiodatadist._adapters.meaning import Difference, differences
from aiodatadist._adapters.peer_links import PeerAddress, PeerLinks
from aiodatadist._adapters.peers import NotAPeer
from aiodatadist._cache.task import CacheTask
from aiodatadist._cache_manager import CacheManager
from aiodatadist._concurrency.scope import Scope
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._concurrency.together import together
from aiodatadist._counting import Incident, Incidents
from aiodatadist._values.descriptors import Cache
from aiodatadist._values.digests import DIGEST_BYTES, LeaseDigests
from aiodatadist._values.foreign import printable
from aiodatadist._values.lease_ticket import LeaseTicket
from aiodatadist._values.selection import BlockParts
from aiodatadist.errors import (
    IncompatiblePeer,
    LeaseMismatch,
    LinkTimeout,
    LLMException,
    ParamInvalid,
    PeerLost,
    StuckError,
)

logger = logging.getLogger(__name__)


class WorkerAddress(PeerAddress):
    """The place of a worker's blocks, as JSON has it.

    Attributes:
        cache_ids: one for each size of a block.
        layout: properties that must be the same at both ends, in words and numbers. Those in :data:`CUTS` may differ if
            both have a ``shape``.
        shape: the composition of its blocks.
    """

    cache_ids: Annotated[
        tuple[Annotated[int, Field(ge=1, lt=2**63)], ...],
        Strict(False),
        Field(min_length=1, max_length=MAX_CACHES),
        FailFast(),
    ]
    layout: Layout
    shape: BlockShape | None = None


CUTS = frozenset({"block_size", "heads", "tensor_parallel_size"})
"""Properties that may differ between two ends that pull."""

LINKED_AT_A_TIME = 8
"""Most workers of a peer that are linked at a time for one order, so that an offer costs no more dials than that."""
RELEASED_AT_A_TIME = 8
"""Most workers of a peer that are told at a time that their blocks are not needed."""


@dataclass(frozen=True)
class PullOrder:
    """An order to pull blocks that a peer keeps.

    Attributes:
        request: the engine's name for it.
        sources: the peer's workers that have the blocks, by rank.
        lease: name of the lease there.
        blocks: all blocks of the lease, in order. The peer refuses the pull if the lease has others; this end does if
            it has no room for all from ``first`` on.
        into: the local blocks; if blocks have the same size, the same number as there are from ``first`` on.
        prompt_digest: digest of the tokens of this end's own request that the lease's blocks hold. The peer refuses the
            pull if its request had others, because nothing that a router carries is trusted.
        first: index of the first of ``blocks`` that is wanted.
        skip: unwanted tokens at the beginning of that block.
        tokens: number of wanted tokens; None for as many as both have room for.
        takers: number of requests that may take the blocks.
    """

    request: str
    sources: tuple[WorkerAddress, ...]
    lease: str
    blocks: tuple[int, ...]
    into: tuple[int, ...]
    prompt_digest: bytes
    first: int = 0
    skip: int = 0
    tokens: int | None = None
    takers: int = 1

    @property
    def kept(self) -> KeptOrder:
        """The lease that it pulls."""
        return KeptOrder(self.request, self.sources, self.lease, self.blocks, self.prompt_digest, self.takers)


@dataclass(frozen=True)
class KeptOrder:
    """An order about a lease that a request holds, or lets go of. The fields are those of a :class:`PullOrder`."""

    request: str
    sources: tuple[WorkerAddress, ...]
    lease: str
    blocks: tuple[int, ...]
    prompt_digest: bytes
    takers: int = 1


@dataclass(frozen=True)
class _Portion:
    """A worker's portion of an order.

    ``parts``: by cache, made once the worker has confirmed the order; None for whole blocks. ``prompt_digest``: as that
    worker keeps it.
    """

    source: WorkerAddress
    prompt_digest: bytes
    parts: tuple[Callable[[], BlockParts], ...] | None
    takers: int


def prompt_as_kept(
    prompt_digest: bytes,
    layout: Mapping[str, str | int],
    shape: BlockShape | None,
    rank: int,
    ranks: int,
    takers: int = 1,
) -> bytes:
    """Return the digest that a worker compares with a peer's: of the prompt, and of how the worker's blocks hold it.

    ``takers`` is in it, too: how many requests may take the blocks is the owner's word, and not a router's.
    """
    parts = [layout, None if shape is None else shape.model_dump(mode="json"), rank, ranks, *([takers] * (takers > 1))]
    made = blake2b(prompt_digest, digest_size=DIGEST_BYTES, person=b"adist layout")
    made.update(json.dumps(parts, sort_keys=True).encode())
    return made.digest()


def _check_room(order: PullOrder, most: int) -> None:
    """Raise ParamInvalid if there are more blocks from ``first`` on than this end has room for.

    An order keeps their numbers while it waits, and only this end's own blocks bound them.
    """
    count = len(order.blocks) - order.first
    if count > most:
        raise ParamInvalid(f"{count} blocks are offered from number {order.first} on: there is only room for {most}")


def lease_name(lease: str, number: int) -> str:
    """Return the name of the lease in a cache."""
    return sha256(f"{lease} {number}".encode()).hexdigest()[: len(lease)] if number else lease


def tickets(sources: Sequence[WorkerAddress], lease: str, blocks: Sequence[int]) -> list[list[LeaseTicket]]:
    """Return the tickets for each of the sources' caches. Raises ValidationError if there is no such ticket."""
    if not sources:
        return []
    # validates the blocks once; the copies below do not
    cluster_id, cache_id = sources[0].cluster_id, sources[0].cache_ids[0]
    made = LeaseTicket(cluster_id=cluster_id, lease=lease, cache_id=cache_id, blocks=tuple(blocks), seconds=0.0)
    return [
        [
            made.model_copy(
                update={"cluster_id": source.cluster_id, "lease": lease_name(lease, number), "cache_id": cache_id}
            )
            for number, cache_id in enumerate(source.cache_ids)
        ]
        for source in sources
    ]


class _Failed(Exception):
    """Failed pulls of an order.

    Attributes:
        landed: number of its blocks, from the first, that have landed in all caches anyway.
        untold: workers that are not told that the blocks are not needed: they cannot be reached, or keep them for
            another peer.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.landed = blocks
        self.errors: list[LLMException] = []
        self.untold: set[int] = set()

    def add(self, error: LLMException, cluster_id: int) -> None:
        """Add the error of one pull."""
        self.errors.append(error)
        self.landed = min(self.landed, error.landed_blocks)
        if isinstance(error, (PeerLost, LinkTimeout, NotAPeer, LeaseMismatch)):
            self.untold.add(cluster_id)

    @property
    def outcome(self) -> str:
        """The word under which it is counted."""
        return "pull_refused" if any(isinstance(each, LeaseMismatch) for each in self.errors) else "pull_failed"

    @property
    def first(self) -> LLMException:
        """The first error."""
        return self.errors[0]


class LeasedBlocks:
    """The pulls of one worker. Every order is reported once.

    Args:
        caches: with the same number of blocks each.
        rank, ranks: of this worker among those that share the model's heads.
        pull_seconds: time limit for a request's blocks, waiting included.
        patience_seconds: seconds in which a peer may learn of its own finished request.
        link_seconds: time limit for telling a peer that its blocks are not needed.
        lose: called with the reason why the caches must no longer be used.
        accepted: names of properties that may differ from a peer's layout.
    """

    def __init__(
        self,
        manager: CacheManager,
        caches: Sequence[Cache],
        layout: dict[str, str | int],
        shape: BlockShape | None,
        rank: int,
        ranks: int,
        pull_seconds: float,
        patience_seconds: float,
        link_seconds: float,
        links: PeerLinks,
        holds: Holds,
        tasks: Spawner,
        tell: Tell,
        lose: Callable[[LLMException], object],
        accepted: Container[str],
        incidents: Incidents,
    ) -> None:
        self._manager = manager
        self._lose = lose
        self._accepted = accepted
        self._caches = list(caches)
        self._layout = layout
        self._shape = shape
        self._rank, self._ranks = rank, ranks
        self._pull_seconds = pull_seconds
        self._patience_seconds = patience_seconds
        self._link_seconds = link_seconds
        self._links = links
        self._holds = holds
        self._tasks = tasks
        self._tell = tell
        self._pulls: dict[str, Scope] = {}
        self._incidents = incidents

    # ---- holding ----

    def hold(self, order: KeptOrder, seconds: float) -> None:
        """Hold the lease of a request that waits, until it lets go. Without that the lease has ``seconds``."""
        self._holds.hold(order.request, self._held(order), seconds)

    def let_go(self, order: KeptOrder, *, has_taken: bool = False) -> None:
        """Hold a lease no longer. If other requests may take it, its owner is told that this one does not."""
        leases = self._held(order, has_taken=has_taken) if order.takers > 1 else ()
        self._holds.let_go(order.request, leases)

    def _held(self, order: KeptOrder, *, has_taken: bool = False) -> list[tuple[PeerAddress, Held]]:
        """Return what each worker that has some of the blocks is told of a request."""
        sources = order.sources
        share = max(1, self._ranks // len(sources))
        holder = int.from_bytes(sha256(order.request.encode()).digest()[:7], "big")
        found: list[tuple[PeerAddress, Held]] = []
        for rank in self._counterparts(sources):
            source = sources[rank]
            digest = prompt_as_kept(order.prompt_digest, source.layout, source.shape, rank, len(sources), order.takers)
            blocks, prompt = LeaseDigests.of(source.cache_ids[0], order.blocks, digest)
            held = Held(
                lease=order.lease, blocks=blocks, prompt=prompt, holder=holder, share=share, has_taken=has_taken
            )
            found.append((PeerAddress(cluster_id=source.cluster_id, host=source.host, port=source.port), held))
        return found

    def _say(self, kind: Incident, words: str, name: str, why: object) -> None:
        self._incidents.add(kind, logger, words, printable(name), why)

    # ---- pulling ----

    def pull(self, order: PullOrder) -> None:
        """Start to pull. Reported in ``received``."""
        if order.request in self._pulls:
            self._say(
                Incident.ORDER_REPEATED,
                "request %s: %s",
                order.request,
                "it is being pulled: a second order is ignored",
            )
            return
        scope = self._pulls[order.request] = Scope()
        times = perf_counter(), asyncio.get_running_loop().time() + self._pull_seconds
        start = partial(self._tasks.start_soon, self._pull, order, scope, *times)
        source = self._only_source(order)
        if source is None:
            start(None)
        else:
            self._links.line_up(source, order.request, scope, self._pull_seconds, start)

    def _only_source(self, order: PullOrder) -> WorkerAddress | None:
        """Return the worker that an order pulls from. None: there are several, or it cannot be carried out."""
        ranks = self._counterparts(order.sources)
        if len(ranks) != 1:
            return None
        try:
            return self._portion(order, ranks[0]).source
        except LLMException:
            return None  # its task says why

    def cancel(self, request: str) -> None:
        """Stop the pull of a request."""
        scope = self._pulls.get(request)
        if scope is not None:
            scope.cancel()
            self._links.leave_line(scope)

    async def _pull(
        self, order: PullOrder, scope: Scope, began: float, until: float, unlinked: LLMException | None
    ) -> None:
        """Pull, report the order whatever the outcome, and notify the owner if possible.

        ``unlinked`` is the reason why its only source is not linked, if the order stood in line.
        """
        nbytes, failed, outcome = 0, order.into, "pull_cancelled"
        untold: set[int] = set()
        try:
            with scope:
                await checkpoint_if_cancelled()  # nothing is dialled for one that was cancelled in line
                nbytes, failed, outcome = await self._carry_out(order, until, unlinked), (), "pull_done"
        except _Failed as failure:
            error, failed, untold = failure.first, order.into[failure.landed :], failure.untold
            outcome = failure.outcome
            self._say(Incident.PULL_FAILED, "request %s: its blocks cannot be pulled: %s", order.request, error)
        except LLMException as error:
            outcome = "pull_failed"
            self._say(Incident.PULL_FAILED, "request %s: its blocks cannot be pulled: %s", order.request, error)
        finally:
            self._pulls.pop(order.request, None)
            self._tell(lambda e: self._count(e, order, failed, nbytes, outcome, perf_counter() - began))
            self.let_go(order.kept, has_taken=outcome == "pull_done")
        if outcome != "pull_done":
            await self._release(order.kept, untold)

    @staticmethod
    def _count(
        ended: Ended, order: PullOrder, failed: tuple[int, ...], nbytes: int, outcome: str, seconds: float
    ) -> None:
        ended.came(order.request, outcome, failed)
        if nbytes:
            ended.counters["pulled_blocks"] += len(order.into)
            ended.counters["pulled_bytes"] += nbytes
            ended.took(seconds)

    async def _carry_out(self, order: PullOrder, until: float, unlinked: LLMException | None) -> int:
        """Pull the blocks; return the bytes that landed.

        Raises _Failed if some did not land, once all pulls have ended; IncompatiblePeer before anything starts.
        """
        portions = [self._portion(order, rank) for rank in self._counterparts(order.sources)]
        leases = tickets([portion.source for portion in portions], order.lease, order.blocks)
        failed, nbytes = _Failed(len(order.into)), 0
        few = anyio.Semaphore(LINKED_AT_A_TIME)

        async def pull_from(portion: _Portion, leases: list[LeaseTicket]) -> None:
            try:
                await self._link(portion.source, order.request, few, until, unlinked)
            except LLMException as error:
                failed.add(error, portion.source.cluster_id)
                return
            await together([partial(pull, portion, ticket, number) for number, ticket in enumerate(leases)])

        async def pull(portion: _Portion, ticket: LeaseTicket, number: int) -> None:
            nonlocal nbytes
            try:
                left = max(0.001, until - anyio.current_time())
                task = self._manager.pull_leased(
                    ticket,
                    self._caches[number],
                    order.into,
                    first=order.first,
                    prompt_digest=portion.prompt_digest,
                    parts=None if portion.parts is None else portion.parts[number],
                    takers=portion.takers,
                    deadline=left,
                    patience=self._patience_seconds,
                )
                came = await self._bytes_of(task)
                nbytes += came
            except LLMException as error:
                failed.add(error, portion.source.cluster_id)

        await together([partial(pull_from, *each) for each in zip(portions, leases, strict=True)])
        if failed.errors:
            raise failed
        return nbytes

    async def _link(
        self,
        source: WorkerAddress,
        request: str,
        few: anyio.Semaphore,
        until: float,
        unlinked: LLMException | None,
    ) -> None:
        """Wait for a link. Raises LLMException if there is none, or not in time."""
        with anyio.move_on_at(until):
            async with few:
                await self._links.link(source, request, unlinked)
            return
        raise LinkTimeout(f"no link to {source.place} within {self._pull_seconds:g} s")

    async def _bytes_of(self, task: CacheTask) -> int:
        """Return the bytes of a pull. Raises LLMException if it failed.

        If its blocks may be written to for ever, that is reported, whatever the outcome.
        """
        try:
            return (await task).bytes
        finally:
            error = task.exception()
            if isinstance(error, StuckError):
                self._lose(error)

    # ---- ranks ----

    def _counterparts(self, sources: Sequence[WorkerAddress]) -> range:
        """Return the ranks of a peer's workers that have some of this worker's heads."""
        theirs, mine = len(sources), self._ranks
        if theirs >= mine:
            each = theirs // mine
            return range(self._rank * each, (self._rank + 1) * each)
        first = self._rank * theirs // mine
        return range(first, min(first + 1, theirs))

    def _portion(self, order: PullOrder, rank: int) -> _Portion:
        """Return a worker's portion of an order.

        Raises IncompatiblePeer with both values, and ParamInvalid if the order has more blocks than there is room for.
        """
        mine, theirs, source = self._ranks, len(order.sources), order.sources[rank]
        digest = prompt_as_kept(order.prompt_digest, source.layout, source.shape, rank, theirs, order.takers)
        differing = self._differences(source)
        if not differing and mine == theirs:
            _check_room(order, len(order.into))
            return _Portion(source, digest, None, order.takers)
        here, there = self._shape, source.shape
        if not differing.keys() <= CUTS or here is None or there is None or here.axes != there.axes:
            named = differing or {"tensor_parallel_size": (mine, theirs)}
            texts = [f"{name} is {a} here and {b} at {source.place}" for name, (a, b) in sorted(named.items())]
            raise IncompatiblePeer(printable(", ".join(texts)))
        if max(mine, theirs) % min(mine, theirs) or here.heads * mine != there.heads * theirs:
            raise IncompatiblePeer(
                f"{here.heads} heads in each of {mine} workers here and {there.heads} in each of {theirs} at "
                f"{source.place}: one number of workers must be a multiple of the other, and the numbers of all heads equal"
            )
        target = End(here.tokens, range(here.heads * self._rank, here.heads * (self._rank + 1)))
        origin = End(there.tokens, range(there.heads * rank, there.heads * (rank + 1)))
        _check_room(order, -(-(len(order.into) * here.tokens + order.skip) // there.tokens))
        room = min(len(order.into) * here.tokens, (len(order.blocks) - order.first) * there.tokens - order.skip)
        tokens = room if order.tokens is None else min(room, order.tokens)
        parts = []
        for cache, axes in zip(self._caches, here.axes, strict=True):
            check_cut(origin, target, axes, source.place, order.skip)
            stride = cache.cache_desc.stride
            parts.append(partial(parts_between, origin, target, axes, stride, order.skip, tokens))
        return _Portion(source, digest, tuple(parts), order.takers * max(1, mine // theirs))

    def _differences(self, source: WorkerAddress) -> dict[str, Difference]:
        """Return the properties that differ here and there."""
        mine = {**self._layout, "caches": len(self._caches)}
        return differences(mine, {**source.layout, "caches": len(source.cache_ids)}, self._accepted)

    # ---- what is not needed ----

    def release(self, order: KeptOrder) -> None:
        """Tell a peer that its blocks are not needed, if possible."""
        self.let_go(order)
        self._tasks.start_soon(self._release, order)

    async def _release(self, order: KeptOrder, untold: Container[int] = ()) -> None:
        """Tell a few workers at a time, so that the claims of a router cost no more connections than that.

        Some are not told: workers that are no peers, those that are not linked and cannot be dialled now, and those
        that do not answer in time. Each releases its blocks anyway when their time is up. If other requests may take
        the blocks, a release ends nothing.
        """
        sources, lease = order.sources, order.lease
        ranks = self._counterparts(sources) if order.takers == 1 else ()
        told = [n for n in ranks if sources[n].cluster_id not in untold and self._links.may_tell(sources[n])]
        try:
            kept_there = tickets([sources[n] for n in told], lease, order.blocks)
        except ValueError as error:
            self._say(Incident.RELEASE_FAILED, "lease %s: its blocks are not released: %s", lease, printable(error))
            return
        waiting = iter(list(zip(told, kept_there, strict=True)))

        async def release() -> None:
            for rank, kept in waiting:
                source = sources[rank]
                digest = prompt_as_kept(order.prompt_digest, source.layout, source.shape, rank, len(sources))
                await self._release_one(source, kept, digest)

        # shielded: an order that was cancelled, too, keeps the owner's blocks until the owner is told or its lease expires
        with anyio.move_on_after(self._link_seconds, shield=True):
            await together([release] * min(RELEASED_AT_A_TIME, len(told)))

    async def _release_one(self, source: WorkerAddress, kept: Sequence[LeaseTicket], digest: bytes) -> None:
        try:
            await self._links.link_to_tell(source)
            for ticket in kept:
                await self._manager.release_lease(ticket, prompt_digest=digest)
        except ValueError as error:
            self._say(
                Incident.RELEASE_FAILED, "lease %s: its blocks are not released: %s", kept[0].lease, printable(error)
            )
        except LLMException as error:
            told = f"cluster {source.cluster_id} keeps its blocks: {error}"
            self._say(Incident.RELEASE_FAILED, "lease %s: %s", kept[0].lease, told)
