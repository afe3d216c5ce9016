"""The puller as v1 has it: DECODER, whose link does one thing at a time, and for whom the owner writes."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.abc

from aiodatadist import (
    BlocksCacheKey,
    CacheKey,
    CacheTask,
    LLMClusterInfo,
    LLMException,
    LLMRole,
    LLMStatusCode,
    NotLinked,
    legacy,
)
from aiodatadist.cli.chaos.legacy_copies import LegacyCopies
from aiodatadist.cli.chaos.mail import Mail
from aiodatadist.cli.chaos.messages import Peer
from aiodatadist.cli.chaos.patch import Patch
from aiodatadist.cli.chaos.puller_side import PullerSide, no_answer
from aiodatadist.cli.chaos.sizes import (
    BLOCK,
    LINK_MILLIS,
    PATCH,
    PULLER,
    PULLER_DEVICE,
    REQUEST_MODEL,
    SLOTS,
    SOURCE,
    SOURCE_MODEL,
    desc,
    legacy_config,
    some,
    some_layers,
    tensors_of,
)
from aiodatadist.cli.chaos.tally import GOOD
from aiodatadist.concurrency.signal import Signal
from aiodatadist.testing import BlockLedger

WIDE = 2 * PATCH + 1
TASKS = 1
"""That pull blocks from each cluster."""


class LegacyPuller(PullerSide):
    """A cluster of :mod:`aiodatadist.legacy` that links to all of the owner's."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[dict[int, Peer]]:
        async with legacy.LLMDataDist(LLMRole.DECODER, PULLER, legacy_config(PULLER_DEVICE, None)) as datadist:
            self.datadists.append(datadist)
            self.mail = Mail(self, datadist, no_answer)
            self.copies = LegacyCopies(self, datadist)
            await self.copies.open()
            self._targets = [LegacyTarget(self, datadist, cluster_id) for cluster_id in self.settings.clusters]
            for target in self._targets:
                await target.open()
            yield {}

    def start(self, group: anyio.abc.TaskGroup) -> None:
        group.start_soon(self.mail.read)
        group.start_soon(self.work, "copies", self.copies.one, 0.02)
        for target in self._targets:
            target.start(group)

    async def unlink(self, infos: list[LLMClusterInfo]) -> tuple[int, Sequence[LLMStatusCode]]:
        return await self.datadists[0].unlink_clusters(infos, LINK_MILLIS)


