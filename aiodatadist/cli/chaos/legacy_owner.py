"""The owner as v1 has it: PROMPT, with blocks that are pulled and requests whose keys a pull consumes."""

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
    BlocksCacheKey,
    CacheKey,
    LLMException,
    LLMRole,
    LLMStatusCode,
    NotLinked,
    OutOfMemory,
    TransferConfig,
    legacy,
)
from aiodatadist.cli.chaos.legacy_copies import LegacyCopies
from aiodatadist.cli.chaos.mail import Content, Mail
from aiodatadist.cli.chaos.messages import Peer, SideSettings
from aiodatadist.cli.chaos.owner import compute_layers
from aiodatadist.cli.chaos.side import Side
from aiodatadist.cli.chaos.sizes import (
    BLOCK,
    LAYERS,
    LIVES,
    PULLER,
    REQUEST_MODEL,
    SOURCE,
    SOURCE_MODEL,
    desc,
    legacy_config,
)
from aiodatadist.cli.chaos.tally import GOOD
from aiodatadist.testing import BlockLedger


class LegacyOwner(Side):
    """Several clusters of :mod:`aiodatadist.legacy` in one process."""

    def __init__(self, settings: SideSettings) -> None:
        super().__init__(settings)
        self._clusters: list[LegacyOwnerCluster] = []

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[dict[int, Peer]]:
        async with AsyncExitStack() as stack:
            for device, cluster_id in enumerate(self.settings.clusters):
                options = legacy_config(device, "127.0.0.1:0")
                made = legacy.LLMDataDist(LLMRole.PROMPT, cluster_id, options)
                datadist = await stack.enter_async_context(made)
                self.datadists.append(datadist)
                self._clusters.append(cluster := LegacyOwnerCluster(self, datadist))
                await cluster.open()
            yield {cluster.cluster_id: cluster.as_peer() for cluster in self._clusters}

    def start(self, group: anyio.abc.TaskGroup) -> None:
        for cluster in self._clusters:
            group.start_soon(cluster.mail.read)
            group.start_soon(self.work, f"renew {cluster.cluster_id}", cluster.renew, 0.3)
            group.start_soon(self.work, f"copies {cluster.cluster_id}", cluster.copies.one, 0.02)

    async def meet(self, peers: dict[int, Peer]) -> None:
        """Do nothing: the pullers link to the owner."""

    async def drained(self) -> None:
        for cluster in self._clusters:
            await cluster.mail.wait_idle()
            await cluster.forget_all()

    async def resumed(self) -> None:
        """Each operation makes what it needs."""

    async def part(self) -> None:
        for datadist in self.datadists:
            with suppress(NotLinked):
                await datadist.wait_link_closed(PULLER)


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
        address = self._datadist.listen_address
        assert address is not None
        return Peer(port=address[1], slots=0)

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
        chance, synchronizer = random.Random(question["seed"]), AwaitableLayerSynchronizer(LAYERS)
        target = TransferConfig(puller, question["addresses"], range(LAYERS))
        blocks, source = (question["sources"], question["targets"]), self._source
        if source is None:
            return LLMStatusCode.LLM_KV_CACHE_NOT_EXIST.name
        async with anyio.create_task_group() as group:
            group.start_soon(compute_layers, synchronizer, chance)
            status = await self._side.outcome(
                "layers",
                lambda: self._manager.transfer_cache_async(source, synchronizer, [target], *blocks),
                chance,
                may_fail=True,
            )
            group.cancel_scope.cancel()
        return status

    async def forget_all(self) -> None:
        """Give up the requests that no puller gave up, because it was killed or not linked. Pulled ones are gone already."""
        for number in list(self._requests):
            await self._forget(number)
