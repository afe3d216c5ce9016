"""A process with a context cache: it saves blocks, loads what others saved, and checks what it got."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import anyio.abc

from aiodatadist import Cache, CacheDesc, DataType
from aiodatadist._cli.chaos.messages import Peer, SideSettings
from aiodatadist._cli.chaos.patch import Patch
from aiodatadist._cli.chaos.side import Side, to_its_end
from aiodatadist._cli.chaos.sizes import WIDE
from aiodatadist._cli.chaos.tally import GOOD
from aiodatadist.context_caching import (
    CcConfig_v1,
    CcResult,
    CcStatus,
    ContextCache,
    EmsException,
    EmsInternalError,
    EmsInvalidArgument,
    HealthGate,
    HealthRules,
    Transfer,
)
from aiodatadist.testing import BlockLedger

TOKENS, TOKEN = 16, 1 << 10
"""Tokens of a block, and bytes of each in one tensor."""
LAYERS = 2
TASKS = 3
PROMPTS = 24
READ_CACHE = 4 << 20
RULES = HealthRules(probe_every=0.2, successes=1, changes=1000, window=1.0)
"""Health rules by which an engine that recovered is used again within a round."""


class Saver(Side):
    """A process that shares a pool with the others; with ``memory:`` each has its own."""

    def __init__(self, settings: SideSettings) -> None:
        super().__init__(settings)
        blocks = TASKS * WIDE
        nbytes = blocks * TOKENS * TOKEN
        self._kv = [memoryview(bytearray(nbytes)) for _ in range(2 * LAYERS)]
        desc = CacheDesc(2 * LAYERS, [blocks, TOKENS * TOKEN], DataType.DT_UINT8)
        cache = Cache(1, desc, [0] * 2 * LAYERS, True)
        ledger = self.ledgers["kv"] = BlockLedger(cache, 0, views=self._kv)
        self._patches = [Patch(cache, ledger, i * WIDE) for i in range(TASKS)]
        for patch in self._patches:
            ledger.write(patch.between)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[dict[int, Peer]]:
        async with AsyncExitStack() as self._stack:
            yield {}

    def start(self, group: anyio.abc.TaskGroup) -> None:
        for number, patch in enumerate(self._patches):
            group.start_soon(self.work, f"blocks {number}", partial(self._turn, patch))

    async def meet(self, peers: dict[int, Peer]) -> None:
        """Do nothing: there are no peers."""

    async def resumed(self) -> None:
        """Open the cache. Its use of resources varies while it is open, so it is closed for checks."""
        config = CcConfig_v1(rank_id=0, device_id=0, model_id=f"chaos {self.settings.seed}")
        cache = await ContextCache.open(config, self.settings.url, READ_CACHE, gate=HealthGate(RULES))
        self._cache = await self._stack.enter_async_context(cache)
        shape = [TASKS * WIDE, TOKENS, TOKEN]
        await cache.register_kvcache([[self._kv[2 * i + j].cast("B", shape) for j in range(2)] for i in range(LAYERS)])

    async def drained(self) -> None:
        """Do nothing: operations wait for their own ends."""

    async def part(self) -> None:
        """Close the cache, and release everything."""
        await self._stack.aclose()

    async def _turn(self, patch: Patch, chance: random.Random) -> None:
        """Act like an engine: look blocks up, load those that exist, compute the rest, save all."""
        prompt, length = chance.randrange(PROMPTS), chance.randint(1, 8)
        hashes = [1 + prompt * 8 + i for i in range(length)]
        blocks = chance.sample(patch.blocks, length)
        way = chance.random()
        if way < 0.1:
            await self._ask(hashes, chance)
        elif way < 0.15:
            await self._remove(hashes, chance)
        else:
            await self._load(patch, hashes, blocks, chance)
            for number, block in zip(hashes, blocks, strict=True):
                patch.ledger.write_as(block, number, 0)
            await self._save(hashes, blocks, chance)
        for words in patch.ledger.wrong(chance.sample(patch.between, 3)):
            self.violated("I1", f"beside a load: {words}")

    async def _load(self, patch: Patch, hashes: list[int], blocks: list[int], chance: random.Random) -> None:
        self.open(patch.ledger, blocks)
        began = time.monotonic()
        chunks = [[(TOKENS * block, TOKENS) for block in blocks]]
        result = await self._outcome(
            "load", lambda: self._cache.start_load(hashes, chunks=chunks, timeout=self._patience(chance)), chance
        )
        loaded = 0 if result is None else result.success
        for number, block in zip(hashes[:loaded], blocks, strict=False):
            patch.ledger.landed([block], number, [0])
        patch.ledger.reclaim(blocks[loaded:])
        self.tally.moved += loaded * 2 * LAYERS * TOKENS * TOKEN
        if loaded:
            self.good(0, began, 0)

    async def _save(self, hashes: list[int], blocks: list[int], chance: random.Random) -> None:
        chunks = [[(TOKENS * block, TOKENS) for block in blocks]]
        await self._outcome(
            "save", lambda: self._cache.start_save(hashes, chunks=chunks, timeout=self._patience(chance)), chance
        )

    async def _ask(self, hashes: list[int], chance: random.Random) -> None:
        result = await self._cache.exists(hashes, timeout=self._patience(chance))
        self.tally.ended("exists", _status(result))

    async def _remove(self, hashes: list[int], chance: random.Random) -> None:
        try:
            await self._cache.remove(hashes, timeout=self._patience(chance))
        except EmsException as error:
            self._failed("remove", error)
        else:
            self.tally.ended("remove", GOOD)

    def _patience(self, chance: random.Random) -> float:
        """Return the seconds for a call: usually enough, and always if nothing may fail."""
        seconds = chance.choice((0.02, 0.3, 2.0, 2.0))
        return 20.0 if self.profile.is_calm else seconds

    def _failed(self, operation: str, error: EmsException) -> None:
        self.tally.ended(operation, error.status_code().name)
        if self.profile.is_calm or isinstance(error, (EmsInternalError, EmsInvalidArgument)):
            self.violated("I7", f"{operation}: {error!r}")

    async def _outcome(
        self, operation: str, begin: partial[Transfer] | object, chance: random.Random
    ) -> CcResult | None:
        """Run a transfer to its end, cancelled now and then, and return what it reports to have done."""
        assert callable(begin)
        transfer: Transfer = begin()
        results: list[CcResult | EmsException] = []

        async def wait() -> None:
            try:
                results.append(await transfer)
            except EmsException as error:
                results.append(error)

        await to_its_end(transfer, wait, chance)
        if not transfer.done():
            self.violated("I3", f"{operation}: after its end it is {transfer!r}")
        if not results:
            self.tally.ended(operation, "CANCELLED")
            return None
        (result,) = results
        if isinstance(result, EmsException):
            self._failed(operation, result)
            return None
        self.tally.ended(operation, _status(result))
        return result


def _status(result: CcResult) -> str:
    """Return success if everything is there, otherwise the status of the first key that is not."""
    statuses = [status for status in result.details if status is not CcStatus.OK]
    return statuses[0].name if statuses else GOOD
