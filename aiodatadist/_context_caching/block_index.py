"""The knowledge which blocks are in the pool, from the layouts that ranks have recorded there."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import compress, product, takewhile
from operator import and_, not_, or_
from typing import Final, TypeVar

import anyio
import anyio.lowlevel

from aiodatadist._context_caching.identity.names import LAYOUT_RECORD_BYTES, Names, Shape
from aiodatadist._context_caching.pools.contract import PoolKey, PoolTimeout, PoolUnreachable
from aiodatadist._context_caching.results import CcResult, CcStatus
from aiodatadist._context_caching.transfer.pipeline import LATE_TOLERANCE, SaveLoadCall, TransferPipeline, in_time
from aiodatadist._counting import Incident

logger = logging.getLogger(__name__)

RECORD_AGAIN_SECONDS: Final = 30.0
"""Seconds after which a save that stores nothing checks again that its layout is still recorded in the pool."""
NOTE_PATIENCE: Final = 1.0
"""Seconds for which recording the layout may delay a save."""
RECORD_RETRY_SECONDS: Final = 5.0
"""Seconds after which a failed recording is tried again."""
AT_ONCE: Final = 512
"""The number of hashes that are looked up at a time."""
KEYS_AT_ONCE: Final = 2048
"""Keys that a pool is asked for at a time: each takes some microseconds of the event loop."""
NAMES_AT_ONCE: Final = 1 << 15
"""Most names of a shard that are made at a time. A layout that was read from the pool may claim any number of groups."""


T = TypeVar("T")


@dataclass(frozen=True)
class ExistsQuery:
    """A question about blocks.

    Attributes:
        shards: the shards that must have the blocks.
        groups: layer groups that must all be there. If None, any one is enough.
        local_only: if true, only the local read cache is asked.
        lease: seconds for which the pool should keep what was found, if it can.
        deadline: a time of the loop's clock.
    """

    shards: Sequence[str]
    groups: Sequence[int] | None
    local_only: bool
    lease: float
    deadline: float

    def groups_of(self, shape: Shape) -> Sequence[int]:
        """Return the layer groups to look up in this layout."""
        return range(shape.groups) if self.groups is None else self.groups

    def is_possible(self, shape: Shape) -> bool:
        """Return True if the layout has all the groups."""
        return self.groups is None or max(self.groups) < shape.groups


class BlockIndex:
    """The blocks of one rank, or of all ranks, that are in the pool.

    Every call raises PoolTimeout or PoolUnreachable if there is no answer. ``deadline`` is a time of the loop's clock.
    """

    def __init__(self, names: Names, pipeline: TransferPipeline) -> None:
        self._names = names
        self._pipeline = pipeline
        self._own: Shape | None = None
        self._recorded = -math.inf
        self._is_recording = False
        self.not_before = 0.0
        self._shapes: dict[str, Shape] = {}  # by shard, as read from the pool

    def register(self, shape: Shape | None) -> None:
        """Set the layout of this rank's blocks; None if it has none."""
        self._own, self._recorded, self.not_before = shape, -math.inf, 0.0

    def layout_record_bytes(self, call: SaveLoadCall) -> int:
        """Return the size of the layout's record, or 0 if there is no room for it beside the values of a call."""
        header, pool = self._pipeline.wrapping.nbytes, self._pipeline.pool
        has_room = all(pool.keeps([LAYOUT_RECORD_BYTES + header, size + header]) > 1 for size in set(call.memory.sizes))
        return LAYOUT_RECORD_BYTES + header if has_room else 0

    async def record_layout(self, has_stored: bool, deadline: float) -> None:
        """Keep this rank's layout in the pool, for processes that have hashes and no cache.

        It is checked after every save that stored something, because the pool may have lost everything before, and from
        time to time. If that fails, the save itself is unaffected.
        """
        now = anyio.current_time()
        is_due = self._recorded + RECORD_AGAIN_SECONDS <= now
        if self._own is None or not (is_due or has_stored) or self._is_recording or now < self.not_before:
            return  # one of several concurrent saves is enough
        self._is_recording = True
        try:
            deadline = min(deadline - 2 * LATE_TOLERANCE, now + NOTE_PATIENCE)  # the save itself must not be late
            is_there = await in_time(self._write_layout_record(self._own, is_due, deadline), deadline)
        except (PoolTimeout, PoolUnreachable) as problem:
            told = "the layout could not be recorded in the pool: %s", problem
            self._pipeline.incidents.add(Incident.SAVE_FAILED, logger, *told, level=logging.INFO)
            is_there = False
        finally:
            self._is_recording = False
        if not is_there:
            self._recorded, self.not_before = -math.inf, now + RECORD_RETRY_SECONDS
        elif is_due:
            self._recorded = now

    async def _write_layout_record(self, shape: Shape, is_due: bool, deadline: float) -> bool:
        """Return True if the record is in the pool now. Its contents are only checked when that is due."""
        key = self._names.of_layout_record(self._names.shard)
        if not is_due and await self._pipeline.has_layout_record(key, deadline):
            return True
        return await self._pipeline.write_layout_record(key, shape.layout_record(), deadline)

    async def exists(self, hashes: Sequence[int], question: ExistsQuery) -> CcResult:
        """Look up hashes, a part at a time, up to the part with the first gap."""
        details = [CcStatus.SKIPPED] * len(hashes)
        first = 0
        while first < len(hashes):
            found = await self._find(hashes[first : first + AT_ONCE], question)
            end = first + len(found)
            if not all(found):
                details[first:end] = [CcStatus.OK if there else CcStatus.MISS for there in found]
                break
            details[first:end] = [CcStatus.OK] * len(found)
            first = end
            await anyio.lowlevel.checkpoint()
        return CcResult.of(details)

    async def _find(self, hashes: Sequence[int], question: ExistsQuery) -> list[bool]:
        """Return for each hash True if all the shards have it, for fewer hashes if a layout has very many groups.

        A shard without a known layout has nothing, and then the shards behind it do not matter.
        """
        shards = question.shards
        shapes = await self._shapes_of(shards, question.local_only, question.deadline)
        known = list(takewhile(lambda shard: shard in shapes and question.is_possible(shapes[shard]), shards))
        if len(known) < len(shards):
            self._shapes.pop(shards[len(known)], None)  # it may have other layer groups now: read it again next time
        widest = max((len(question.groups_of(shapes[shard])) for shard in known), default=1)
        hashes = hashes[: max(1, NAMES_AT_ONCE // widest)]
        keys: list[PoolKey] = []
        for shard in known:
            if keys:
                await anyio.lowlevel.checkpoint()  # names are made a shard at a time: other tasks run in between
            shape = shapes[shard]
            keys += self._names.of_blocks(product(hashes, question.groups_of(shape)), shape, shard)
        found = self._pipeline.local.has(keys)
        if not question.local_only and not all(found):
            answers = await self._asked(list(compress(keys, map(not_, found))), question.lease, question.deadline)
            behind = iter(answers)
            found = [there or next(behind) for there in found] if any(found) else answers
        everywhere, at = [True] * len(hashes), 0
        for shard in known:
            shape = shapes[shard]
            step = len(question.groups_of(shape))
            end = at + len(hashes) * step
            here = reduce(
                _either if question.groups is None else _both, (found[i:end:step] for i in range(at, at + step))
            )
            at = end
            everywhere = _both(everywhere, here)
            if not any(here) and shape is self._shapes.get(shard):
                del self._shapes[shard]  # the shard may have another layout now: read its record again next time
        return everywhere if len(known) == len(shards) else [False] * len(hashes)

    async def _asked(self, keys: Sequence[PoolKey], lease: float, deadline: float) -> list[bool]:
        found: list[bool] = []
        for part in _portions(keys):
            if found:
                await anyio.lowlevel.checkpoint()
            question = self._pipeline.pool.exists_many(part, lease=lease, deadline=deadline)
            answers = await self._pipeline.ask(question, deadline)
            if len(answers) != len(part):
                raise PoolUnreachable(f"the pool gave {len(answers)} answers to {len(part)} questions")
            found += map(bool, answers)
        return found

    async def _shapes_of(self, shards: Sequence[str], local_only: bool, deadline: float) -> dict[str, Shape]:
        """Return the known layouts: this rank's, and those that other ranks have recorded.

        Layouts that were not read before are read now, all at once.
        """
        problems: list[PoolTimeout | PoolUnreachable] = []

        async def read(shard: str) -> None:
            try:
                record = await self._pipeline.read_layout_record(
                    self._names.of_layout_record(shard), LAYOUT_RECORD_BYTES, deadline
                )
            # raised below: leaving the task group would wrap it in an ExceptionGroup
            except (PoolTimeout, PoolUnreachable) as problem:
                problems.append(problem)
                group.cancel_scope.cancel()
            else:
                if record is not None and (shape := Shape.from_layout_record(record)) is not None:
                    shapes[shard] = self._shapes[shard] = shape

        shapes = dict(self._shapes)  # a copy: other calls may remove entries while this one reads
        if self._own is not None:
            shapes[self._names.shard] = self._own
        unknown = [] if local_only else [shard for shard in shards if shard not in shapes]
        if unknown:
            async with anyio.create_task_group() as group:
                for shard in unknown:
                    group.start_soon(read, shard)
            if problems:
                raise problems[0]
        return shapes

    async def remove(self, hashes: Sequence[int], deadline: float) -> int:
        """Remove blocks of this rank's shard; return how many values the pool had of them."""
        shape = (await self._shapes_of([self._names.shard], False, deadline)).get(self._names.shard)
        if shape is None:
            return 0
        step = max(1, KEYS_AT_ONCE // shape.groups)
        parts = [hashes[first : first + step] for first in range(0, len(hashes), step)]

        def names(part: Sequence[int]) -> list[PoolKey]:
            return self._names.of_blocks(product(part, range(shape.groups)), shape)

        for part in parts:
            self._pipeline.local.remove(names(part))
            await anyio.lowlevel.checkpoint()
        return sum([await self.remove_keys(names(part), deadline) for part in parts])

    async def exists_keys(self, keys: Sequence[PoolKey], lease: float, deadline: float) -> list[bool]:
        """Return for each of the caller's own keys True if its value is there."""
        found = self._pipeline.local.has(keys)
        answers = iter(await self._asked(list(compress(keys, map(not_, found))), lease, deadline))
        return [there or next(answers) for there in found]

    async def remove_keys(self, keys: Sequence[PoolKey], deadline: float) -> int:
        """Remove values; return how many there were. The local read cache has forgotten them in any case."""
        self._pipeline.local.remove(keys)
        removed = 0
        try:
            for part in _portions(keys):
                await anyio.lowlevel.checkpoint()
                removed += await self._pipeline.ask(self._pipeline.pool.remove_many(part, deadline=deadline), deadline)
        finally:
            self._pipeline.local.remove(keys)  # again: a load may have copied them here while the pool still had them
        return removed


def _either(some: list[bool], others: list[bool]) -> list[bool]:
    return list(map(or_, some, others))


def _both(some: list[bool], others: list[bool]) -> list[bool]:
    return list(map(and_, some, others))


def _portions(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Return the items a part at a time, so that other tasks run in between."""
    return (items[first : first + KEYS_AT_ONCE] for first in range(0, len(items), KEYS_AT_ONCE))
