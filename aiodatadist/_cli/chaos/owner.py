"""The owner: clusters whose caches are pulled from and pushed into, and whose blocks are leased."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count

import anyio
import anyio.abc

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlockLease,
    BlocksCacheKey,
    Cache,
    CacheKey,
    LLMException,
    LLMRole,
    LLMStatusCode,
    NotLinked,
    OutOfMemory,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from aiodatadist._cli.chaos.doors import DOORS, Door
from aiodatadist._cli.chaos.large_copies import LargeInbox
from aiodatadist._cli.chaos.mail import Content, Mail
from aiodatadist._cli.chaos.messages import Peer
from aiodatadist._cli.chaos.own_copies import OwnCopies
from aiodatadist._cli.chaos.rank_links import RankLinks
from aiodatadist._cli.chaos.side import Side
from aiodatadist._cli.chaos.sizes import (
    BLOCK,
    INBOX_MODEL,
    KEPT_MODEL,
    LAYERS,
    LEASED,
    LIVES,
    PATCH,
    PULLER,
    PULLER_DEVICE,
    REQUEST_MODEL,
    SLOTS,
    SOURCE,
    SOURCE_MODEL,
    STAMPED,
    WHOLE_MODEL,
    desc,
    whole_desc,
    whole_view,
)
from aiodatadist._cli.chaos.tally import GOOD
from aiodatadist._cli.chaos.terms import NO_TERMS, some_terms
from aiodatadist._cli.chaos.user_target import UserSource
from aiodatadist.testing import BlockLedger, MisplacedError


class OwnerSide(Side):
    """The side with several clusters in one process, whose caches the puller reaches."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[dict[int, Peer]]:
        self._clusters: list[OwnerCluster] = []
        kind = DOORS[self.profile.owner]
        async with AsyncExitStack() as stack:
            for number, cluster_id in enumerate(self.settings.clusters):
                opened = kind.opened(LLMRole.PROMPT, cluster_id, self.profile, number % PULLER_DEVICE, "127.0.0.1:0")
                door = await stack.enter_async_context(opened)
                self.doors.append(door)
                self._clusters.append(OwnerCluster(self, door))
                await self._clusters[-1].open()
            yield {each.cluster_id: await each.as_peer() for each in self._clusters}

    def start(self, group: anyio.abc.TaskGroup) -> None:
        for each in self._clusters:
            each.start(group)

    async def meet(self, peers: dict[int, Peer]) -> None:
        """Do nothing: the puller links to the owner."""

    async def drained(self) -> None:
        for each in self._clusters:
            await each.drained()

    async def resumed(self) -> None:
        for each in self._clusters:
            await each.resumed()

    async def part(self) -> None:
        for door in self.doors:
            with suppress(NotLinked):
                await door.wait_closed(PULLER)
        for each in self._clusters:
            await each.parted()


