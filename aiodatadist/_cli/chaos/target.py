"""A cluster of the owner's as the puller uses it: links, pulls, pushes, leases and layers, and checks of what arrived."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.abc

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    LayerReceiver,
    LLMClusterInfo,
    LLMException,
    NotLinked,
)
from aiodatadist._cli.chaos.doors import Door
from aiodatadist._cli.chaos.mail import Content, Mail
from aiodatadist._cli.chaos.messages import Peer
from aiodatadist._cli.chaos.patch import Patch
from aiodatadist._cli.chaos.rank_links import RankLinks
from aiodatadist._cli.chaos.side import Side
from aiodatadist._cli.chaos.sizes import (
    BLOCK,
    INBOX_MODEL,
    LAYERS,
    LAYERS_MODEL,
    LEASED,
    LINK_MILLIS,
    PATCH,
    PULLED_MODEL,
    PULLER,
    REQUEST_MODEL,
    SLOTS,
    SOURCE,
    SOURCE_MODEL,
    STAMPED,
    WHOLE_MODEL,
    WIDE,
    desc,
    some,
    some_layers,
    tensors_of,
)
from aiodatadist._cli.chaos.tally import GOOD
from aiodatadist._cli.chaos.transfers import Transfers
from aiodatadist._cli.chaos.user_target import UserTarget
from aiodatadist._concurrency.signal import Signal
from aiodatadist.testing import BlockLedger


class Target:
    """A cluster of the owner's, and the operations on it.

    Args:
        whole: destination for pulls from the owner's cache of production size, if there is one.
    """

    def __init__(self, side: Side, door: Door, mail: Mail, cluster_id: int, whole: Patch | None = None) -> None:
        self._side, self._door, self._mail = side, door, mail
        self._manager, self.cluster_id = door.manager, cluster_id
        self.peer: Peer | None = None
        self._whole = whole
        self._transfers = Transfers(side, door, cluster_id)
        self._version = 0
        self._wants_link = True
        self._linked = Signal()
        self._user = UserTarget(side, door, cluster_id) if "memory" in door.can else None
        self._ranks = RankLinks(side, door, cluster_id) if side.profile.by_ranks else None

    async def open(self) -> None:
        tasks = self._door.pulls
        pulled, ledger = await self._made("pulled", desc((tasks + 1) * WIDE), PULLED_MODEL)
        self._patches = [Patch(pulled, ledger, i * WIDE) for i in range(tasks + 1)]
        self._layers = Patch(*await self._made("layers", desc(WIDE), LAYERS_MODEL), 0)
        for patch in (*self._patches, self._layers, *([] if self._whole is None else [self._whole])):
            patch.ledger.write(patch.between)
        slots = await self._manager.allocate_cache(desc(2 * SLOTS + 1, 2 * BLOCK))
        self._slots = Patch(slots, self._ledger("slots", slots), 0)
        self._slots.ledger.write(range(0, 2 * SLOTS + 1, 2))
        self._out, self._out_ledger = await self._made("pushed", desc(PATCH))

    async def _made(self, name: str, shape: CacheDesc, model: int | None = None) -> tuple[Cache, BlockLedger]:
        """Allocate a blocks cache; peers find it under its model, if the interface has keys for a decoder."""
        key = None if model is None or "keys" not in self._door.can else self._key_here(model)
        cache = await self._manager.allocate_blocks_cache(shape, key)
        return cache, self._ledger(name, cache)

    def _ledger(self, name: str, cache: Cache) -> BlockLedger:
        ledger = BlockLedger(cache, PULLER, self._side.settings.life)
        self._side.ledgers[f"{name} {self.cluster_id}"] = ledger
        return ledger

    def _key_here(self, model: int) -> BlocksCacheKey:
        return BlocksCacheKey(PULLER, 1000 * self.cluster_id + model)

    def start(self, group: anyio.abc.TaskGroup) -> None:
        work, name, can = self._side.work, self.cluster_id, self._door.can
        *pulls, lease = self._patches
        group.start_soon(work, f"link {name}", self._link)
        for number, patch in enumerate(pulls):
            group.start_soon(work, f"pull {name} {number}", partial(self._pull, patch))
        if self._whole is not None:
            group.start_soon(work, f"whole {name}", partial(self._pull, self._whole))
        if "lease" in can:
            group.start_soon(work, f"lease {name}", partial(self._lease, lease))
        if "slots" in can:
            group.start_soon(work, f"slots {name}", self._pull_slot)
        if "requests" in can:
            group.start_soon(work, f"request {name}", self._request, 0.02)
        if "layers" in can:
            group.start_soon(work, f"layers {name}", self._receive)
        if self._user is not None:
            group.start_soon(work, f"user {name}", partial(self._move_user, self._user))
        if "push" in can and self._side.profile.one_sided:
            group.start_soon(work, f"push {name}", self._push)

    # ---- links ----

    def unlinked(self) -> None:
        """Link again, because the link has ended."""
        self._wants_link = True

    async def part_by_ranks(self) -> None:
        if self._ranks is not None:
            await self._ranks.end()

    async def take_back(self) -> None:
        """Take back the memory that the owner could reach, because there is no link."""
        if self._user is not None:
            await self._user.give_back()

    async def check_linked(self) -> None:
        """Check, if nothing may fail, that a link lasts until it is ended."""
        is_lost = (
            self._side.profile.is_calm and not self._wants_link and not await self._door.is_linked(self.cluster_id)
        )
        if is_lost:
            self._side.violated("I3", f"the link to cluster {self.cluster_id} was lost")

    @property
    def info(self) -> LLMClusterInfo:
        """The cluster, with its address if that is known."""
        info = LLMClusterInfo(self.cluster_id)
        if self.peer is not None:
            info.append_remote_ip_info("127.0.0.1", self.peer.port)
        return info

    async def _link(self, chance: random.Random) -> None:
        """Link if there is no link. Check the link, and end it, now and then."""
        if self._ranks is not None:
            await self._ranks.one(chance)
            self._linked.wake()
            return
        try:
            with anyio.move_on_after(chance.choice((0.05, 0.5, 2.0)) * chance.random()):
                await self._door.wait_closed(self.cluster_id)
        except NotLinked:
            await self.check_linked()
            if self._wants_link or not self._side.profile.relinks:
                await self._make_link()
            return
        way = chance.random()
        if way < 0.1 and not self._side.profile.is_calm:
            self._wants_link = True
            await self._status("unlink", partial(self._door.datadist.unlink_clusters, force=chance.random() < 0.3))
        elif way < 0.4:
            await self._ask_health()

    async def _make_link(self) -> None:
        if await self._status("link", self._door.datadist.link_clusters):
            self._wants_link = False
            self._linked.wake()
        else:
            await anyio.sleep(0.05)

    async def _status(self, operation: str, call: Callable[..., Any]) -> bool:
        results = await call([self.info], LINK_MILLIS)
        return self._side.ended(operation, results.errors[0]) == GOOD

    async def _ask_health(self) -> None:
        try:
            await self._door.datadist.check_link_status(self.cluster_id)
        except LLMException as error:
            self._side.ended("check_link_status", error)
        else:
            self._side.ended("check_link_status", None)

    async def _until_linked(self) -> None:
        """Wait for a link, but only briefly unless nothing may fail: operations without a link must fail properly, too."""
        if not await self._door.is_linked(self.cluster_id):
            with anyio.move_on_after(10.0 if self._side.profile.is_calm else 0.2):
                await self._linked.wait()

    # ---- pulls ----

    async def _pull(self, patch: Patch, chance: random.Random) -> None:
        await self._until_linked()
        is_whole = patch is self._whole
        model, among, layers = (WHOLE_MODEL, STAMPED, None) if is_whole else (SOURCE_MODEL, SOURCE, some_layers(chance))
        targets = some(chance, patch.blocks, min(PATCH, among))
        sources = chance.sample(range(among), len(targets))
        extra: dict[str, Any] = {"src_layer_range": layers, "dst_layer_range": layers}
        if "notes" in self._door.can and chance.random() < 0.1:
            extra["notify"] = self._mail.content({})
        key = BlocksCacheKey(self.cluster_id, model)
        call = ("pull_blocks", key, patch.cache, sources, targets)
        await self._transfers.pulled(patch, sources, targets, call, chance, "", extra, tensors_of(layers))
        for words in patch.ledger.wrong(chance.sample(patch.between, 3)):
            self._side.violated("I1", f"beside a pull from {self.cluster_id}: {words}")

    async def _pull_slot(self, chance: random.Random) -> None:
        await self._until_linked()
        if self.peer is None:
            return
        source, target = chance.randrange(SLOTS), 1 + 2 * chance.randrange(SLOTS)
        key = CacheKeyByIdAndIndex(self.cluster_id, self.peer.slots, source)
        await self._transfers.pulled(
            self._slots, [source], [target], ("pull_cache", key, self._slots.cache, target), chance
        )

    async def _request(self, chance: random.Random) -> None:
        """Pull a request's slot. Pulling all of it consumes its key."""
        await self._until_linked()
        answer = await self._mail.ask(self.cluster_id, {"ask": "request"})
        if answer is None or answer["request"] is None:
            await anyio.sleep(0.02)
            return
        number, target = answer["request"], 1 + 2 * chance.randrange(SLOTS)
        key, cache = CacheKey(self.cluster_id, number, REQUEST_MODEL), self._slots.cache
        call = ("pull_cache", key, cache, target)
        if await self._transfers.pulled(self._slots, [number], [target], call, chance) is None or chance.random() < 0.5:
            await self._mail.ask(self.cluster_id, {"ask": "forget", "request": number})
            return
        self._side.open(self._slots.ledger, [target])
        if await self._transfers.outcome(call, chance, " again", may_fail=True) == GOOD:
            self._side.violated("I8", f"{key} was consumed, and could be pulled once more")
        await self._door.usable(cache)
        self._slots.ledger.reclaim([target])

    async def _move_user(self, user: UserTarget, chance: random.Random) -> None:
        await self._until_linked()
        await user.one(chance)

    async def _push(self, chance: random.Random) -> None:
        """Push blocks, and ask the owner for the result."""
        await self._until_linked()
        sources = some(chance, range(PATCH))
        targets = chance.sample(range(1, 2 * PATCH, 2), len(sources))
        self._version += 1
        self._out_ledger.write(sources, self._version)
        key = BlocksCacheKey(self.cluster_id, INBOX_MODEL)
        if await self._transfers.outcome(("push_blocks", key, self._out, sources, targets), chance) != GOOD:
            return
        question = {"ask": "pushed", "sources": sources, "targets": targets, "version": self._version}
        answer = await self._mail.ask(self.cluster_id, question)
        if answer is not None and answer["wrong"]:
            self._side.violated("I6", f"a push to {self.cluster_id}: {answer['wrong']}")

    # ---- leases ----

    async def _lease(self, patch: Patch, chance: random.Random) -> None:
        await self._until_linked()
        targets = some(chance, patch.blocks, LEASED // 2)
        seconds = chance.choice((0.02, 0.2, 1.0))
        answer = await self._mail.ask(self.cluster_id, {"ask": "lease", "count": len(targets), "seconds": seconds})
        if answer is None or answer["ticket"] is None:
            return
        ticket, way = answer["ticket"], chance.random()
        if way < 0.1:
            await self._release(ticket)
            return
        if way < 0.3:
            await anyio.sleep(chance.uniform(0, 2 * seconds))
        count = len(answer["versions"])
        targets, sources = targets[:count], ticket["blocks"][:count]
        call = ("pull_leased", ticket, patch.cache, targets)
        stamps = await self._transfers.pulled(
            patch, sources, targets, call, chance, "", {"deadline": 2.0}, may_fail=True
        )
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
        """Ask the owner for layers, and check each as it arrives if the interface reports single layers."""
        await self._until_linked()
        patch, began = self._layers, time.monotonic()
        targets = some(chance, patch.blocks)
        sources = chance.sample(range(SOURCE), len(targets))
        self._side.open(patch.ledger, targets)
        question = {
            "ask": "layers", "sources": sources, "targets": targets, "seed": chance.getrandbits(32),
            "addresses": patch.cache.tensor_addrs, "model": self._key_here(LAYERS_MODEL).model_id,
        }  # fmt: skip
        if "receive" in self._door.can:
            answer = await self._ask_and_watch(question, patch, sources, targets)
        else:
            answer = await self._mail.ask(self.cluster_id, question)
        if answer is not None and answer["status"] == GOOD:
            self._side.tally.ended("receive_layers", GOOD)
            self._transfers.came(patch, sources, targets, began)
            return
        await self._door.usable(patch.cache)
        patch.ledger.reclaim(targets)
        await anyio.sleep(0.01)

    async def _ask_and_watch(
        self, question: Content, patch: Patch, sources: list[int], targets: list[int]
    ) -> Content | None:
        answer: Content | None = None
        try:
            async with (
                self._manager.receive_layers(self.cluster_id, patch.cache) as receiver,
                anyio.create_task_group() as group,
            ):
                group.start_soon(self._watch, receiver, patch, sources, targets)
                answer = await self._mail.ask(self.cluster_id, question)
                if answer is None or answer["status"] != GOOD:
                    group.cancel_scope.cancel()
        except* LLMException as errors:
            self._side.ended("receive_layers", _first(errors))
        return answer

    async def _watch(self, receiver: LayerReceiver, patch: Patch, sources: list[int], targets: list[int]) -> None:
        try:
            for layer in range(LAYERS):
                await receiver.layer(layer)
                patch.ledger.landed(targets, self.cluster_id, sources, range(2 * layer, 2 * layer + 2))
        except LLMException as error:  # the owner's answer tells the same
            self._side.ended("layer", error, may_fail=True)


def _first(errors: BaseExceptionGroup[LLMException]) -> LLMException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
