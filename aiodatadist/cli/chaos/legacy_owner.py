"""The owner as v1 has it: PROMPT, with blocks that are pulled and requests whose keys a pull consumes."""

from __future__ import annotations

import random
import time
from contextlib import AsyncExitStack, suppress
from itertools import count

import anyio
import anyio.abc

from aiodatadist import (
    BlocksCacheKey,
    CacheKey,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    OutOfMemory,
    TransferConfig,
    legacy,
)
from aiodatadist.cli.chaos.legacy_copies import LegacyCopies
from aiodatadist.cli.chaos.mail import Content, Mail
from aiodatadist.cli.chaos.messages import Peer
from aiodatadist.cli.chaos.owner_side import OwnerEnd, OwnerSide, peer_of
from aiodatadist.cli.chaos.sizes import (
    BLOCK,
    LAYERS,
    LIVES,
    REQUEST_MODEL,
    SOURCE,
    SOURCE_MODEL,
    desc,
    legacy_config,
)
from aiodatadist.cli.chaos.tally import GOOD
from aiodatadist.testing import BlockLedger


class LegacyOwner(OwnerSide):
    """Several clusters of :mod:`aiodatadist.legacy` in one process."""

    async def initialised(self, stack: AsyncExitStack, device: int, cluster_id: int) -> tuple[LLMDataDist, OwnerEnd]:
        made = legacy.LLMDataDist(LLMRole.PROMPT, cluster_id, legacy_config(device, "127.0.0.1:0"))
        datadist = await stack.enter_async_context(made)
        return datadist, LegacyOwnerCluster(self, datadist)


class LegacyOwnerCluster:
    """A cluster of the owner's, and its caches."""

    def __init__(self, side: LegacyOwner, datadist: legacy.LLMDataDist) -> None:
        self._side, self._datadist = side, datadist
        self._manager = datadist.kv_cache_manager
        self.cluster_id = datadist.cluster_id
        self.mail = Mail(side, datadist, self._answer)
        self.copies = LegacyCopies(side, datadist)
        self._requests, self._numbers = dict[int, None](), count(1)
        self._generation = side.settings.life * LIVES
        self._source: legacy.KvCache | None = None

    async def open(self) -> None:
        await self._new_source()
        await self.copies.open()

    def as_peer(self) -> Peer:
        return peer_of(self._datadist)

    def start(self, group: anyio.abc.TaskGroup) -> None:
        group.start_soon(self._side.work, f"renew {self.cluster_id}", self.renew, 0.3)
        group.start_soon(self._side.work, f"copies {self.cluster_id}", self.copies.one, 0.02)

    async def drained(self) -> None:
        """Give up the requests that no puller gave up, because it was killed or not linked. Pulled ones are gone already."""
        for number in list(self._requests):
            await self._forget(number)

    async def resumed(self) -> None:
        """Do nothing: each operation makes what it needs."""

    async def parted(self) -> None:
        """Do nothing: the puller could reach nothing but the source."""

    async def _new_source(self) -> None:
        key = BlocksCacheKey(self.cluster_id, SOURCE_MODEL)
        self._generation += 1
        self._source = source = await self._manager.allocate_blocks_cache(desc(SOURCE), key)
        ledger = BlockLedger(source, self.cluster_id, self._generation)
        self._side.ledgers[f"source {self.cluster_id}"] = ledger
        ledger.write(range(SOURCE))

    async def renew(self, chance: random.Random) -> None:
        """Give the blocks up, and make others under the same key."""
        if self._source is not None:
            if chance.random() < 0.7:
                return
            await self._give_up(self._source)
        try:
            await self._new_source()
        except OutOfMemory as error:  # which the next operation finds over, perhaps
            self._side.ended("renew", error)
        else:
            self._side.tally.ended("renew", GOOD)

    async def _give_up(self, source: legacy.KvCache) -> None:
        self._source = None
        del self._side.ledgers[f"source {self.cluster_id}"]
        old = self._generation
        with suppress(LLMException):  # it takes longer than v1 waits: the memory goes back later, and the key is free
            await self._manager.deallocate_cache(source)
            self._side.tally.retired[f"{self.cluster_id}/{old}"] = time.monotonic()

    # ---- what the puller asks for ----

    async def _answer(self, puller: int, question: Content) -> Content:
        match question["ask"]:
            case "request":
                return {"request": await self._new_request()}
            case "forget":
                await self._forget(question["request"])
            case "layers":
                return {"status": await self._send_layers(puller, question)}
        return {}

    async def _new_request(self) -> int | None:
        """Return a batch slot that lasts as long as its key, or None if the pool is full."""
        number = next(self._numbers)
        try:
            slot = await self._manager.allocate_cache(desc(1, 2 * BLOCK), [self._key(number)])
        except LLMException as error:
            self._side.ended("allocate request", error)
            return None
        self._requests[number] = None
        BlockLedger(slot, self.cluster_id, self._generation).write_as(0, self.cluster_id, number)
        await self._manager.deallocate_cache(slot)
        self._side.tally.ended("allocate request", GOOD)
        return number

    def _key(self, number: int) -> CacheKey:
        return CacheKey(self.cluster_id, number, REQUEST_MODEL)

    async def _forget(self, number: int) -> None:
        """Give up a request, whether it was pulled or not."""
        self._requests.pop(number, None)
        await self._manager.remove_cache_key(self._key(number))
        self._side.tally.ended("remove_cache_key", GOOD)

    async def _send_layers(self, puller: int, question: Content) -> str:
        chance, source = random.Random(question["seed"]), self._source
        if source is None:
            return LLMStatusCode.LLM_KV_CACHE_NOT_EXIST.name
        target = TransferConfig(puller, question["addresses"], range(LAYERS))
        blocks = question["sources"], question["targets"]
        return await self._side.send_layers(
            "layers",
            lambda synchronizer: self._manager.transfer_cache_async(source, synchronizer, [target], *blocks),
            chance,
        )
