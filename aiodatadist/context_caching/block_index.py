"""Which blocks are in the pool, as far as can be known: by the layouts that ranks have noted down there."""

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

from aiodatadist.context_caching.identity.names import LAYOUT_RECORD_BYTES, Names, Shape
from aiodatadist.context_caching.pools.contract import PoolKey, PoolTimeout, PoolUnreachable
from aiodatadist.context_caching.results import CcResult, CcStatus
from aiodatadist.context_caching.transfer.pipeline import LATE_TOLERANCE, SaveLoadCall, TransferPipeline, in_time
from aiodatadist.counting import Incident

logger = logging.getLogger(__name__)

RECORD_AGAIN_SECONDS: Final = 30.0
"""Seconds after which a save that stores nothing looks again whether its layout is still noted down in the pool."""
NOTE_PATIENCE: Final = 1.0
"""Seconds that this may hold up a save."""
RECORD_RETRY_SECONDS: Final = 5.0
"""Seconds after which it is tried again when it failed."""
AT_ONCE: Final = 512
"""Hashes asked for at a time."""
KEYS_AT_ONCE: Final = 2048
"""Keys that a pool is asked about at a time: each takes some microseconds of the loop's."""


T = TypeVar("T")


@dataclass(frozen=True)
class ExistsQuery:
    """What about blocks is asked for.

    Attributes:
        shards: that have to have them.
        groups: layer groups that all have to be there; None: any one is enough.
        local_only: in the local read cache.
        lease_ms: for so long what is found shall stay, if the pool can do that.
        deadline: a time of the loop's clock.
    """

    shards: Sequence[str]
    groups: Sequence[int] | None
    local_only: bool
    lease_ms: int
    deadline: float

    def groups_of(self, shape: Shape) -> Sequence[int]:
        return range(shape.groups) if self.groups is None else self.groups

    def is_possible(self, shape: Shape) -> bool:
        return self.groups is None or max(self.groups) < shape.groups