class OwnerCluster:
    """A cluster of the owner's, and its caches."""

    def __init__(self, side: OwnerSide, door: Door) -> None:
        self._side, self._door, self._manager = side, door, door.manager
        self.cluster_id = door.cluster_id
        self._mail = Mail(side, door, self._answer)
        self._copies = OwnCopies(side, door)
        is_whole = "memory" in door.can
        self._user = UserSource(side, door) if is_whole else None
        self._large = LargeInbox(side, door) if is_whole else None
        self._ranks = RankLinks(side, door, door.cluster_id) if side.profile.by_ranks else None
        self._leases: dict[BlockLease, None] = {}
        self._first_generation = self._generation = side.settings.life * LIVES
        self._versions = dict.fromkeys(range(LEASED), 0)
        self._requests, self._numbers = dict[int, None](), count(1)
        self._source: Cache | None = None

    async def open(self) -> None:
        manager, cluster_id = self._manager, self.cluster_id
        await self._new_source()
        self._slots = await manager.allocate_cache(desc(SLOTS, 2 * BLOCK))
        self._ledger("slots", self._slots).write(range(SLOTS))
        inbox = desc(2 * PATCH + 1)
        self._inbox_cache = await manager.allocate_blocks_cache(inbox, BlocksCacheKey(cluster_id, INBOX_MODEL))
        self._inbox = self._ledger("inbox", self._inbox_cache)
        self._inbox.write(range(0, 2 * PATCH + 1, 2))
        self._kept_cache = await manager.allocate_blocks_cache(desc(LEASED), BlocksCacheKey(cluster_id, KEPT_MODEL))
        self._kept = self._ledger("kept", self._kept_cache)
        self._kept.write(range(LEASED))
        await self._copies.open()
        if self._side.profile.gib:
            whole, key = whole_desc(self._side.profile), BlocksCacheKey(cluster_id, WHOLE_MODEL)
            self._whole = await manager.allocate_blocks_cache(whole, key)
            self._ledger("whole", whole_view(self._whole, STAMPED)).write(range(STAMPED))

    def _ledger(self, name: str, cache: Cache, generation: int | None = None) -> BlockLedger:
        """Return the ledger of a cache that lives as long as the process, unless it has its own generation."""
        ledger = BlockLedger(cache, self.cluster_id, self._first_generation if generation is None else generation)
        self._side.ledgers[f"{name} {self.cluster_id}"] = ledger
        return ledger

    async def as_peer(self) -> Peer:
        """Return the description of this cluster for the puller."""
        return Peer(port=await self._door.port(), slots=self._slots.cache_id)

    def start(self, group: anyio.abc.TaskGroup) -> None:
        work, name = self._side.work, self.cluster_id
        group.start_soon(self._mail.read)
        group.start_soon(work, f"renew {name}", self._renew, 0.3)
        group.start_soon(work, f"copies {name}", self._copies.one, 0.02)
        if self._user is not None:
            group.start_soon(work, f"user {name}", self._user.one)
        if self._large is not None:
            group.start_soon(work, f"large {name}", self._large.one)
        if self._ranks is not None:
            group.start_soon(work, f"link {name}", self._ranks.one)

    async def drained(self) -> None:
        """Wait, after the end of all operations, for what the puller asked for, and drop the rest."""
        await self._mail.wait_idle()
        for lease in list(self._leases):
            await lease.wait_ended()
        if self._large is not None:
            await self._large.wait_settled()
        for number in list(self._requests):
            await self._forget(number)

    async def resumed(self) -> None:
        self._inbox.begin(range(1, 2 * PATCH, 2))  # from now on the puller may push into every second block
        if self._user is not None:
            await self._user.lend()

    async def parted(self) -> None:
        """Take back what the puller could reach: the link has ended."""
        if self._ranks is not None:
            await self._ranks.end()
        if self._user is not None and not await self._user.take_back():
            self._side.violated("I5", f"cluster {self.cluster_id} has no link, and does not release its memory")

    # ---- the cache that is pulled from ----

    async def _new_source(self) -> None:
        """Allocate a source of the next generation, and fill it."""
        self._generation += 1
        self._source = await self._door.allocate(desc(SOURCE), BlocksCacheKey(self.cluster_id, SOURCE_MODEL))
        self._ledger("source", self._source, self._generation).write(range(SOURCE))

    async def _renew(self, chance: random.Random) -> None:
        """Drop the source, and allocate another one under the same key."""
        if self._source is not None:
            if chance.random() < 0.7 or self._side.profile.is_calm:
                return
            await self._give_up(self._source)
        try:
            await self._new_source()
        except OutOfMemory as error:
            if "terms" in self._door.can:  # a full pool was waited for
                raise
            self._side.ended("renew", error)
        else:
            self._side.tally.ended("renew", GOOD)

    async def _give_up(self, source: Cache) -> None:
        self._source = None
        del self._side.ledgers[f"source {self.cluster_id}"]
        old = self._generation
        if await self._door.free(source):
            self._side.tally.retired[f"{self.cluster_id}/{old}"] = time.monotonic()

    # ---- what the puller asks for ----

    async def _answer(self, puller: int, question: Content) -> Content:
        answer: Content = {}
        match question["ask"]:
            case "lease":
                answer = self._lease(question)
            case "layers":
                answer = {"status": await self._send_layers(puller, question)}
            case "pushed":
                answer = {"wrong": self._pushed(puller, question)}
            case "request":
                answer = {"request": await self._new_request()}
            case "forget":
                await self._forget(question["request"])
            case "large" if self._large is not None:
                answer = await self._large.lend()
            case "pushed large" if self._large is not None:
                await self._large.pushed(question["is_good"])
        return answer

    def _lease(self, question: Content) -> Content:
        busy = {block for lease in self._leases for block in lease.blocks}
        free = [block for block in range(LEASED) if block not in busy][: question["count"]]
        if not free or "lend" not in self._door.can:  # without await nothing tells of the end of a lease at once
            return {"ticket": None}
        lease = self._manager.lease_blocks(self._kept_cache, free, question["seconds"])
        self._leases[lease] = None
        lease.add_done_callback(self._lease_ended)
        return {"ticket": lease.ticket().model_dump(mode="json"), "versions": [self._versions[b] for b in free]}

    def _lease_ended(self, lease: BlockLease) -> None:
        """Write the blocks again at once: a pull that still reads them must not succeed."""
        del self._leases[lease]
        self._side.tally.ended("lease", str(lease.ended))
        for block in lease.blocks:
            self._versions[block] += 1
            self._kept.write([block], self._versions[block])

    async def _send_layers(self, puller: int, question: Content) -> str:
        """Send the source layer by layer while its layers become final, and return the status."""
        chance, source, layers = random.Random(question["seed"]), self._source, range(LAYERS)
        if source is None:
            return LLMStatusCode.LLM_KV_CACHE_NOT_EXIST.name
        target: TransferConfig | TransferWithCacheKeyConfig = (
            TransferWithCacheKeyConfig(BlocksCacheKey(puller, question["model"]), layers, layers)
            if self._side.profile.one_sided
            else TransferConfig(puller, question["addresses"], layers)
        )
        terms = some_terms(chance, self._side.profile) if "terms" in self._door.can else NO_TERMS
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        async with anyio.create_task_group() as group:
            group.start_soon(_compute_layers, synchronizer, chance)
            status = await self._side.outcome(
                terms.named("layers"),
                lambda: self._manager.transfer_cache_async(
                    source, synchronizer, [target], question["sources"], question["targets"], **terms.arguments
                ),
                chance,
                may_fail=True,
                deadline=terms.deadline,
            )
            group.cancel_scope.cancel()
        return status

    def _pushed(self, puller: int, question: Content) -> str:
        """Return what is wrong with blocks that the puller reports it pushed, or an empty string."""
        try:
            stamps = self._inbox.landed(question["targets"], puller, question["sources"])
        except MisplacedError as error:
            return str(error)
        finally:
            self._inbox.begin(question["targets"])
        wrong = [str(stamp) for stamp in stamps if stamp.version != question["version"]]
        return f"expected version {question['version']}, found {wrong}" if wrong else ""

    # ---- requests, whose keys a pull consumes ----

    async def _new_request(self) -> int | None:
        """Return a batch slot that lasts as long as its key, or None if the pool is full."""
        number = next(self._numbers)
        try:
            slot = await self._manager.allocate_cache(desc(1, 2 * BLOCK), [self._request_key(number)])
        except LLMException as error:
            self._side.ended("allocate request", error)
            return None
        self._requests[number] = None
        BlockLedger(slot, self.cluster_id, self._first_generation).write_as(0, self.cluster_id, number)
        await self._manager.deallocate_cache(slot)
        self._side.tally.ended("allocate request", GOOD)
        return number

    def _request_key(self, number: int) -> CacheKey:
        return CacheKey(self.cluster_id, number, REQUEST_MODEL)

    async def _forget(self, number: int) -> None:
        """Drop a request, whether it was pulled or not."""
        self._requests.pop(number, None)
        await self._manager.remove_cache_key(self._request_key(number))
        self._side.tally.ended("remove_cache_key", GOOD)


async def _compute_layers(synchronizer: AwaitableLayerSynchronizer, chance: random.Random) -> None:
    """Declare one layer after the other final; now and then one fails."""
    for layer in range(LAYERS):
        await anyio.sleep(chance.choice((0, 0.0005, 0.01)) * chance.random())
        if chance.random() < 0.03:
            synchronizer.fail(layer)
        else:
            synchronizer.ready(layer)
