"""The puller: one cluster that links to all clusters of the owner."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.abc

from aiodatadist import LLMRole, LLMStatusCode
from aiodatadist._cli.chaos.doors import DOORS, Door
from aiodatadist._cli.chaos.large_copies import LargePushes
from aiodatadist._cli.chaos.mail import Content, Mail
from aiodatadist._cli.chaos.messages import Peer
from aiodatadist._cli.chaos.own_copies import OwnCopies
from aiodatadist._cli.chaos.patch import Patch
from aiodatadist._cli.chaos.side import Side
from aiodatadist._cli.chaos.sizes import LINK_MILLIS, PULLER, PULLER_DEVICE, WIDE, whole_desc, whole_view
from aiodatadist._cli.chaos.target import Target
from aiodatadist.testing import BlockLedger


class Puller(Side):
    """The side that links, with a target for each of the owner's clusters."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[dict[int, Peer]]:
        opened = DOORS[self.profile.door].opened(LLMRole.DECODER, PULLER, self.profile, PULLER_DEVICE, None)
        async with opened as door:
            self.doors.append(door)
            self.mail = Mail(self, door, _no_answer)
            self.copies = OwnCopies(self, door)
            await self.copies.open()
            self._large = LargePushes(self, door, self.mail, self.settings.clusters[0])
            await self._large.open()
            patches = await self._whole(door)
            self._targets = [
                Target(self, door, self.mail, cluster_id, patch)
                for cluster_id, patch in zip(self.settings.clusters, patches, strict=True)
            ]
            for target in self._targets:
                await target.open()
            yield {}

    async def _whole(self, door: Door) -> list[Patch | None]:
        """Allocate a cache of production size, if the profile has one, and return a part of it for each target."""
        count = len(self.settings.clusters)
        if not self.profile.gib:
            return [None] * count
        cache = await door.allocate(whole_desc(self.profile))
        ledger = self.ledgers["whole"] = BlockLedger(whole_view(cache, count * WIDE), PULLER, self.settings.life)
        return [Patch(cache, ledger, number * WIDE) for number in range(count)]

    def start(self, group: anyio.abc.TaskGroup) -> None:
        group.start_soon(self.mail.read)
        group.start_soon(self.work, "copies", self.copies.one, 0.02)
        group.start_soon(self.work, "large", self._large.one)
        for target in self._targets:
            target.start(group)

    async def meet(self, peers: dict[int, Peer]) -> None:
        for target in self._targets:
            target.peer = peers.get(target.cluster_id)

    async def resumed(self) -> None:
        for target in self._targets:
            target.unlinked()

    async def drained(self) -> None:
        """Check that links last if nothing may fail. Operations wait for their own results."""
        for target in self._targets:
            await target.check_linked()

    async def part(self) -> None:
        for target in self._targets:
            await target.part_by_ranks()
        infos = [target.info for target in self._targets]
        status, each = await self.doors[0].datadist.unlink_clusters(infos, LINK_MILLIS)
        if status != LLMStatusCode.LLM_SUCCESS:
            self.violated("I3", f"nothing is under way, and unlinking says {[one.name for one in each]}")
        for target in self._targets:
            await target.take_back()


async def _no_answer(_: int, __: Content) -> Content:
    """Return no answer: the owner asks nothing."""
    return {}