class LegacyTarget:
    """A cluster of the owner's, and the operations on it."""

    def __init__(self, side: LegacyPuller, datadist: legacy.LLMDataDist, cluster_id: int) -> None:
        self._side, self._datadist, self._cluster_id = side, datadist, cluster_id
        self._manager = datadist.kv_cache_manager
        self._made = Signal()

    async def open(self) -> None:
        name = self._cluster_id
        self._blocks = await self._manager.allocate_blocks_cache(desc((TASKS + 1) * WIDE))
        ledger = self._side.ledgers[f"pulled {name}"] = BlockLedger(self._blocks, PULLER, self._side.settings.life)
        self._patches = [Patch(self._blocks, ledger, i * WIDE) for i in range(TASKS + 1)]
        for patch in self._patches:
            ledger.write(patch.between)
        self._slots = await self._manager.allocate_cache(desc(2 * SLOTS + 1, 2 * BLOCK))
        self._slots_ledger = BlockLedger(self._slots, PULLER, self._side.settings.life)
        self._side.ledgers[f"slots {name}"] = self._slots_ledger
        self._slots_ledger.write(range(0, 2 * SLOTS + 1, 2))

    def start(self, group: anyio.abc.TaskGroup) -> None:
        work, name = self._side.work, self._cluster_id
        group.start_soon(work, f"link {name}", self._link)
        for number, patch in enumerate(self._patches[:TASKS]):
            group.start_soon(work, f"pull {name} {number}", partial(self._pull, patch))
        group.start_soon(work, f"request {name}", self._request, 0.02)
        group.start_soon(work, f"layers {name}", partial(self._receive, self._patches[TASKS]))

    # ---- links ----

    async def _link(self, chance: random.Random) -> None:
        """Link if there is no link. Ask for its health, and end it, now and then."""
        try:
            closed = self._datadist.wait_link_closed(self._cluster_id)
            with anyio.move_on_after(chance.choice((0.05, 0.5, 2.0)) * chance.random()):
                await closed
        except NotLinked:
            await self._linked("link", self._datadist.link_clusters([self._side.info(self._cluster_id)], LINK_MILLIS))
            return
        if chance.random() < 0.3:
            await self._asked()
        elif chance.random() < 0.1:
            unlink = self._datadist.unlink_clusters(
                [self._side.info(self._cluster_id)], LINK_MILLIS, force=chance.random() < 0.3
            )
            await self._linked("unlink", unlink)

    async def _until_linked(self) -> None:
        """Wait for a link, but only for a moment: what is done without a link must fail well, too."""
        if not any(link.cluster_id == self._cluster_id for link in self._datadist.statistics().links):
            with anyio.move_on_after(0.2):
                await self._made.wait()

    async def _linked(self, operation: str, call: Awaitable[tuple[LLMStatusCode, list[LLMStatusCode]]]) -> None:
        status, _ = await call
        self._side.tally.ended(operation, status.name)
        if status is LLMStatusCode.LLM_SUCCESS:
            self._made.wake()
        else:
            await anyio.sleep(0.05)

    async def _asked(self) -> None:
        try:
            await self._datadist.check_link_status(self._cluster_id)
        except LLMException as error:
            self._side.ended("check_link_status", error)
        else:
            self._side.tally.ended("check_link_status", GOOD)

    # ---- transfers ----

    async def _pull(self, patch: Patch, chance: random.Random) -> None:
        await self._until_linked()
        targets, layers = some(chance, patch.blocks), some_layers(chance)
        sources, tensors = chance.sample(range(SOURCE), len(targets)), tensors_of(layers)
        key = BlocksCacheKey(self._cluster_id, SOURCE_MODEL)

        def begin() -> CacheTask:
            return self._manager.pull_blocks(
                key, self._blocks, sources, targets, src_layer_range=layers, dst_layer_range=layers
            )

        pull = partial(self._outcome, "pull_blocks", begin, chance)
        usable = partial(self._manager.registry.wait_usable, self._blocks)
        await self._side.pulled(self._cluster_id, patch.ledger, sources, targets, pull, usable, tensors)
        self._side.check_between(self._cluster_id, patch.ledger, chance.sample(patch.between, 3))

    async def _outcome(self, operation: str, begin: Callable[[], CacheTask], chance: random.Random) -> str:
        status = await self._side.outcome(operation, begin, chance)
        if status == LLMStatusCode.LLM_LINK_BUSY.name:
            await anyio.sleep(chance.uniform(0, 0.05))
        return status

    async def _request(self, chance: random.Random) -> None:
        """Pull a request's slot, whose key is consumed by the pull of all of it."""
        await self._until_linked()
        answer = await self._side.mail.ask(self._cluster_id, {"ask": "request"})
        if answer is None or answer["request"] is None:
            await anyio.sleep(0.02)
            return
        number, target = answer["request"], 1 + 2 * chance.randrange(SLOTS)
        key = CacheKey(self._cluster_id, number, REQUEST_MODEL)
        if await self._pull_request(key, target, chance) != GOOD or chance.random() < 0.5:
            await self._side.mail.ask(self._cluster_id, {"ask": "forget", "request": number})
        elif await self._pull_request(key, target, chance, again=True) == GOOD:
            self._side.violated("I8", f"{key} was consumed, and could be pulled once more")

    async def _pull_request(self, key: CacheKey, target: int, chance: random.Random, again: bool = False) -> str:
        self._side.open(self._slots_ledger, [target])

        def begin() -> CacheTask:
            return self._manager.pull_cache(key, self._slots, target)

        status = await self._outcome("pull_cache again" if again else "pull_cache", begin, chance)
        if status == GOOD and not again:
            self._slots_ledger.landed([target], self._cluster_id, [key.req_id])
        else:
            await self._manager.registry.wait_usable(self._slots)
            self._slots_ledger.reclaim([target])
        return status

    async def _receive(self, patch: Patch, chance: random.Random) -> None:
        """Ask the owner for layers. It writes to addresses: they are told in the question."""
        await self._until_linked()
        targets = some(chance, patch.blocks)
        sources, began = chance.sample(range(SOURCE), len(targets)), time.monotonic()
        self._side.open(patch.ledger, targets)
        question = {
            "ask": "layers", "sources": sources, "targets": targets, "seed": chance.getrandbits(32),
            "addresses": self._blocks.tensor_addrs,
        }  # fmt: skip
        answer = await self._side.mail.ask(self._cluster_id, question)
        if answer is not None and answer["status"] == GOOD:
            self._side.tally.ended("receive_layers", GOOD)
            self._side.came(self._cluster_id, patch.ledger, sources, targets, began)
            return
        await self._manager.registry.wait_usable(self._blocks)
        patch.ledger.reclaim(targets)
        await anyio.sleep(0.01)
