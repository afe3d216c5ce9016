"""The puller's transfers on some terms, and checks of what they moved."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import anyio

from aiodatadist import Cache, LLMStatusCode
from aiodatadist._cli.chaos.doors import Door
from aiodatadist._cli.chaos.side import Side
from aiodatadist._cli.chaos.tally import GOOD
from aiodatadist._cli.chaos.terms import NO_TERMS, some_terms
from aiodatadist.testing import BlockLedger, BlockStamp


class Place(Protocol):
    """The memory that a transfer moves into."""

    @property
    def cache(self) -> Cache | None:
        """The cache of the place, or None if there is none now."""

    ledger: BlockLedger


class Transfers:
    """The transfers from and to one cluster of the owner's.

    A call is an operation of the interface with its arguments; ``kind`` distinguishes calls of the same operation.
    """

    def __init__(self, side: Side, door: Door, cluster_id: int) -> None:
        self._side, self._door, self._cluster_id = side, door, cluster_id

    async def outcome(
        self, call: Sequence[Any], chance: random.Random, kind: str = "", extra: dict[str, Any] | None = None,
        may_fail: bool = False,
    ) -> str:  # fmt: skip
        """Make a call on some terms, and return its status."""
        operation, *arguments = call
        terms = some_terms(chance, self._side.profile) if "terms" in self._door.can else NO_TERMS
        options = {**(extra or {}), **terms.arguments}
        begin = partial(self._door.start, operation, chance, *arguments, **options)
        name = terms.named(f"{operation}{kind}")
        status = await self._side.outcome(name, begin, chance, may_fail, terms.deadline)
        if status == LLMStatusCode.LLM_LINK_BUSY.name:
            await anyio.sleep(chance.uniform(0, 0.05))
        return status

    async def pulled(
        self, into: Place, sources: Sequence[int], targets: Sequence[int], call: Sequence[Any], chance: random.Random,
        kind: str = "", extra: dict[str, Any] | None = None, tensors: range | None = None, may_fail: bool = False,
    ) -> list[BlockStamp] | None:  # fmt: skip
        """Pull into a place and check the result. Returns None if it failed."""
        cache = into.cache
        assert cache is not None
        self._side.open(into.ledger, targets, tensors)
        began = time.monotonic()
        if await self.outcome(call, chance, kind, extra, may_fail) == GOOD:
            return self.came(into, sources, targets, began, tensors)
        await self._door.usable(cache)
        into.ledger.reclaim(targets, tensors)
        return None

    def came(
        self, into: Place, sources: Sequence[int], targets: Sequence[int], began: float, tensors: range | None = None
    ) -> list[BlockStamp]:
        """Check the blocks that a transfer moved, and return their stamps."""
        stamps = into.ledger.landed(targets, self._cluster_id, sources, tensors)
        generations = {stamp.generation for stamp in stamps}
        if len(generations) > 1:
            self._side.violated("I6", f"one transfer from {self._cluster_id} brought generations {generations}")
        self._side.good(self._cluster_id, began, stamps[0].generation)
        return stamps
