"""Pulls and pushes between memory that both ends registered themselves."""

from __future__ import annotations

import random
import time

import anyio

from aiodatadist import BlocksCacheKey, CacheKey, LLMClusterInfo, NotLinked, Placement
from aiodatadist._cli.chaos.doors import Door
from aiodatadist._cli.chaos.side import Side
from aiodatadist._cli.chaos.sizes import (
    LINK_MILLIS,
    LIVES,
    PULLER,
    SLOTS,
    USER,
    USER_MODEL,
    some,
    user_desc,
    user_slots,
)
from aiodatadist._cli.chaos.transfers import Transfers
from aiodatadist._cli.chaos.user_memory import UserMemory

PULLED, PUSHED = range(1, USER, 2), range(0, USER, 2)
"""Blocks of the puller's memory: those that are pulled into, and those that are pushed from."""


class UserTarget:
    """A cluster of the owner's, with user memory at the other end."""

    def __init__(self, side: Side, door: Door, cluster_id: int) -> None:
        self._side, self._cluster_id = side, cluster_id
        self._transfers = Transfers(side, door, cluster_id)
        self._memories = [
            UserMemory(side, door, f"user {place.name.lower()} {cluster_id}", user_desc(place))
            for place in (Placement.DEVICE, Placement.HOST)
        ]
        self._slots = UserMemory(side, door, f"user slots {cluster_id}", user_slots(), [])

    async def one(self, chance: random.Random) -> None:
        """Do one operation. Register the memory first if it is not registered."""
        memory = chance.choice([*self._memories, self._slots])
        if await memory.lend() is None:
            return
        if chance.random() < 0.05:  # most of the time there are links, and it is refused
            await memory.take_back()
        elif memory is self._slots:
            await self._pull_slot(chance)
        elif chance.random() < 0.3 and self._side.profile.one_sided and memory is self._memories[0]:
            await self.push(memory, chance)
        else:
            await self.pull(memory, chance)

    async def pull(self, memory: UserMemory, chance: random.Random) -> None:
        targets = some(chance, list(PULLED))
        sources = chance.sample(PUSHED, len(targets))
        call = ("pull_blocks", self._key, memory.cache, sources, targets)
        await self._transfers.pulled(memory, sources, targets, call, chance, " user")

    async def _pull_slot(self, chance: random.Random) -> None:
        source, target = chance.randrange(SLOTS), chance.randrange(SLOTS)
        call = ("pull_cache", CacheKey(self._cluster_id, source, USER_MODEL), self._slots.cache, target)
        await self._transfers.pulled(self._slots, [source], [target], call, chance, " user")

    async def push(self, memory: UserMemory, chance: random.Random) -> None:
        sources = some(chance, list(PUSHED), len(PULLED))
        targets = chance.sample(PULLED, len(sources))
        await self._transfers.outcome(("push_blocks", self._key, memory.cache, sources, targets), chance, " user")

    @property
    def _key(self) -> BlocksCacheKey:
        return BlocksCacheKey(self._cluster_id, USER_MODEL)

    async def give_back(self) -> None:
        """Take all of it back, because there is no link."""
        for memory in (*self._memories, self._slots):
            if not await memory.take_back():
                self._side.violated("I5", f"there is no link, and memory of {self._cluster_id} is not given back")


class UserSource:
    """The user memory that one of the owner's clusters has registered.

    The even blocks are pulled from, the odd ones are pushed into. Each batch slot has a key that no pull
    consumes.
    """

    def __init__(self, side: Side, door: Door) -> None:
        self._side, self._door = side, door
        number = door.cluster_id
        key, keys = BlocksCacheKey(number, USER_MODEL), [CacheKey(number, slot, USER_MODEL) for slot in range(SLOTS)]
        self._blocks = UserMemory(side, door, f"user {number}", user_desc(Placement.DEVICE), key)
        self._slots = UserMemory(side, door, f"user slots {number}", user_slots(), keys)
        self._generation = side.settings.life * LIVES + LIVES // 2
        self._lent: dict[UserMemory, int] = {}

    async def one(self, chance: random.Random) -> None:
        """Register the memory; take it back when the link has ended, and leave it alone for a moment."""
        await self.lend()
        if self._side.profile.is_calm:
            return
        if not await self.is_parted(chance):
            if chance.random() < 0.03:
                results = await self._door.datadist.unlink_clusters([LLMClusterInfo(PULLER)], LINK_MILLIS)
                self._side.ended("unlink", results.errors[0])
        elif await self.take_back():
            await anyio.sleep(chance.uniform(0, 0.3))
            self._blocks.check()
            self._slots.check()

    async def is_parted(self, chance: random.Random) -> bool:
        try:
            with anyio.move_on_after(chance.uniform(0, 1)) as limit:
                await self._door.wait_closed(PULLER)
        except NotLinked:
            return True
        return not limit.cancelled_caught

    async def lend(self) -> None:
        """Register what is not registered. Each registration is a generation, distinct from those of allocated caches."""
        for memory in (self._blocks, self._slots):
            if memory.cache is None:
                self._generation += 1
                if await memory.lend(self._generation) is not None:
                    self._lent[memory] = self._generation
                    memory.ledger.begin(PULLED if memory is self._blocks else [])

    async def take_back(self) -> bool:
        """Return True if all of it is the caller's again."""
        for memory, generation in list(self._lent.items()):
            if not await memory.take_back():
                return False
            del self._lent[memory]
            self._side.tally.retired[f"{self._door.cluster_id}/{generation}"] = time.monotonic()
        return True
