"""The end that links, pulls, pushes and asks for layers, and looks at what came."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.abc

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheKeyByIdAndIndex,
    CacheTask,
    LayerReceiver,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    NotLinked,
)
from aiodatadist.cli.chaos.large_copies import LargePushes
from aiodatadist.cli.chaos.mail import Content, Mail
from aiodatadist.cli.chaos.messages import Peer
from aiodatadist.cli.chaos.own_copies import OwnCopies
from aiodatadist.cli.chaos.patch import Patch
from aiodatadist.cli.chaos.puller_side import PullerSide, no_answer
from aiodatadist.cli.chaos.rank_links import RankLinks
from aiodatadist.cli.chaos.sizes import (
    BLOCK,
    INBOX_MODEL,
    LAYERS,
    LAYERS_MODEL,
    LEASED,
    LINK_MILLIS,
    PATCH,
    PULLED_MODEL,
    PULLER,
    PULLER_DEVICE,
    SLOTS,
    SOURCE,
    SOURCE_MODEL,
    config,
    desc,
    some,
    some_layers,
    tensors_of,
)
from aiodatadist.cli.chaos.tally import GOOD
from aiodatadist.cli.chaos.terms import Terms, some_terms
from aiodatadist.cli.chaos.user_target import UserTarget
from aiodatadist.concurrency.signal import Signal
from aiodatadist.testing import BlockLedger, BlockStamp

TASKS = 2
"""That pull blocks from each cluster."""


class Puller(PullerSide):
    """A cluster that links to all of the owner's."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[dict[int, Peer]]:
        async with LLMDataDist(LLMRole.DECODER, PULLER, config(self.profile, PULLER_DEVICE, None)) as datadist:
            self.datadists.append(datadist)
            self.mail = Mail(self, datadist, no_answer)
            self.copies = OwnCopies(self, datadist)
            await self.copies.open()
            self._large = LargePushes(self, datadist, self.mail, self.settings.clusters[0])
            await self._large.open()
            self._targets = [Target(self, datadist, cluster_id) for cluster_id in self.settings.clusters]
            for target in self._targets:
                await target.open()
            yield {}

    def start(self, group: anyio.abc.TaskGroup) -> None:
        group.start_soon(self.mail.read)
        group.start_soon(self.work, "copies", self.copies.one, 0.02)
        group.start_soon(self.work, "large", self._large.one)
        for target in self._targets:
            target.start(group)

    async def resumed(self) -> None:
        for target in self._targets:
            target.unlinked()

    async def part(self) -> None:
        for target in self._targets:
            await target.ranks.end()
        await super().part()
        for target in self._targets:
            await target.user.give_back()

    async def unlink(self, infos: list[LLMClusterInfo]) -> tuple[int, Sequence[LLMStatusCode]]:
        return await self.datadists[0].unlink_clusters(infos, LINK_MILLIS)


