"""The end that has caches: some are pulled from, one is pushed into, one has blocks that are leased."""

from __future__ import annotations

import random
import time
from contextlib import AsyncExitStack

import anyio
import anyio.abc

from aiodatadist import (
    BlockLease,
    BlocksCacheKey,
    Cache,
    LLMDataDist,
    LLMRole,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from aiodatadist.cli.chaos.large_copies import LargeInbox
from aiodatadist.cli.chaos.mail import Content, Mail
from aiodatadist.cli.chaos.messages import Peer
from aiodatadist.cli.chaos.own_copies import OwnCopies
from aiodatadist.cli.chaos.owner_side import OwnerEnd, OwnerSide, peer_of
from aiodatadist.cli.chaos.rank_links import RankLinks
from aiodatadist.cli.chaos.sizes import (
    BLOCK,
    INBOX_MODEL,
    KEPT_MODEL,
    LAYERS,
    LEASED,
    LIVES,
    PATCH,
    SLOTS,
    SOURCE,
    SOURCE_MODEL,
    config,
    desc,
)
from aiodatadist.cli.chaos.terms import some_terms
from aiodatadist.cli.chaos.user_target import UserSource
from aiodatadist.testing import BlockLedger, MisplacedError

FULL = 10.0
"""Seconds for a cache behind a pool that is full, which is a fault and ends."""


class Owner(OwnerSide):
    """Several clusters in one process."""

    async def initialised(self, stack: AsyncExitStack, device: int, cluster_id: int) -> tuple[LLMDataDist, OwnerEnd]:
        options = config(self.profile, device, "127.0.0.1:0")
        datadist = await stack.enter_async_context(LLMDataDist(LLMRole.PROMPT, cluster_id, options))
        return datadist, OwnerCluster(self, datadist)


class OwnerCluster:
    """A cluster of the owner's, and its caches."""

    def __init__(self, side: Owner, datadist: LLMDataDist) -> None:
        self._side = side
        self._datadist = datadist
        self._manager = datadist.cache_manager
        self.cluster_id = datadist.cluster_id
        self.mail = Mail(side, datadist, self._answer)
        self.copies = OwnCopies(side, datadist)
        self.user = UserSource(side, datadist)
        self.large = LargeInbox(side, datadist)
        self.ranks = RankLinks(side, datadist, datadist.cluster_id)
        self.leases: dict[BlockLease, None] = {}
        self._generation = side.settings.life * LIVES
        self._versions = dict.fromkeys(range(LEASED), 0)

    async def open(self) -> None:
        manager, cluster_id = self._manager, self.cluster_id
        await self._new_source()
        self._slots = await manager.allocate_cache(desc(SLOTS, 2 * BLOCK))
        self._ledger("slots", self._slots).write(range(SLOTS))
        inbox = await manager.allocate_blocks_cache(desc(2 * PATCH + 1), BlocksCacheKey(cluster_id, INBOX_MODEL))
        self._inbox = self._ledger("inbox", inbox)
        self._inbox.write(range(0, 2 * PATCH + 1, 2))
        self._kept_cache = await manager.allocate_blocks_cache(desc(LEASED), BlocksCacheKey(cluster_id, KEPT_MODEL))
        self._kept = self._ledger("kept", self._kept_cache)
        self._kept.write(range(LEASED))
        await self.copies.open()

    def _ledger(self, name: str, cache: Cache, generation: int | None = None) -> BlockLedger:
        """Return the ledger of a cache that lives as long as the process, unless it has its own generation."""
        life = self._side.settings.life * LIVES
        ledger = BlockLedger(cache, self.cluster_id, life if generation is None else generation)
        self._side.ledgers[f"{name} {self.cluster_id}"] = ledger
        return ledger

    def as_peer(self) -> Peer:
        return peer_of(self._datadist, self._slots.cache_id)

    def start(self, group: anyio.abc.TaskGroup) -> None:
        work, name = self._side.work, self.cluster_id
        group.start_soon(work, f"renew {name}", self.renew, 0.3)
        group.start_soon(work, f"copies {name}", self.copies.one, 0.02)
        group.start_soon(work, f"user {name}", self.user.one)
        group.start_soon(work, f"large {name}", self.large.one)
        if self._side.profile.by_ranks:
            group.start_soon(work, f"link {name}", self.ranks.one)

    async def drained(self) -> None:
        for lease in list(self.leases):
            await lease.wait_ended()
        await self.large.wait_settled()

    async def resumed(self) -> None:
        self._inbox.begin(range(1, 2 * PATCH, 2))  # from now on the puller may push into every second block
        await self.user.lend()

    async def parted(self) -> None:
        await self.ranks.end()
        if not await self.user.take_back():
            self._side.violated("I5", f"cluster {self.cluster_id} has no link, and does not give memory back")

    # ---- the cache that is pulled from ----

    async def _new_source(self) -> None:
        """Allocate a source of the next generation, and fill it."""
        key = BlocksCacheKey(self.cluster_id, SOURCE_MODEL)
        self._generation += 1
        self._source = await self._manager.allocate_blocks_cache(desc(SOURCE), key, timeout=FULL)
        self._ledger("source", self._source, self._generation).write(range(SOURCE))

    async def renew(self, chance: random.Random) -> None:
        """Give the source up, and make another one under the same key."""
        if chance.random() < 0.7 or self._side.profile.is_calm:
            return
        del self._side.ledgers[f"source {self.cluster_id}"]
        old = self._generation
        await self._manager.deallocate_blocks_cache(self._source)
        self._side.tally.retired[f"{self.cluster_id}/{old}"] = time.monotonic()
        self._side.tally.ended("renew", "LLM_SUCCESS")
        await self._new_source()

    # ---- what the puller asks for ----

    async def _answer(self, puller: int, question: Content) -> Content:
        match question["ask"]:
            case "lease":
                return self._lease(question)
            case "layers":
                return {"status": await self._send_layers(puller, question)}
            case "pushed":
                return {"wrong": self._pushed(puller, question)}
            case "large":
                return await self.large.lend()
            case "pushed large":
                return await self.large.pushed(question["is_good"])
        return {}

    def _lease(self, question: Content) -> Content:
        busy = {block for lease in self.leases for block in lease.blocks}
        free = [block for block in range(LEASED) if block not in busy][: question["count"]]
        if not free:
            return {"ticket": None}
        lease = self._manager.lease_blocks(self._kept_cache, free, question["seconds"])
        self.leases[lease] = None
        lease.add_done_callback(self._lease_ended)
        return {"ticket": lease.ticket().model_dump(mode="json"), "versions": [self._versions[b] for b in free]}

    def _lease_ended(self, lease: BlockLease) -> None:
        """Write the blocks again at once: a pull that still reads them must not succeed."""
        del self.leases[lease]
        self._side.tally.ended("lease", str(lease.ended))
        for block in lease.blocks:
            self._versions[block] += 1
            self._kept.write([block], self._versions[block])

    async def _send_layers(self, puller: int, question: Content) -> str:
        chance = random.Random(question["seed"])
        layers = range(LAYERS)
        target: TransferConfig | TransferWithCacheKeyConfig = (
            TransferWithCacheKeyConfig(BlocksCacheKey(puller, question["model"]), layers, layers)
            if self._side.profile.one_sided
            else TransferConfig(puller, question["addresses"], layers)
        )
        terms = some_terms(chance, self._side.profile)
        return await self._side.send_layers(
            terms.named("layers"),
            lambda synchronizer: self._manager.transfer_cache_async(
                self._source, synchronizer, [target], question["sources"], question["targets"], **terms.arguments
            ),
            chance,
            terms.deadline,
        )

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