class BlockIndex:
    """What is there of one rank's blocks, or of all ranks'.

    Every call raises PoolTimeout or PoolUnreachable when there is no answer; ``deadline`` is a time of the loop's clock.
    """

    def __init__(self, names: Names, pipeline: TransferPipeline) -> None:
        self._names = names
        self._pipeline = pipeline
        self._own: Shape | None = None
        self._recorded = -math.inf
        self._is_recording = False
        self._not_before = 0.0
        self._shapes: dict[str, Shape] = {}  # of shards whose layout records were read

    def register(self, shape: Shape | None) -> None:
        """This rank's blocks have this layout from now on; None: none."""
        self._own, self._recorded, self._not_before = shape, -math.inf, 0.0

    def layout_record_bytes(self, call: SaveLoadCall) -> int:
        """What the note takes beside the values of a call; 0 if it would take the place of one of them."""
        header, pool = self._pipeline.wrapping.nbytes, self._pipeline.pool
        has_room = all(pool.keeps([LAYOUT_RECORD_BYTES + header, size + header]) > 1 for size in set(call.memory.sizes))
        return LAYOUT_RECORD_BYTES + header if has_room else 0

    async def record_layout(self, has_stored: bool, deadline: float) -> None:
        """See that our layout is in the pool, for processes that have hashes and no cache: whenever something was stored,
        since the pool may have lost everything before, and now and then. What was saved is saved all the same if it fails.
        """
        now = anyio.current_time()
        is_due = self._recorded + RECORD_AGAIN_SECONDS <= now
        if self._own is None or not (is_due or has_stored) or self._is_recording or now < self._not_before:
            return  # of many who notice one is enough
        self._is_recording = True
        try:
            deadline = min(deadline - 2 * LATE_TOLERANCE, now + NOTE_PATIENCE)  # before the call is late
            is_there = await in_time(self._write_layout_record(self._own, is_due, deadline), deadline)
        except (PoolTimeout, PoolUnreachable) as problem:
            told = "the layout could not be noted down: %s", problem
            self._pipeline.incidents.add(Incident.SAVE_FAILED, logger, *told, level=logging.INFO)
            is_there = False
        finally:
            self._is_recording = False
        if not is_there:
            self._recorded, self._not_before = -math.inf, now + RECORD_RETRY_SECONDS
        elif is_due:
            self._recorded = now

    async def _write_layout_record(self, shape: Shape, is_due: bool, deadline: float) -> bool:
        """Whether it is there now. What it says is only looked at when that is due."""
        key = self._names.of_layout_record(self._names.shard)
        if not is_due and await self._pipeline.has_layout_record(key, deadline):
            return True
        return await self._pipeline.write_layout_record(key, shape.layout_record(), deadline)

    async def exists(self, hashes: Sequence[int], question: ExistsQuery) -> CcResult:
        """A part at a time, up to the one with the first gap."""
        details = [CcStatus.SKIPPED] * len(hashes)
        for first in range(0, len(hashes), AT_ONCE):
            part = hashes[first : first + AT_ONCE]
            found = await self._find(part, question)
            if not all(found):
                details[first : first + len(part)] = [CcStatus.OK if there else CcStatus.MISS for there in found]
                break
            details[first : first + len(part)] = [CcStatus.OK] * len(part)
            await anyio.lowlevel.checkpoint()
        return CcResult.of(details)

    async def _find(self, hashes: Sequence[int], question: ExistsQuery) -> list[bool]:
        """Which of them are there in each of the shards. One without a layout has nothing; those behind it do not matter."""
        shards = question.shards
        shapes = await self._shapes_of(shards, question.local_only, question.deadline)
        known = list(takewhile(lambda shard: shard in shapes and question.is_possible(shapes[shard]), shards))
        if len(known) < len(shards):
            self._shapes.pop(shards[len(known)], None)  # perhaps it has other layer groups now: look again next time
        keys: list[PoolKey] = []
        for shard in known:
            if keys:
                await anyio.lowlevel.checkpoint()  # names are made a shard at a time: others have their turn in between
            shape = shapes[shard]
            keys += self._names.of_blocks(product(hashes, question.groups_of(shape)), shape, shard)
        found = self._pipeline.local.has(keys)
        if not question.local_only and not all(found):
            answers = await self._asked(list(compress(keys, map(not_, found))), question.lease_ms, question.deadline)
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
                del self._shapes[shard]  # perhaps they have another layout now: look again next time
        return everywhere if len(known) == len(shards) else [False] * len(hashes)

    async def _asked(self, keys: Sequence[PoolKey], lease_ms: int, deadline: float) -> list[bool]:
        found: list[bool] = []
        for part in _portions(keys):
            if found:
                await anyio.lowlevel.checkpoint()
            question = self._pipeline.pool.exists_many(part, lease_ms=lease_ms, deadline=deadline)
            answers = await self._pipeline.ask(question, deadline)
            if len(answers) != len(part):
                raise PoolUnreachable(f"the pool gave {len(answers)} answers to {len(part)} questions")
            found += map(bool, answers)
        return found

    async def _shapes_of(self, shards: Sequence[str], local_only: bool, deadline: float) -> dict[str, Shape]:
        """The layouts that are known: ours, and what other ranks have noted down. Reads those that are not, all at once."""
        problems: list[PoolTimeout | PoolUnreachable] = []

        async def read(shard: str) -> None:
            try:
                record = await self._pipeline.read_layout_record(
                    self._names.of_layout_record(shard), LAYOUT_RECORD_BYTES, deadline
                )
            except (PoolTimeout, PoolUnreachable) as problem:  # not in a group of exceptions
                problems.append(problem)
                group.cancel_scope.cancel()
            else:
                if record is not None and (shape := Shape.from_layout_record(record)) is not None:
                    shapes[shard] = self._shapes[shard] = shape

        shapes = dict(self._shapes)  # other calls may forget them while this one reads
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
        """Forget blocks of this rank's shard; how many values there were in the pool."""
        shape = (await self._shapes_of([self._names.shard], False, deadline)).get(self._names.shard)
        if shape is None:
            return 0
        keys: list[PoolKey] = []
        for part in _portions(hashes):
            if keys:
                await anyio.lowlevel.checkpoint()
            keys += self._names.of_blocks(product(part, range(shape.groups)), shape)
        return await self.remove_keys(keys, deadline)

    async def exists_keys(self, keys: Sequence[PoolKey], lease_ms: int, deadline: float) -> list[bool]:
        """Which values are there, of the caller's own names."""
        found = self._pipeline.local.has(keys)
        answers = iter(await self._asked(list(compress(keys, map(not_, found))), lease_ms, deadline))
        return [there or next(answers) for there in found]

    async def remove_keys(self, keys: Sequence[PoolKey], deadline: float) -> int:
        """Forget values; how many there were. They are gone from the local read cache in any case."""
        self._pipeline.local.remove(keys)
        removed = 0
        try:
            for part in _portions(keys):
                await anyio.lowlevel.checkpoint()
                removed += await self._pipeline.ask(self._pipeline.pool.remove_many(part, deadline=deadline), deadline)
        finally:
            self._pipeline.local.remove(keys)  # what was read while the pool still had them
        return removed


def _either(some: list[bool], others: list[bool]) -> list[bool]:
    return list(map(or_, some, others))


def _both(some: list[bool], others: list[bool]) -> list[bool]:
    return list(map(and_, some, others))


def _portions(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """A part at a time: others want the loop in between."""
    return (items[first : first + KEYS_AT_ONCE] for first in range(0, len(items), KEYS_AT_ONCE))
