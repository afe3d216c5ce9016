"""Operations of a cluster that need no peer: caches that come and go, copies and swaps."""

from __future__ import annotations

import random
from asyncio import CancelledError
from contextlib import suppress
from typing import Any

from aiodatadist import Cache, CacheDesc, DataType, LLMException, OutOfMemory, Placement
from aiodatadist._cli.chaos.doors import Door
from aiodatadist._cli.chaos.side import Side
from aiodatadist._cli.chaos.sizes import BLOCK, desc, some
from aiodatadist._cli.chaos.tally import GOOD
from aiodatadist._cli.chaos.user_memory import UserMemory
from aiodatadist.testing import BlockLedger

BLOCKS = 16
TENSORS = 2


class OwnCopies:
    """A cache on the device and one on the host, whose lower half keeps what the upper half is copied from."""

    def __init__(self, side: Side, door: Door) -> None:
        self._side, self._door = side, door
        self._manager, self._cluster_id = door.manager, door.cluster_id
        self._caches: dict[Placement, Cache] = {}
        self._ledgers: dict[Placement, BlockLedger] = {}
        shape = CacheDesc(TENSORS, [BLOCKS // 2, BLOCK], DataType.DT_UINT8, Placement.HOST)
        self._operations = [self._copy, self._swap]
        self._operations += [self._look] if "tensors" in door.can else [self._come_and_go]
        if "memory" in door.can:
            self._user = UserMemory(side, door, f"user copies {door.cluster_id}", shape)
            self._operations.append(self._give_back)

    async def open(self) -> None:
        for placement in (Placement.DEVICE, Placement.HOST):
            shape = CacheDesc(TENSORS, [BLOCKS, BLOCK], DataType.DT_UINT8, placement)
            cache = await self._door.allocate(shape)
            ledger = BlockLedger(cache, self._cluster_id, placement.value)
            ledger.write(range(BLOCKS))
            self._caches[placement], self._ledgers[placement] = cache, ledger
            self._side.ledgers[f"{placement.name.lower()} copies {self._cluster_id}"] = ledger

    async def one(self, chance: random.Random) -> None:
        """Do one operation."""
        await chance.choice(self._operations)(chance)

    async def _copy(self, chance: random.Random) -> None:
        sources, targets = _pairs(chance)
        pairs = {source: [target] for source, target in zip(sources, targets, strict=True)}
        placement = Placement.DEVICE
        call = ("copy_blocks", self._caches[placement], pairs)
        await self._move(call, (placement, placement, sources, targets), chance)

    async def _swap(self, chance: random.Random) -> None:
        sources, targets = _pairs(chance)
        source, target = chance.sample((Placement.DEVICE, Placement.HOST), 2)
        pairs = dict(zip(sources, targets, strict=True))
        call = ("swap_blocks", self._caches[source], self._caches[target], pairs)
        await self._move(call, (source, target, sources, targets), chance)

    async def _move(
        self,
        call: tuple[Any, ...],
        what: tuple[Placement, Placement, list[int], list[int]],
        chance: random.Random,
    ) -> None:
        operation, *arguments = call
        source, target, sources, targets = what
        ledger = self._ledgers[target]
        self._side.open(ledger, targets)
        if await self._side.outcome(operation, lambda: self._door.start(operation, chance, *arguments), chance) != GOOD:
            ledger.reclaim(targets)
            return
        stamps = ledger.landed(targets, self._cluster_id, sources)
        if any(stamp.generation != source.value for stamp in stamps):
            self._side.violated("I6", f"{operation} from {source.name} brought {stamps[0]}")

    async def _come_and_go(self, chance: random.Random) -> None:
        """Allocate and free a small cache that no peer knows, unless the pool is full."""
        try:
            cache = await self._manager.allocate_blocks_cache(desc(chance.randint(1, 8), chance.choice((512, BLOCK))))
        except OutOfMemory as error:
            self._side.ended("allocate", error)
            return
        self._side.tally.ended("allocate", GOOD)
        ledger = BlockLedger(cache, self._cluster_id, 99)
        ledger.write(ledger.blocks)
        if len(ledger.blocks) > 1:
            ledger.begin([1])
            await self._door.start("copy_blocks", chance, cache, {0: [1]})
            ledger.landed([1], self._cluster_id, [0])
        for words in ledger.wrong():
            self._side.violated("I6", f"a cache that came and went: {words}")
        await self._manager.deallocate_blocks_cache(cache)
        self._side.tally.ended("deallocate", GOOD)

    async def _look(self, chance: random.Random) -> None:
        """Copy one tensor out, and compare it."""
        tensor, ledger = chance.randrange(TENSORS), self._ledgers[Placement.DEVICE]
        try:
            (copy,) = await self._manager.get_cache_tensors(self._caches[Placement.DEVICE], tensor)
        except LLMException as error:
            self._side.ended("get_cache_tensors", error)
            return
        self._side.tally.ended("get_cache_tensors", GOOD)
        if copy.numpy().tobytes() != b"".join(ledger.piece(tensor, block) for block in ledger.blocks):
            self._side.violated("I6", f"a copy of tensor {tensor} is not what is in the cache")

    async def _give_back(self, chance: random.Random) -> None:
        """Take back host memory that no peer knows, perhaps while blocks are being copied into it."""
        cache = await self._user.lend()
        if cache is None:
            return
        sources = chance.sample(range(BLOCKS // 2), BLOCKS // 2)
        self._user.ledger.begin(self._user.ledger.blocks)
        pairs = dict(zip(sources, self._user.ledger.blocks, strict=True))
        task = self._manager.swap_blocks(self._caches[Placement.DEVICE], cache, pairs)
        if chance.random() < 0.5:
            task.cancel()
        if not await self._user.take_back():
            self._side.violated("I5", "no peer knows of memory of the host's, and it is not given back")
        if not task.done():
            self._side.violated("I2", f"the memory is given back, and there is {task!r}")
        with suppress(CancelledError, LLMException):
            await task
        self._user.check()


def _pairs(chance: random.Random) -> tuple[list[int], list[int]]:
    sources = some(chance, range(BLOCKS // 2), BLOCKS // 2)
    return sources, chance.sample(range(BLOCKS // 2, BLOCKS), len(sources))
