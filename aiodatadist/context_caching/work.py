"""Saving and loading, in waves: so many bytes of host memory at a time, whatever a call asks for.

To save, the pool lends stages, the stream gathers the caller's bytes into them, and the pool takes them. To load, the pool
lends values and the stream scatters them. An engine never sees the caller's memory: whatever it does after a deadline or a
cancellation, it does to memory of the pool's.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from aiodatadist.context_caching.budget import Budget
from aiodatadist.context_caching.envelope import Bare, Envelope, Wrapping
from aiodatadist.context_caching.hold import Hold
from aiodatadist.context_caching.mover import Mover, PlacementsOf, Step, StreamName, copies
from aiodatadist.context_caching.places import Memory
from aiodatadist.context_caching.pool import (
    GetStatus,
    KVPool,
    PoolKey,
    PoolTimeout,
    PoolUnreachable,
    PutStatus,
    Stage,
    Value,
)
from aiodatadist.context_caching.read_cache import LocalReadCache
from aiodatadist.context_caching.results import CcResult, CcStatus
from aiodatadist.context_caching.shelf import Lot

logger = logging.getLogger(__name__)

WAVE = 32 << 20
"""Bytes that a call handles at a time; a value that is larger goes alone."""
LATE = 0.02
"""Seconds that a pool may be late with saying that it missed a deadline, before it is not waited for any longer."""

_PUT = {
    PutStatus.STORED: CcStatus.OK,
    PutStatus.PRESENT: CcStatus.OK,
    PutStatus.REJECTED: CcStatus.REJECTED,
    PutStatus.FAILED: CcStatus.IO_ERROR,
}
_GOT = {
    GetStatus.MISS: CcStatus.MISS,
    GetStatus.WRONG_LENGTH: CcStatus.MISS,
    GetStatus.FAILED: CcStatus.IO_ERROR,
    GetStatus.NO_ROOM: CcStatus.REJECTED,
}

T = TypeVar("T")


async def in_time(work: Coroutine[Any, Any, T], deadline: float) -> T:
    """Raises PoolTimeout: it was not done a little after the deadline."""
    with anyio.CancelScope(deadline=deadline + LATE):
        return await work
    raise PoolTimeout("not done by the deadline")


@dataclass
class Call:
    """One save or load.

    Attributes:
        keys: of the values that have bytes.
        memory: the caller's side of them.
        total: keys of the caller's.
        deadline: of all that waits for somebody, a time of the loop's clock.
        copying: of the copies. Not limited where there is no time at all: what takes no waiting is done then.
        write_local, local_only: the local read cache gets a copy of what is written; nothing else is read.
        statuses: of each value, as far as known.
        is_stuck: the device did not let go of its memory.
    """

    keys: list[PoolKey]
    memory: Memory
    total: int
    deadline: float
    copying: float = math.inf
    write_local: bool = True
    local_only: bool = False
    is_stuck: bool = False
    statuses: list[CcStatus | None] = field(init=False)

    def __post_init__(self) -> None:
        self.statuses = [None] * len(self.keys)

    def result(self, unknown: CcStatus = CcStatus.SKIPPED) -> CcResult:
        """By key of the caller's: the first thing that went wrong with one of its values. Without values all is well."""
        details = [CcStatus.OK] * self.total
        for owner, status in zip(self.memory.owners, self.statuses, strict=True):
            if details[owner] is CcStatus.OK:
                details[owner] = status or unknown
        return CcResult.of(details)

    def size(self, value: int) -> int:
        return self.memory.sizes[value]


