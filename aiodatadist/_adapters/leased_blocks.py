"""Blocks of other workers' caches that are kept for this one, and pulled.

A request's blocks are a lease in each plane of the worker's memory: one plane if all tensors have blocks of the same size,
and all layers the same ones. The names of a request's leases follow from the first one's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from hashlib import sha256
from time import perf_counter

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from aiodatadist._adapters.cuts import check_cut, parts_of
from aiodatadist._adapters.ended import Ended, Tell
from aiodatadist._adapters.hold_messages import Held
from aiodatadist._adapters.holds import Holds
from aiodatadist._adapters.kv_cache import KvCache
from aiodatadist._adapters.meaning import Difference, differences
from aiodatadist._adapters.peer_links import PeerAddress, PeerLinks
from aiodatadist._adapters.peers import NotAPeer
from aiodatadist._adapters.plans import Left, Plan, Pull, plan
from aiodatadist._adapters.pull_orders import (
    GroupOrder,
    KeptOrder,
    PullOrder,
    Tickets,
    WorkerAddress,
    prompt_as_kept,
    tickets,
    turn_of,
)
from aiodatadist._adapters.regions import Memory
from aiodatadist._cache.task import CacheTask
from aiodatadist._cache_manager import CacheManager
from aiodatadist._concurrency.scope import Scope
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._concurrency.together import together
from aiodatadist._counting import Incident, Incidents
from aiodatadist._values.descriptors import Cache
from aiodatadist._values.digests import LeaseDigests
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


LINKED_AT_A_TIME = 8
"""Most workers of a peer that are linked at a time for one order, so that an offer costs no more dials than that."""
RELEASED_AT_A_TIME = 8
"""Most workers of a peer that are told at a time that their blocks are not needed."""


def _check_room(group: GroupOrder, most: int) -> None:
    """Raise ParamInvalid if there are more blocks from ``first`` on than this end has room for.

    An order keeps their numbers while it waits, and only this end's own blocks bound them.
    """
    count = len(group.blocks) - group.first
    if count > most:
        raise ParamInvalid(f"{count} blocks are offered from number {group.first} on: there is only room for {most}")


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
        kv: what the caches are; None if they are not pulled.
        rank, ranks: of this worker among those of its engine.
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
        kv: KvCache | None,
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
        self._memory = None if kv is None else kv.memory
        self._mates = () if kv is None else kv.mates
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
        leases = self._held(order, has_taken=has_taken, is_over=True) if order.takers > 1 else ()
        self._holds.let_go(order.request, leases)

    def _held(
        self, order: KeptOrder, *, has_taken: bool = False, is_over: bool = False
    ) -> list[tuple[PeerAddress, Held]]:
        """Return what each worker that has some of the blocks is told of a request; at its end, those with others, too."""
        try:
            made = self._plan(order.sources, order.lease)
            kept = tickets(order.sources, order.lease, order.named)
        except (LLMException, ValueError):
            return []  # its task says why
        shares = {source: made.shares[source] for source in made.sources}
        if is_over:
            shares |= {left.source: 1 for left in made.left if left.source not in made.shares}
        holder = int.from_bytes(sha256(order.request.encode()).digest()[:7], "big")
        found: list[tuple[PeerAddress, Held]] = []
        for number, share in shares.items():
            source, ticket = order.sources[number], next(iter(kept[number].values()), None)
            if ticket is None:
                continue
            digest = prompt_as_kept(
                order.prompt_digest, source.layout, source.memory, number, len(order.sources), order.takers
            )
            blocks, prompt = LeaseDigests.of(ticket.cache_id, ticket.blocks, digest)
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
        try:
            made = self._plan(order.sources, order.lease)
        except LLMException:
            return None  # its task says why
        return order.sources[made.sources[0]] if len(made.sources) == 1 else None

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
        nbytes, failed, outcome = 0, order.missing(0), "pull_cancelled"
        untold: set[int] = set()
        try:
            with scope:
                await checkpoint_if_cancelled()  # nothing is dialled for one that was cancelled in line
                nbytes, failed, outcome = await self._carry_out(order, until, unlinked), (), "pull_done"
        except _Failed as failure:
            error, failed, untold = failure.first, order.missing(failure.landed), failure.untold
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
        made = self._plan(order.sources, order.lease)
        if groups := {pull.group for pull in made.pulls} - set(range(len(order.groups))):
            raise ParamInvalid(f"the order has {len(order.groups)} groups of blocks: {max(groups)} is needed, too")
        ready = {pull: self._ready(order, pull) for pull in made.pulls if order.groups[pull.group].into}
        kept = tickets(order.sources, order.lease, order.kept.named)
        self._leave(order, made, kept)
        failed, nbytes = _Failed(len(order.into)), 0
        few = anyio.Semaphore(LINKED_AT_A_TIME)

        async def pull_from(rank: int) -> None:
            source = order.sources[rank]
            try:
                await self._link(source, order.request, few, until, unlinked)
            except LLMException as error:
                failed.add(error, source.cluster_id)
                return
            digest = prompt_as_kept(
                order.prompt_digest, source.layout, source.memory, rank, len(order.sources), order.takers
            )
            await together([partial(pull, each, digest) for each in ready if each.source == rank])

        async def pull(one: Pull, digest: bytes) -> None:
            nonlocal nbytes
            source = order.sources[one.source]
            try:
                left = max(0.001, until - anyio.current_time())
                came = await self._pull_one(order, one, kept[one.source][one.plane], digest, ready[one], left)
                nbytes += came
            except LLMException as error:
                if one.group:
                    failed.landed = 0
                failed.add(error, source.cluster_id)

        await together([partial(pull_from, rank) for rank in dict.fromkeys(pull.source for pull in ready)])
        if failed.errors:
            raise failed
        return nbytes

    async def _pull_one(
        self,
        order: PullOrder,
        one: Pull,
        ticket: LeaseTicket,
        digest: bytes,
        parts: Callable[[], BlockParts] | None,
        seconds: float,
    ) -> int:
        """Pull some tensors of one plane; return the bytes. Raises LLMException if that failed."""
        group = order.groups[one.group]
        here, there = self._mine.planes[one.into], order.sources[one.source].memory.planes[one.plane]
        is_all = (len(one.into_tensors), len(one.tensors)) == (here.tensors, there.tensors)
        task = self._manager.pull_leased(
            ticket,
            self._caches[one.into],
            group.into,
            first=group.first,
            prompt_digest=digest,
            parts=parts,
            src_layer_range=None if is_all else one.tensors,
            dst_layer_range=None if is_all else one.into_tensors,
            tensor_num_per_layer=1,
            takers=one.takers * order.takers,
            deadline=seconds,
            patience=self._patience_seconds,
        )
        return await self._bytes_of(task)

    def _leave(self, order: PullOrder, made: Plan, kept: Sequence[Tickets]) -> None:
        """Tell the owners of planes that no worker of this engine needs, or nothing of whose blocks.

        If other requests may take the blocks, this does nothing: these owners are told when the request ends, as all are.
        """
        if order.takers > 1:
            return
        left = list(made.left)
        for pull in made.pulls:
            if not order.groups[pull.group].into and pull.tells:
                left.append(Left(pull.source, pull.plane))
        by_source: dict[int, Tickets] = {}
        for source, plane in left:
            if plane in kept[source]:
                by_source.setdefault(source, {})[plane] = kept[source][plane]
        if by_source:
            self._tasks.start_soon(self._release_planes, order.kept, by_source)

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

    @property
    def _mine(self) -> Memory:
        assert self._memory is not None
        return self._memory

    def _plan(self, sources: Sequence[WorkerAddress], lease: str) -> Plan:
        """Return this worker's part of an order. Raises IncompatiblePeer with both values."""
        for source in sources:
            if differing := self._differences(source):
                texts = [f"{name} is {a} here and {b} at {source.place}" for name, (a, b) in sorted(differing.items())]
                raise IncompatiblePeer(printable(", ".join(texts)))
        try:
            return plan([source.memory for source in sources], self._mates, self._rank, turn_of(lease))
        except ValueError as error:
            raise IncompatiblePeer(printable(f"{error} at {sources[0].place}")) from None

    def _ready(self, order: PullOrder, pull: Pull) -> Callable[[], BlockParts] | None:
        """Return the function that numbers the parts of a pull; None if whole blocks are pulled.

        Raises IncompatiblePeer with both values, and ParamInvalid if the order has more blocks than there is room for.
        """
        group, source = order.groups[pull.group], order.sources[pull.source]
        there, here = pull.cuts[0].src.tokens, pull.cuts[0].dst.tokens
        if not group.blocks[group.first :]:
            raise ParamInvalid(f"no blocks of group {pull.group} are offered from number {group.first} on")
        if pull.is_whole and not group.skip:
            _check_room(group, len(group.into))
            return None
        _check_room(group, -(-(len(group.into) * here + group.skip) // there))
        for cut in pull.cuts:
            check_cut(cut.src, cut.dst, "a region", source.place, group.skip)
        room = min(len(group.into) * here, (len(group.blocks) - group.first) * there - group.skip)
        tokens = room if group.tokens is None else min(room, group.tokens)
        strides = source.memory.planes[pull.plane].stride, self._mine.planes[pull.into].stride
        return partial(parts_of, pull.cuts, *strides, group.skip, tokens)

    def _differences(self, source: WorkerAddress) -> dict[str, Difference]:
        """Return the properties that differ here and there."""
        return differences(self._layout, source.layout, self._accepted)

    # ---- what is not needed ----

    def release(self, order: KeptOrder) -> None:
        """Tell a peer that its blocks are not needed, if possible."""
        self.let_go(order)
        self._tasks.start_soon(self._release, order)

    def _own(self, order: KeptOrder) -> list[int]:
        """Return the workers that this one tells: those that it would pull from, or its share of all."""
        try:
            made = self._plan(order.sources, order.lease)
        except LLMException:
            return [n for n in range(len(order.sources)) if n % max(len(self._mates), 1) == self._rank]
        return sorted({*made.sources, *(left.source for left in made.left)})

    async def _release(self, order: KeptOrder, untold: Container[int] = ()) -> None:
        """Tell workers of a peer that their blocks are not needed, all of them.

        If other requests may take the blocks, a release ends nothing.
        """
        if order.takers > 1:
            return
        try:
            kept = tickets(order.sources, order.lease, order.named)
        except ValueError as error:
            told = printable(error)
            self._say(Incident.RELEASE_FAILED, "lease %s: its blocks are not released: %s", order.lease, told)
            return
        ranks = [number for number in self._own(order) if order.sources[number].cluster_id not in untold]
        await self._release_planes(order, {number: kept[number] for number in ranks})

    async def _release_planes(self, order: KeptOrder, kept: Mapping[int, Tickets]) -> None:
        """Tell a few workers at a time, so that the claims of a router cost no more connections than that.

        Some are not told: workers that are no peers, those that are not linked and cannot be dialled now, and those
        that do not answer in time. Each releases its blocks anyway when their time is up.
        """
        told = [number for number in kept if kept[number] and self._links.may_tell(order.sources[number])]
        waiting = iter(told)

        async def release() -> None:
            for number in waiting:
                source = order.sources[number]
                digest = prompt_as_kept(order.prompt_digest, source.layout, source.memory, number, len(order.sources))
                await self._release_one(source, list(kept[number].values()), digest)

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
