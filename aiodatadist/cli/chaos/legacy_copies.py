"""Copies and swaps of a cluster of v1, which needs no peer for them, and looks at its own tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiodatadist import CacheDesc, CacheTask, DataType, LLMException, Placement, legacy
from aiodatadist.cli.chaos.tally import GOOD
from aiodatadist.testing import BlockLedger

if TYPE_CHECKING:
    from aiodatadist.cli.chaos.side import Side

BLOCKS, BLOCK, TENSORS = 8, 8 << 10, 2
HALF = BLOCKS // 2


class LegacyCopies:
    """A blocks cache whose lower half is copied to its upper half, and to memory of the host's, and back."""

    def __init__(self, side: Side, datadist: legacy.LLMDataDist) -> None:
        self._side, self._datadist = side, datadist
        self._manager, self._cluster_id = datadist.kv_cache_manager, datadist.cluster_id

    async def open(self) -> None:
        shape = [BLOCKS, BLOCK]
        self._cache = await self._manager.allocate_blocks_cache(CacheDesc(TENSORS, shape, DataType.DT_UINT8))
        host = CacheDesc(TENSORS, shape, DataType.DT_UINT8, Placement.HOST)
        self._memory = self._datadist.device.allocate(host.size * TENSORS, Placement.HOST)
        addresses = [self._memory.address + i * host.size for i in range(TENSORS)]
        self._host = legacy.KvCache.create_cpu_cache(host, addresses)
        self._ledgers = [BlockLedger(cache, self._cluster_id, i) for i, cache in enumerate((self._cache, self._host))]
        for number, ledger in enumerate(self._ledgers):
            ledger.write(ledger.blocks)
            self._side.ledgers[f"copies {self._cluster_id} {number}"] = ledger

    async def one(self, chance: random.Random) -> None:
        """Do one operation."""
        await chance.choice((self._copy, self._swap, self._look))(chance)

    async def _copy(self, chance: random.Random) -> None:
        source, target = chance.randrange(HALF), chance.randrange(HALF, BLOCKS)
        await self._move("copy_blocks", lambda: self._manager.copy_blocks(self._cache, {source: [target]}), 0, 0,
                         source, target, chance)  # fmt: skip

    async def _swap(self, chance: random.Random) -> None:
        source, target = chance.randrange(HALF), chance.randrange(HALF, BLOCKS)
        ends = [(self._cache, 0), (self._host, 1)]
        (from_, first), (to, second) = chance.sample(ends, 2)
        await self._move("swap_blocks", lambda: self._manager.swap_blocks(from_, to, {source: target}), first, second,
                         source, target, chance)  # fmt: skip

    async def _move(
        self, operation: str, begin: Callable[[], CacheTask], first: int, second: int, source: int, target: int,
        chance: random.Random,
    ) -> None:  # fmt: skip
        ledger = self._ledgers[second]
        self._side.open(ledger, [target])
        if await self._side.outcome(operation, begin, chance) != GOOD:
            ledger.reclaim([target])
            return
        (stamp,) = ledger.landed([target], self._cluster_id, [source])
        if stamp.generation != first:
            self._side.violated("I6", f"{operation} from cache {first} brought {stamp}")

    async def _look(self, chance: random.Random) -> None:
        """Copy one tensor out, and compare it."""
        tensor = chance.randrange(TENSORS)
        try:
            (copy,) = await self._manager.get_cache_tensors(self._cache, tensor)
        except LLMException as error:
            self._side.ended("get_cache_tensors", error)
            return
        self._side.tally.ended("get_cache_tensors", GOOD)
        blocks = [bytes(self._ledgers[0].piece(tensor, block)) for block in range(BLOCKS)]
        if copy.numpy().tobytes() != b"".join(blocks):
            self._side.violated("I6", f"a copy of tensor {tensor} is not what is in the cache")