class Work:
    """What all calls of a cache share."""

    def __init__(
        self, pool: KVPool, local: LocalReadCache, mover: Mover, budget: Budget, *, fill_on_read: bool
    ) -> None:
        self.pool = pool
        self.local = local
        self.counts: Counter[str] = Counter()
        self.budget = budget
        self._mover = mover
        self._fill_on_read = fill_on_read
        self.wrapping: Wrapping = Bare() if pool.capabilities.in_process else Envelope()

    async def ask(self, question: Coroutine[Any, Any, T], deadline: float) -> T:
        """A question to the pool, by somebody whose own scope ends a little after the deadline. If that has passed already,
        only what takes no waiting is done.

        Raises:
            PoolTimeout, PoolUnreachable: no answer; also for whatever else a pool raises.
        """
        try:
            if anyio.current_time() < deadline:
                return await question
            with anyio.CancelScope(deadline=anyio.current_time() + LATE):
                return await question
        except (PoolTimeout, PoolUnreachable):
            raise
        except Exception as error:
            logger.exception("the %s pool failed", self.pool.capabilities.name)
            raise PoolUnreachable(f"the {self.pool.capabilities.name} pool raised {error!r}") from error
        raise PoolTimeout(f"the {self.pool.capabilities.name} pool did not answer in time")

    # ---- saving ----

    async def save(self, call: Call) -> None:
        """Sets the statuses. What there is no room for beside the rest of its wave gets another chance after it.

        Raises:
            PoolTimeout, PoolUnreachable, LLMException: nothing more can be said; no byte of the caller's is read any more.
        """
        waiting = deque(range(len(call.keys)))
        while waiting:
            wave = self._take_wave(call, waiting)
            waiting.extendleft(reversed(await self._in_budget(call, wave, self._save_wave)))

    async def _save_wave(self, call: Call, wave: list[int]) -> list[int]:
        """Returns the values to try again."""
        keys = [call.keys[v] for v in wave]
        present = await self.ask(self.pool.exists_many(keys, deadline=call.deadline), call.deadline)
        fresh = []
        for value, is_there in zip(wave, present, strict=True):
            if is_there:
                call.statuses[value] = CcStatus.OK
            else:
                fresh.append(value)
        self.counts["present"] += len(wave) - len(fresh)
        return await self._store(call, fresh) if fresh else []

    async def _store(self, call: Call, fresh: list[int]) -> list[int]:
        with Hold() as hold:
            stages = await self._stages(call, fresh, hold)
            if not stages:
                for value in fresh:
                    call.statuses[value] = CcStatus.REJECTED
                self.counts["rejected"] += len(fresh)
                return []
            addresses = {v: stage.address + self.wrapping.nbytes for v, stage in stages.items()}
            lots = self._local_room(call, addresses, hold) if call.write_local else {}
            await self._move("save", call, [*self._gathered(call, addresses, await self._mover.placements()),
                                            *self._copied(call, addresses, lots)], hold)  # fmt: skip
            self._keep_local(call, lots)
            await self._put(call, stages)
        return [v for v in fresh if v not in stages]

    async def _stages(self, call: Call, values: Sequence[int], hold: Hold) -> dict[int, Stage]:
        sizes = [call.size(v) + self.wrapping.nbytes for v in values]
        stages = await self.ask(self.pool.stage(sizes, deadline=call.deadline), call.deadline)
        return {v: hold.add(stage) for v, stage in zip(values, stages, strict=True) if stage is not None}

    async def _put(self, call: Call, stages: Mapping[int, Stage]) -> None:
        keys = [call.keys[v] for v in stages]
        await self.wrapping.seal(keys, list(stages.values()))
        put = self.pool.put_many(keys, list(stages.values()), deadline=call.deadline)
        for value, status in zip(stages, await self.ask(put, call.deadline), strict=True):
            call.statuses[value] = _PUT[status]
            if status is PutStatus.STORED:
                self.counts["saved"] += 1
                self.counts["saved_bytes"] += call.size(value)
            elif status is PutStatus.PRESENT:
                self.counts["present"] += 1
            else:
                self.counts["rejected"] += 1

    # ---- loading ----

    async def load(self, call: Call) -> None:
        """Sets the statuses, up to the first value that is not there.

        Raises:
            PoolTimeout, PoolUnreachable, LLMException: nothing more can be said; no byte lands any more.
        """
        waiting = deque(range(len(call.keys)))
        while waiting:
            wave = self._take_wave(call, waiting)
            loaded = await self._in_budget(call, wave, self._load_wave)
            if loaded < len(wave) and (not loaded or call.statuses[wave[loaded]] is not None):
                return
            waiting.extendleft(reversed(wave[loaded:]))  # the pool had no memory for them beside the others

    async def _load_wave(self, call: Call, wave: list[int]) -> int:
        """How many were there, from the first without a gap."""
        with Hold() as hold:
            removals = self.local.removals
            local, remote = await self._find(call, wave, hold)
            usable: dict[int, int] = {}
            for value in wave:
                if value not in local and value not in remote:
                    break
                usable[value] = local[value] if value in local else remote[value]
            fresh = {v: address for v, address in usable.items() if v in remote}
            lots = self._local_room(call, fresh, hold) if self._fill_on_read else {}
            await self._move("load", call, [*self._scattered(call, usable, await self._mover.placements()),
                                            *self._copied(call, fresh, lots)], hold)  # fmt: skip
            if removals == self.local.removals:
                self._keep_local(call, lots)
        for value in usable:
            call.statuses[value] = CcStatus.OK
            self.counts["loaded_bytes"] += call.size(value)
        self.counts["loaded"] += len(usable)
        self.counts["local"] += len(usable) - len(fresh)
        return len(usable)

    async def _find(self, call: Call, wave: list[int], hold: Hold) -> tuple[dict[int, int], dict[int, int]]:
        """Addresses of the payloads that are here, and of those that the pool lent."""
        local: dict[int, int] = {}
        for value in wave:
            copy = self.local.find(call.keys[value], call.size(value))
            if copy is not None:
                local[value] = hold.add(copy).address
        rest = [v for v in wave if v not in local]
        if call.local_only:
            for value in rest:
                call.statuses[value] = CcStatus.MISS
            self.counts["missed"] += len(rest)
            return local, {}
        values = await self._get(call, rest, hold) if rest else {}
        return local, {v: value.address + self.wrapping.nbytes for v, value in values.items()}

    async def _get(self, call: Call, wanted: Sequence[int], hold: Hold) -> dict[int, Value]:
        """Those that are there, and whole."""
        keys = [call.keys[v] for v in wanted]
        sizes = [call.size(v) + self.wrapping.nbytes for v in wanted]
        answers = await self.ask(self.pool.get_many(keys, sizes, deadline=call.deadline), call.deadline)
        values: dict[int, Value] = {}
        for value, answer in zip(wanted, answers, strict=True):
            if answer is GetStatus.NO_ROOM and value != wanted[0]:
                continue
            if isinstance(answer, GetStatus):
                call.statuses[value] = _GOT[answer]
                self.counts["missed"] += 1
            else:
                values[value] = hold.add(answer)
        proven = await self.wrapping.proven([call.keys[v] for v in values], list(values.values()))
        for value, is_proven in zip(list(values), proven, strict=True):
            if not is_proven:
                logger.warning("a value of the %s pool is damaged: it counts as absent", self.pool.capabilities.name)
                call.statuses[value] = CcStatus.MISS
                self.counts["missed"] += 1
                self.counts["damaged"] += 1
                del values[value]
        return values

    # ---- a few bytes of our own ----

    async def read_note(self, key: PoolKey, nbytes: int, deadline: float) -> bytes | None:
        """A small value, or None."""
        header = self.wrapping.nbytes
        with Hold() as hold:
            (answer,) = await self.ask(self.pool.get_many([key], [nbytes + header], deadline=deadline), deadline)
            if isinstance(answer, GetStatus):
                return None
            value = hold.add(answer)
            if not all(await self.wrapping.proven([key], [value])):
                return None
            with value.view() as view:
                return bytes(view[header:])

    async def write_note(self, key: PoolKey, note: bytes, deadline: float) -> bool:
        """Leave a small value in place of any other; whether it is there now."""
        (is_there,) = await self.ask(self.pool.exists_many([key], deadline=deadline), deadline)
        if is_there:
            if await self.read_note(key, len(note), deadline) == note:
                return True
            await self.ask(self.pool.remove_many([key], deadline=deadline), deadline)  # of another layout, or damaged
        header = self.wrapping.nbytes
        with Hold() as hold:
            (stage,) = await self.ask(self.pool.stage([len(note) + header], deadline=deadline), deadline)
            if stage is None:
                return False
            hold.add(stage)
            with stage.view() as view:
                view[header:] = note
            await self.wrapping.seal([key], [stage])
            (status,) = await self.ask(self.pool.put_many([key], [stage], deadline=deadline), deadline)
            return status is PutStatus.STORED

    # ---- what both need ----

    def _take_wave(self, call: Call, waiting: deque[int]) -> list[int]:
        most = min(WAVE, self.budget.limit)
        wave = [waiting.popleft()]
        nbytes = self._wire_size(call, wave[0])
        while waiting and nbytes + self._wire_size(call, waiting[0]) <= most:
            nbytes += self._wire_size(call, waiting[0])
            wave.append(waiting.popleft())
        return wave

    def _wire_size(self, call: Call, value: int) -> int:
        return call.size(value) + self.wrapping.nbytes

    async def _in_budget(
        self, call: Call, wave: list[int], work: Callable[[Call, list[int]], Coroutine[Any, Any, T]]
    ) -> T:
        share = self.budget.share(sum(self._wire_size(call, value) for value in wave))
        await self.budget.take(share, call.deadline)
        try:
            return await work(call, wave)
        finally:
            self.budget.give(share)

    @staticmethod
    def _gathered(call: Call, addresses: Mapping[int, int], placements_of: PlacementsOf) -> list[Step]:
        return [places.gathered() for places in call.memory.places(addresses, placements_of)]

    @staticmethod
    def _scattered(call: Call, addresses: Mapping[int, int], placements_of: PlacementsOf) -> list[Step]:
        return [places.scattered() for places in call.memory.places(addresses, placements_of)]

    async def _move(self, name: StreamName, call: Call, steps: Sequence[Step], hold: Hold) -> None:
        try:
            await self._mover.move(name, steps, call.copying, hold)
        finally:
            call.is_stuck |= hold.is_stuck

    def _local_room(self, call: Call, addresses: Mapping[int, int], hold: Hold) -> dict[int, Lot]:
        """Memory of the local read cache for those that it has not yet."""
        lots = {v: self.local.make_room(call.keys[v], call.size(v)) for v in addresses}
        return {v: hold.add(lot) for v, lot in lots.items() if lot is not None}

    @staticmethod
    def _copied(call: Call, addresses: Mapping[int, int], lots: Mapping[int, Lot]) -> list[Step]:
        return copies([(lot.address, addresses[v], call.size(v)) for v, lot in lots.items()])

    def _keep_local(self, call: Call, lots: Mapping[int, Lot]) -> None:
        for value, lot in lots.items():
            self.local.store(call.keys[value], lot)