class Target:
    """A cluster of the owner's, and the operations on it."""

    def __init__(self, side: Puller, datadist: LLMDataDist, cluster_id: int) -> None:
        self._side, self._datadist = side, datadist
        self._manager = datadist.cache_manager
        self._cluster_id = cluster_id
        self._version = 0
        self._wants_link = True
        self._linked = Signal()
        self._patches: list[Patch] = []
        self.user = UserTarget(side, datadist, cluster_id)
        self.ranks = RankLinks(side, datadist, cluster_id)

    async def open(self) -> None:
        manager, wide = self._manager, 2 * PATCH + 1
        key = BlocksCacheKey(PULLER, 1000 * self._cluster_id + PULLED_MODEL)
        pulled = await manager.allocate_blocks_cache(desc((TASKS + 1) * wide), key)
        ledger = self._ledger("pulled", pulled)
        self._patches = [Patch(pulled, ledger, i * wide) for i in range(TASKS + 1)]
        slots = await manager.allocate_cache(desc(2 * SLOTS + 1, 2 * BLOCK))
        self._slots = Patch(slots, self._ledger("slots", slots), 0)
        self._out = await manager.allocate_blocks_cache(desc(PATCH))
        self._out_ledger = self._ledger("pushed", self._out)
        layers = await manager.allocate_blocks_cache(desc(wide), self._layers_key())
        self._layers = Patch(layers, self._ledger("layers", layers), 0)
        for patch in (*self._patches, self._layers):
            patch.ledger.write(patch.between)
        self._slots.ledger.write(range(0, 2 * SLOTS + 1, 2))

    def _layers_key(self) -> BlocksCacheKey:
        return BlocksCacheKey(PULLER, 1000 * self._cluster_id + LAYERS_MODEL)

    def _ledger(self, name: str, cache: Cache) -> BlockLedger:
        ledger = BlockLedger(cache, PULLER, self._side.settings.life)
        self._side.ledgers[f"{name} {self._cluster_id}"] = ledger
        return ledger

    def start(self, group: anyio.abc.TaskGroup) -> None:
        side, name = self._side, self._cluster_id
        group.start_soon(side.work, f"link {name}", self._link)
        for number, patch in enumerate(self._patches[:TASKS]):
            group.start_soon(side.work, f"pull {name} {number}", partial(self._pull, patch))
        group.start_soon(side.work, f"lease {name}", partial(self._lease, self._patches[TASKS]))
        group.start_soon(side.work, f"slots {name}", self._pull_slot)
        group.start_soon(side.work, f"layers {name}", self._receive)
        group.start_soon(side.work, f"user {name}", self._user)
        if side.profile.one_sided:
            group.start_soon(side.work, f"push {name}", self._push)

    # ---- links ----

    def unlinked(self) -> None:
        """Link again: the link has ended."""
        self._wants_link = True

    async def _link(self, chance: random.Random) -> None:
        """Link if there is no link, and end the link now and then."""
        if self._side.profile.by_ranks:
            await self.ranks.one(chance)
            self._linked.wake()
            return
        try:
            closed = self._datadist.wait_link_closed(self._cluster_id)
            with anyio.move_on_after(chance.choice((0.05, 0.5, 2.0)) * chance.random()):
                await closed
        except NotLinked:
            if self._wants_link or not self._side.profile.relinks:
                await self._make_link()
            return
        if chance.random() < 0.1 and not self._side.profile.is_calm:
            self._wants_link = True
            results = await self._datadist.unlink_clusters(
                [self._side.info(self._cluster_id)], LINK_MILLIS, force=chance.random() < 0.3
            )
            self._side.ended("unlink", results.errors[0])

    async def _make_link(self) -> None:
        results = await self._datadist.link_clusters([self._side.info(self._cluster_id)], LINK_MILLIS)
        self._side.ended("link", results.errors[0])
        if results[0] is LLMStatusCode.LLM_SUCCESS:
            self._wants_link = False
            self._linked.wake()
        else:
            await anyio.sleep(0.05)

    async def _until_linked(self) -> None:
        """Wait for a link, but only for a moment unless nothing may fail: what is done without a link must fail well, too."""
        if not any(link.cluster_id == self._cluster_id for link in self._datadist.statistics().links):
            with anyio.move_on_after(10.0 if self._side.profile.is_calm else 0.2):
                await self._linked.wait()

    # ---- transfers ----

    async def _pull(self, patch: Patch, chance: random.Random) -> None:
        await self._until_linked()
        targets, layers = some(chance, patch.blocks), some_layers(chance)
        sources = chance.sample(range(SOURCE), len(targets))
        note = self._side.mail.content({}) if chance.random() < 0.1 else None
        terms = some_terms(chance, self._side.profile)
        key = BlocksCacheKey(self._cluster_id, SOURCE_MODEL)
        await self._pulled(
            patch, sources, targets, terms,
            "pull_blocks",
            lambda: self._manager.pull_blocks(
                key, patch.cache, sources, targets,
                src_layer_range=layers, dst_layer_range=layers, notify=note, **terms.arguments,
            ),
            chance,
            tensors_of(layers),
        )  # fmt: skip
        self._side.check_between(self._cluster_id, patch.ledger, chance.sample(patch.between, 3))

    async def _pulled(
        self, into: Patch, sources: Sequence[int], targets: Sequence[int], terms: Terms, operation: str,
        begin: Callable[[], CacheTask], chance: random.Random, tensors: range | None = None, may_fail: bool = False,
    ) -> list[BlockStamp] | None:  # fmt: skip
        """Pull into a patch and check what came. Returns None if it failed."""

        async def pull() -> str:
            return await self._side.outcome(terms.named(operation), begin, chance, may_fail, terms.deadline)

        usable = partial(self._manager.wait_usable, into.cache)
        return await self._side.pulled(self._cluster_id, into.ledger, sources, targets, pull, usable, tensors)

    async def _user(self, chance: random.Random) -> None:
        await self._until_linked()
        await self.user.one(chance)

    async def _pull_slot(self, chance: random.Random) -> None:
        await self._until_linked()
        peer = self._side.peers.get(self._cluster_id)
        if peer is None:
            return
        source, target = chance.randrange(SLOTS), 1 + 2 * chance.randrange(SLOTS)
        terms = some_terms(chance, self._side.profile)
        key = CacheKeyByIdAndIndex(self._cluster_id, peer.slots, source)

        def begin() -> CacheTask:
            return self._manager.pull_cache(key, self._slots.cache, target, **terms.arguments)

        await self._pulled(self._slots, [source], [target], terms, "pull_cache", begin, chance)

    async def _push(self, chance: random.Random) -> None:
        """Push, and ask the owner what it found."""
        await self._until_linked()
        sources = some(chance, range(PATCH))
        targets = chance.sample(range(1, 2 * PATCH, 2), len(sources))
        self._version += 1
        self._out_ledger.write(sources, self._version)
        terms = some_terms(chance, self._side.profile)
        status = await self._side.outcome(
            terms.named("push_blocks"),
            lambda: self._manager.push_blocks(
                BlocksCacheKey(self._cluster_id, INBOX_MODEL), self._out, sources, targets, **terms.arguments
            ),
            chance,
            deadline=terms.deadline,
        )
        if status != GOOD:
            return
        question = {"ask": "pushed", "sources": sources, "targets": targets, "version": self._version}
        answer = await self._side.mail.ask(self._cluster_id, question)
        if answer is not None and answer["wrong"]:
            self._side.violated("I6", f"a push to {self._cluster_id}: {answer['wrong']}")

    # ---- leases ----

    async def _lease(self, patch: Patch, chance: random.Random) -> None:
        await self._until_linked()
        targets = some(chance, patch.blocks, LEASED // 2)
        seconds = chance.choice((0.02, 0.2, 1.0))
        question = {"ask": "lease", "count": len(targets), "seconds": seconds}
        answer = await self._side.mail.ask(self._cluster_id, question)
        if answer is None or answer["ticket"] is None:
            return
        ticket, way = answer["ticket"], chance.random()
        if way < 0.1:
            await self._release(ticket)
            return
        if way < 0.3:
            await anyio.sleep(chance.uniform(0, 2 * seconds))
        count = len(answer["versions"])
        targets, terms = targets[:count], some_terms(chance, self._side.profile)
        stamps = await self._pulled(
            patch, ticket["blocks"][:count], targets, terms,
            "pull_leased",
            lambda: self._manager.pull_leased(ticket, patch.cache, targets, deadline=2.0, **terms.arguments),
            chance,
            may_fail=True,  # it may have expired
        )  # fmt: skip
        found = answer["versions"] if stamps is None else [stamp.version for stamp in stamps]
        if found != answer["versions"]:
            self._side.violated("I6", f"leased were versions {answer['versions']}, pulled were {found}")

    async def _release(self, ticket: Content) -> None:
        try:
            await self._manager.release_lease(ticket)
        except LLMException as error:
            self._side.ended("release_lease", error)
        else:
            self._side.tally.ended("release_lease", GOOD)

    # ---- layers ----

    async def _receive(self, chance: random.Random) -> None:
        """Ask the owner for layers, and look at each as it comes."""
        await self._until_linked()
        patch, began = self._layers, time.monotonic()
        targets = some(chance, patch.blocks)
        sources = chance.sample(range(SOURCE), len(targets))
        self._side.open(patch.ledger, targets)
        question = {
            "ask": "layers", "sources": sources, "targets": targets, "seed": chance.getrandbits(32),
            "addresses": patch.cache.tensor_addrs, "model": self._layers_key().model_id,
        }  # fmt: skip
        answer: Content | None = None
        try:
            async with (
                self._manager.receive_layers(self._cluster_id, patch.cache) as receiver,
                anyio.create_task_group() as group,
            ):
                group.start_soon(self._watch, receiver, patch, sources, targets)
                answer = await self._side.mail.ask(self._cluster_id, question)
                if answer is None or answer["status"] != GOOD:
                    group.cancel_scope.cancel()
        except* LLMException as errors:
            self._side.ended("receive_layers", _first(errors))
        if answer is None or answer["status"] != GOOD:
            await self._manager.wait_usable(patch.cache)
            patch.ledger.reclaim(targets)
            return
        self._side.tally.ended("receive_layers", GOOD)
        self._side.came(self._cluster_id, patch.ledger, sources, targets, began)

    async def _watch(self, receiver: LayerReceiver, patch: Patch, sources: list[int], targets: list[int]) -> None:
        try:
            for layer in range(LAYERS):
                await receiver.layer(layer)
                patch.ledger.landed(targets, self._cluster_id, sources, range(2 * layer, 2 * layer + 2))
        except LLMException as error:  # the owner's answer tells the same
            self._side.ended("layer", error, may_fail=True)


def _first(errors: BaseExceptionGroup[LLMException]) -> LLMException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
