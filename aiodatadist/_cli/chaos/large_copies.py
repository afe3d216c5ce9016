"""Pushes of 128 MiB, which take so long that a process can be stopped in the middle."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial

import anyio
import anyio.lowlevel

from aiodatadist import BlocksCacheKey, Cache, LLMException, NotLinked
from aiodatadist._cli.chaos.doors import Door
from aiodatadist._cli.chaos.mail import Content, Mail
from aiodatadist._cli.chaos.messages import Copying
from aiodatadist._cli.chaos.side import LINGER, Side
from aiodatadist._cli.chaos.sizes import LARGE_BLOCKS, LARGE_MODEL, LOST, PULLER, large_desc
from aiodatadist._cli.chaos.tally import GOOD
from aiodatadist.testing import BlockLedger, soft_fault, soft_faults_cleared

LOOK = 0.0005
"""Seconds between two checks for the first byte."""
BEGIN = 1.0
"""Seconds in which a push must begin."""
AGAIN = 2.0
"""Seconds in which a stopped puller continues."""
MARK = bytes(32)
HALF, HELD = "HcclBatchPut:half=large@*", 0.3
"""The point where pushes pause, and the seconds: the command needs some milliseconds to stop the process."""


class LargePushes:
    """The puller's part: it makes one push each time the command asks for one.

    The push pauses half-way, and the command stops the process. The rest is written when the process continues: a
    device cannot be interrupted in the middle of a copy.
    """

    def __init__(self, side: Side, door: Door, mail: Mail, cluster_id: int) -> None:
        self._side, self._manager, self._mail = side, door.manager, mail
        self._cluster_id = cluster_id
        self._cache: Cache | None = None

    async def open(self) -> None:
        """Allocate what is pushed, if this profile has such stops."""
        if "copies" in self._side.profile.lanes:
            self._cache = await self._manager.allocate_blocks_cache(large_desc())
            await write_all(BlockLedger(self._cache, PULLER, self._side.settings.life))

    async def one(self, chance: random.Random) -> None:
        """Push once, if the command asked for it and the owner has the memory."""
        if self._cache is None or not self._side.is_large_wanted:
            return
        self._side.is_large_wanted = False
        answer = await self._mail.ask(self._cluster_id, {"ask": "large"})
        if answer is None or not answer["is_lent"]:
            return
        async with anyio.create_task_group() as group:
            with soft_faults_cleared():
                soft_fault(HALF)
                group.start_soon(self._push, self._cache, chance)
                await anyio.sleep(HELD)

    async def _push(self, cache: Cache, chance: random.Random) -> None:
        key, blocks = BlocksCacheKey(self._cluster_id, LARGE_MODEL), range(LARGE_BLOCKS)
        push = partial(self._manager.push_blocks, key, cache, blocks, blocks)
        status = await self._side.outcome("push_blocks large", push, chance)
        await self._mail.ask(self._cluster_id, {"ask": "pushed large", "is_good": status == GOOD})


class LargeInbox:
    """The owner's part: it lends memory for one push, and uses it for something else if the puller is lost meanwhile."""

    def __init__(self, side: Side, door: Door) -> None:
        self._side, self._door, self._manager = side, door, door.manager
        self._lent: tuple[Cache, BlockLedger] | None = None
        self._pushed = anyio.Event()

    async def lend(self) -> Content:
        """Answer a puller that asks for memory."""
        if self._lent is not None:
            return {"is_lent": False}
        try:
            cache = await self._manager.allocate_blocks_cache(large_desc(), self._key)
        except LLMException as error:
            self._side.ended("allocate large", error)
            return {"is_lent": False}
        ledger = BlockLedger(cache, self._door.cluster_id, self._side.settings.life)
        ledger.piece(0, 0)[: len(MARK)] = MARK
        self._lent, self._pushed = (cache, ledger), anyio.Event()
        return {"is_lent": True}

    @property
    def _key(self) -> BlocksCacheKey:
        return BlocksCacheKey(self._door.cluster_id, LARGE_MODEL)

    async def pushed(self, is_good: bool) -> Content:
        """Answer a puller that reports how its push ended."""
        if is_good and self._lent is not None:
            _, ledger = self._lent
            for block in ledger.blocks:
                ledger.landed([block], PULLER, [block])
                await anyio.lowlevel.checkpoint()
        self._pushed.set()
        return {}

    async def one(self, _: random.Random) -> None:
        """Report when bytes begin to arrive.

        If the puller is lost after that, reuse the memory, and check that nothing more arrives.
        """
        if self._lent is None:
            return
        cache, ledger = self._lent
        if await self._has_begun(ledger):
            self._side.say(Copying())
        is_lost = await self.is_lost()
        self._lent = None
        await self._manager.deallocate_blocks_cache(cache)
        self._side.tally.ended("deallocate large", "withheld" if self._is_withheld else GOOD)
        if is_lost:
            await self.use_memory()

    async def _has_begun(self, ledger: BlockLedger) -> bool:
        first = ledger.piece(0, 0)[: len(MARK)]
        with anyio.move_on_after(BEGIN):
            while first == MARK:  # noqa: ASYNC110 - a one-sided write tells its target nothing
                await anyio.sleep(LOOK)
        return first != MARK

    async def is_lost(self) -> bool:
        """Wait until the puller has reported the end of its push, or its link has ended."""
        with anyio.move_on_after(LOST + AGAIN):
            async with anyio.create_task_group() as group:
                group.start_soon(self._until_parted, group.cancel_scope)
                await self._pushed.wait()
                group.cancel_scope.cancel()
        return not self._pushed.is_set()

    async def _until_parted(self, scope: anyio.CancelScope) -> None:
        with suppress(NotLinked):
            await self._door.wait_closed(PULLER)
        scope.cancel()

    async def use_memory(self) -> None:
        """Allocate the same amount of memory. It may be the same memory only if nothing can land there."""
        try:
            cache = await self._manager.allocate_blocks_cache(large_desc())
        except LLMException as error:
            self._side.ended("allocate large", error)
            return
        ledger = BlockLedger(cache, self._door.cluster_id, self._side.settings.life)
        await write_all(ledger)
        with anyio.move_on_after(AGAIN):
            await self._door.datadist.wait_linked(PULLER)
        await anyio.sleep(LINGER)
        for block in ledger.blocks:
            for words in ledger.wrong([block]):
                self._side.violated("I2", f"memory that was given on: {words}")
            await anyio.lowlevel.checkpoint()
        await self._manager.deallocate_blocks_cache(cache)

    async def wait_settled(self) -> None:
        """Wait until no memory is withheld: at rest the puller is running, and has reported that it no longer writes."""
        while self._is_withheld:  # noqa: ASYNC110 - nothing tells
            await anyio.sleep(LINGER)

    @property
    def _is_withheld(self) -> bool:
        return any(usage.withheld for usage in self._manager.pool_usage().values())


async def write_all(ledger: BlockLedger) -> None:
    """Stamp all blocks, and let the event loop run between them."""
    for block in ledger.blocks:
        ledger.write([block])
        await anyio.lowlevel.checkpoint()
