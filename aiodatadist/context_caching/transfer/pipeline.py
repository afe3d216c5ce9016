"""Saving and loading, in waves: so many bytes of host memory at a time, whatever a call asks for.

To save, the pool lends stages, the stream gathers the caller's bytes into them, and the pool takes them. To load, the pool
lends values and the stream scatters them. An engine never sees the caller's memory: whatever it does after a deadline or a
cancellation, it does to memory of the pool's.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from aiodatadist.concurrency.byte_budget import ByteBudget
from aiodatadist.context_caching.memory.copy_list import CopyStep, copies
from aiodatadist.context_caching.memory.regions import Memory
from aiodatadist.context_caching.pools.contract import (
    GetStatus,
    KVPool,
    PoolKey,
    PoolTimeout,
    PoolUnreachable,
    PutStatus,
    Stage,
    Value,
)
from aiodatadist.context_caching.pools.lru_store import Reservation
from aiodatadist.context_caching.results import CcResult, CcStatus
from aiodatadist.context_caching.transfer.copies import CopyStreams, StreamName
from aiodatadist.context_caching.transfer.double_buffer import Sequential, double_buffer
from aiodatadist.context_caching.transfer.envelope import Bare, Envelope, Wrapping
from aiodatadist.context_caching.transfer.loans import LoanSet
from aiodatadist.context_caching.transfer.read_cache import LocalReadCache
from aiodatadist.context_caching.transfer.write_watch import WriteWatch
from aiodatadist.counting import Incident, Incidents
from aiodatadist.counting.callbacks import current_task, is_delivered, shown

logger = logging.getLogger(__name__)

WAVE = 32 << 20
"""Bytes that a call handles at a time; a value that is larger goes alone."""
FOREIGN_WAVE = 16 << 20
"""The same, for a pool outside this process: while one wave travels, the next is gathered, or the one before scattered."""
WHOLE = 8 << 20
"""Bytes of a call that go there in one wave, since more waves cost more than they hide. A larger call has two at least."""
AT_ONCE = 512
"""Values that the pool is asked for at a time."""
DAMAGED = 65536
"""Keys that are remembered at most because their values are damaged."""
HEALTH_TIMEOUT = 1.0
"""Seconds that a health check may take."""
LATE_TOLERANCE = 0.02
"""Seconds that a pool may be late with saying that it missed a deadline, before it is not waited for any longer."""

_PUT = {
    PutStatus.STORED: CcStatus.OK,
    PutStatus.PRESENT: CcStatus.OK,
    PutStatus.REJECTED: CcStatus.REJECTED,
    PutStatus.FAILED: CcStatus.IO_ERROR,
}
_PUT_COUNT = {PutStatus.PRESENT: "present", PutStatus.REJECTED: "rejected", PutStatus.FAILED: "failed"}
_GOT = {
    GetStatus.MISS: CcStatus.MISS,
    GetStatus.WRONG_LENGTH: CcStatus.MISS,
    GetStatus.FAILED: CcStatus.IO_ERROR,
    GetStatus.NO_ROOM: CcStatus.REJECTED,
}

T = TypeVar("T")


async def in_time(work: Coroutine[Any, Any, T], deadline: float) -> T:
    """Raises PoolTimeout: it was not done a little after the deadline."""
    with anyio.CancelScope(deadline=deadline + LATE_TOLERANCE):
        return await work
    raise PoolTimeout("not done by the deadline")


@dataclass
class _Found:
    """What a wave found, from its first value without a gap.

    Attributes:
        hold: of all that was lent for it.
        removals: from the local read cache, before it looked.
        addresses: of the payloads.
        remote: those of them that the pool lent.
        is_damaged: they end before one that is.
    """

    loans: LoanSet
    removals: int
    addresses: dict[int, int] = field(default_factory=dict)
    remote: dict[int, Value] = field(default_factory=dict)
    is_damaged: bool = False

    def end_before(self, value: int) -> None:
        self.is_damaged = True
        self.addresses = {v: address for v, address in self.addresses.items() if v < value}
        self.remote = {v: lent for v, lent in self.remote.items() if v < value}


@dataclass
class SaveLoadCall:
    """One save or load.

    Attributes:
        keys: of the values that have bytes.
        memory: the caller's side of them.
        total: keys of the caller's.
        deadline: of all that waits for the pool, a time of the loop's clock.
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


class TransferPipeline:
    """What all calls of a cache share."""

    def __init__(
        self, pool: KVPool, local: LocalReadCache, copy_streams: CopyStreams, budget: ByteBudget, *, fill_on_read: bool
    ) -> None:
        self.pool = pool
        self.local = local
        self.counts: Counter[str] = Counter()
        self.incidents = Incidents()
        self.budget = budget
        self._copy_streams = copy_streams
        self._fill_on_read = fill_on_read
        self._is_here = pool.capabilities.in_process
        self.wrapping: Wrapping = Bare() if self._is_here else Envelope()
        self._damaged: dict[PoolKey, None] = {}  # the oldest first
        self._writes = WriteWatch()

    async def ask(self, question: Coroutine[Any, Any, T], deadline: float) -> T:
        """A question to the pool, by a caller whose own scope ends a little after the deadline. If that has passed already,
        only what takes no waiting is done.

        Raises:
            PoolTimeout, PoolUnreachable: no answer; also for whatever else a pool raises.
        """
        task = current_task()
        try:
            if anyio.current_time() < deadline:
                return await question
            with anyio.CancelScope(deadline=anyio.current_time() + LATE_TOLERANCE):
                return await question
        except (PoolTimeout, PoolUnreachable):
            raise
        except BaseException as error:  # a pool may be the caller's
            if is_delivered(error, task):
                raise
            told = "the %s pool failed", self.pool.capabilities.name
            self.incidents.add(Incident.DEFECT, logger, *told, level=logging.ERROR, exc_info=True)
            raise PoolUnreachable(f"the {self.pool.capabilities.name} pool raised {shown(error)}") from error
        raise PoolTimeout(f"the {self.pool.capabilities.name} pool did not answer in time")

    async def is_healthy(self) -> bool:
        """Return True if the pool says so within a second. If it refused the last writes, it must take one, too."""
        deadline = anyio.current_time() + HEALTH_TIMEOUT
        try:
            return await in_time(self._is_healthy(deadline), deadline)
        except (PoolTimeout, PoolUnreachable):
            return False

    async def _is_healthy(self, deadline: float) -> bool:
        if not await self.ask(self.pool.healthy(deadline=deadline), deadline):
            return False
        probe = self._writes.probe
        return probe is None or await self._takes_a_write(probe, deadline)

    async def _takes_a_write(self, key: PoolKey, deadline: float) -> bool:
        """Store a small value, and remove it. Return False if the pool refuses."""
        status = await self._put_small(key, b"0", deadline)
        if status is PutStatus.STORED or status is PutStatus.PRESENT:
            await self.ask(self.pool.remove_many([key], deadline=deadline), deadline)
        return status is not PutStatus.FAILED

    # ---- saving ----

    async def save(self, call: SaveLoadCall, beside: int = 0) -> None:
        """Sets the statuses. What there is no room for beside the rest of its wave gets another chance after it. What is
        there already stays, but for values that a load of this cache found to be damaged: those are replaced. What the pool
        cannot keep together with the values before it is rejected: it would take their place, and without them it is not
        read.

        Args:
            beside: bytes that have to find room, too.

        Raises:
            EmsInvalidArgument: an address is no memory. Nothing was started.
            PoolTimeout, PoolUnreachable, LLMException: nothing more can be said; no byte of the caller's is read any more.
        """
        await self._look(call)
        sizes = [self._wire_size(call, v) for v in range(len(call.keys))]
        kept = self.pool.keeps([beside, *sizes]) - 1 if beside else self.pool.keeps(sizes)
        wave_bytes = self._wave_bytes(call)
        async with self._buffer(call, wave_bytes) as buffer:
            for first in range(0, len(call.keys), AT_ONCE):
                values = range(first, min(first + AT_ONCE, len(call.keys)))
                absent = await self._absent(call, values)
                self._reject(call, [v for v in absent if v >= kept])
                waiting = deque(v for v in absent if v < kept)
                while waiting:
                    wave = self._take_wave(call, waiting, wave_bytes)
                    is_alone = not buffer.is_busy
                    with ExitStack() as lent:
                        await self._take_budget(call, wave, lent)
                        stages, reservations = await self._fill(call, wave, lent.enter_context(LoanSet()))
                        await buffer.done()
                        if stages:
                            put = partial(self._put, call, stages, reservations, lent.pop_all())
                            await buffer.go_on(put, is_last=len(stages) == len(wave) and not waiting)
                    if not stages and is_alone:
                        self._reject(call, wave)
                    elif len(stages) < len(wave):  # there may be room once all others have been put
                        await buffer.done()
                        waiting.extendleft(v for v in reversed(wave) if v not in stages)
        rejected = [size for size, status in zip(sizes, call.statuses, strict=True) if status is CcStatus.REJECTED]
        if rejected:
            self.incidents.add(
                Incident.NO_ROOM,
                logger,
                "no room in the %s pool for %d of %d values, the largest of %d bytes: %s",
                self.pool.capabilities.name,
                len(rejected),
                len(sizes),
                max(rejected),
                self.pool.why_no_room(max(rejected)),
            )

    def _reject(self, call: SaveLoadCall, values: Sequence[int]) -> None:
        for value in values:
            call.statuses[value] = CcStatus.REJECTED
        self.counts["rejected"] += len(values)

    async def _absent(self, call: SaveLoadCall, values: Sequence[int]) -> list[int]:
        """Those that are not there yet, or damaged."""
        keys = [call.keys[v] for v in values]
        present = await self.ask(self.pool.exists_many(keys, deadline=call.deadline), call.deadline)
        damaged = {key for key, is_there in zip(keys, present, strict=True) if is_there and key in self._damaged}
        if damaged:
            self.local.remove(list(damaged))
            await self.ask(self.pool.remove_many(list(damaged), deadline=call.deadline), call.deadline)
            present = [is_there and key not in damaged for key, is_there in zip(keys, present, strict=True)]
        absent: list[int] = []
        for value, is_there in zip(values, present, strict=True):
            if is_there:
                call.statuses[value] = CcStatus.OK
            else:
                absent.append(value)
                self._damaged.pop(call.keys[value], None)  # what is stored now is another value
        self.counts["present"] += len(values) - len(absent)
        return absent

    async def _fill(
        self, call: SaveLoadCall, wave: list[int], loans: LoanSet
    ) -> tuple[dict[int, Stage], dict[int, Reservation]]:
        """Stages with the values, ready to be put: for all of them, for those that there is room for, or for none. And copies
        for the local read cache, which may have them when the pool has."""
        stages = await self._stages(call, wave, loans)
        if not stages:
            return {}, {}
        addresses = {v: stage.address + self.wrapping.nbytes for v, stage in stages.items()}
        reservations = self._local_room(call, addresses, loans) if call.write_local else {}
        steps = [*self._gathered(call, addresses), *self._copied(call, addresses, reservations)]
        await self._move("save", call, steps, loans)
        await self.wrapping.seal([call.keys[v] for v in stages], list(stages.values()))
        return stages, reservations

    async def _stages(self, call: SaveLoadCall, values: Sequence[int], loans: LoanSet) -> dict[int, Stage]:
        sizes = [self._wire_size(call, v) for v in values]
        stages = await self.ask(self.pool.stage(sizes, deadline=call.deadline), call.deadline)
        return {v: loans.add(stage) for v, stage in zip(values, stages, strict=True) if stage is not None}

    async def _put(
        self, call: SaveLoadCall, stages: Mapping[int, Stage], reservations: Mapping[int, Reservation], lent: ExitStack
    ) -> None:
        removals = self.local.removals
        with lent:
            statuses = await self._put_in_pool([call.keys[v] for v in stages], list(stages.values()), call.deadline)
            stored = set()
            for value, status in zip(stages, statuses, strict=True):
                call.statuses[value] = _PUT[status]
                if status is PutStatus.STORED:
                    stored.add(value)
                    self.counts["saved"] += 1
                    self.counts["saved_bytes"] += call.size(value)
                else:
                    self.counts[_PUT_COUNT[status]] += 1
            if removals == self.local.removals:
                self._keep_local(call, {v: reservation for v, reservation in reservations.items() if v in stored})

    async def _put_in_pool(self, keys: Sequence[PoolKey], stages: Sequence[Stage], deadline: float) -> list[PutStatus]:
        statuses = await self.ask(self.pool.put_many(keys, stages, deadline=deadline), deadline)
        if failed := self._writes.heard(keys, statuses):
            name = self.pool.capabilities.name
            told = "the %s pool failed to store %d of %d values", name, failed, len(keys)
            self.incidents.add(Incident.WRITE_REFUSED, logger, *told)
        return statuses

    # ---- loading ----

    async def load(self, call: SaveLoadCall) -> None:
        """Sets the statuses, up to the first value that is not there. Behind one that failed others may have landed.

        Raises:
            EmsInvalidArgument: an address is no memory. Nothing was started.
            PoolTimeout, PoolUnreachable, LLMException: nothing more can be said; no byte lands any more.
        """
        await self._look(call)
        waiting = deque(range(len(call.keys)))
        before: _Found | None = None
        wave_bytes = self._wave_bytes(call)
        async with self._buffer(call, wave_bytes) as buffer:
            while waiting:
                await buffer.room()
                wave = self._take_wave(call, waiting, wave_bytes)
                with ExitStack() as lent:
                    await self._take_budget(call, wave, lent)
                    found = await self._find(call, wave, lent.enter_context(LoanSet()))
                    if not self._is_here:  # else two wait behind each other on the stream, and it never runs dry
                        await buffer.done()
                    if before is not None and before.is_damaged:
                        return
                    before = found
                    left = wave[len(found.addresses) :]
                    is_last = call.statuses[left[0]] is not None if left else not waiting
                    await buffer.go_on(partial(self._land, call, found, lent.pop_all()), is_last=is_last)
                if is_last:
                    return
                if left:  # the pool had no memory for them beside the others
                    await buffer.done()
                    waiting.extendleft(reversed(left))

    async def _find(self, call: SaveLoadCall, wave: list[int], loans: LoanSet) -> _Found:
        found = _Found(loans, self.local.removals)
        local: dict[int, int] = {}
        for value in wave:
            copy = self.local.find(call.keys[value], call.size(value))
            if copy is not None:
                local[value] = loans.add(copy).address
        rest = [v for v in wave if v not in local]
        remote: dict[int, Value] = {}
        if call.local_only:
            for value in rest:
                call.statuses[value] = CcStatus.MISS
            self.counts["missed"] += len(rest)
        elif rest:
            remote = await self._get(call, rest, loans)
        for value in wave:
            if value in local:
                found.addresses[value] = local[value]
            elif value in remote:
                found.remote[value] = remote[value]
                found.addresses[value] = remote[value].address + self.wrapping.nbytes
            else:
                break
        return found

    async def _get(self, call: SaveLoadCall, wanted: Sequence[int], loans: LoanSet) -> dict[int, Value]:
        keys = [call.keys[v] for v in wanted]
        sizes = [self._wire_size(call, v) for v in wanted]
        answers = await self.ask(self.pool.get_many(keys, sizes, deadline=call.deadline), call.deadline)
        if failed := answers.count(GetStatus.FAILED):
            told = "the %s pool failed to read %d of %d values", self.pool.capabilities.name, failed, len(keys)
            self.incidents.add(Incident.LOAD_FAILED, logger, *told)
        values: dict[int, Value] = {}
        for value, answer in zip(wanted, answers, strict=True):
            if answer is GetStatus.NO_ROOM and value != wanted[0]:
                continue
            if isinstance(answer, GetStatus):
                call.statuses[value] = _GOT[answer]
                self.counts["failed" if answer is GetStatus.FAILED else "missed"] += 1
            else:
                values[value] = loans.add(answer)
        return values

    async def _land(self, call: SaveLoadCall, found: _Found, lent: ExitStack) -> None:
        """Into the caller's memory, and what is new into the local read cache; up to the first that is damaged."""
        with lent:
            await self._prove(call, found)
            fresh = {v: found.addresses[v] for v in found.remote}
            reservations = self._local_room(call, fresh, found.loans) if self._fill_on_read else {}
            steps = [*self._scattered(call, found.addresses), *self._copied(call, fresh, reservations)]
            await self._move("load", call, steps, found.loans)
            if found.removals == self.local.removals:
                self._keep_local(call, reservations)
        for value in found.addresses:
            call.statuses[value] = CcStatus.OK
            self.counts["loaded_bytes"] += call.size(value)
        self.counts["loaded"] += len(found.addresses)
        self.counts["local"] += len(found.addresses) - len(fresh)

    async def _prove(self, call: SaveLoadCall, found: _Found) -> None:
        """Leave those before the first that is damaged."""
        proven = await self.wrapping.proven([call.keys[v] for v in found.remote], list(found.remote.values()))
        damaged = [v for v, is_proven in zip(found.remote, proven, strict=True) if not is_proven]
        for value in damaged:
            told = "a value of the %s pool is damaged: it counts as absent", self.pool.capabilities.name
            self.incidents.add(Incident.VALUE_DAMAGED, logger, *told)
            call.statuses[value] = CcStatus.MISS
            self._damaged[call.keys[value]] = None  # the next save replaces it
            if len(self._damaged) > DAMAGED:
                del self._damaged[next(iter(self._damaged))]
        self.counts["missed"] += len(damaged)
        self.counts["damaged"] += len(damaged)
        if damaged:
            found.end_before(damaged[0])

    # ---- a few bytes of our own ----

    async def read_layout_record(self, key: PoolKey, nbytes: int, deadline: float) -> bytes | None:
        """A small value, or None."""
        header = self.wrapping.nbytes
        with LoanSet() as loans:
            (answer,) = await self.ask(self.pool.get_many([key], [nbytes + header], deadline=deadline), deadline)
            if isinstance(answer, GetStatus):
                return None
            value = loans.add(answer)
            if not all(await self.wrapping.proven([key], [value])):
                return None
            with value.view() as view:
                return bytes(view[header:])

    async def has_layout_record(self, key: PoolKey, deadline: float) -> bool:
        """Whether there is any."""
        (is_there,) = await self.ask(self.pool.exists_many([key], deadline=deadline), deadline)
        return is_there

    async def write_layout_record(self, key: PoolKey, record: bytes, deadline: float) -> bool:
        """Leave a small value in place of any other; whether it is there now."""
        if await self.has_layout_record(key, deadline):
            if await self.read_layout_record(key, len(record), deadline) == record:
                return True
            await self.ask(self.pool.remove_many([key], deadline=deadline), deadline)  # of another layout, or damaged
        return await self._put_small(key, record, deadline) is PutStatus.STORED

    async def _put_small(self, key: PoolKey, contents: bytes, deadline: float) -> PutStatus:
        header = self.wrapping.nbytes
        with LoanSet() as loans:
            (stage,) = await self.ask(self.pool.stage([len(contents) + header], deadline=deadline), deadline)
            if stage is None:
                return PutStatus.REJECTED
            loans.add(stage)
            with stage.view() as view:
                view[header:] = contents
            await self.wrapping.seal([key], [stage])
            (status,) = await self._put_in_pool([key], [stage], deadline)
            return status

    # ---- what both need ----

    async def _look(self, call: SaveLoadCall) -> None:
        placements_of = await self._copy_streams.placements()
        for first in range(0, len(call.keys), AT_ONCE):
            if first:
                await anyio.lowlevel.checkpoint()
            call.memory.look(range(first, min(first + AT_ONCE, len(call.keys))), placements_of)

    def _wave_bytes(self, call: SaveLoadCall) -> int:
        """Payload of a wave, so that there is room for two, and something to do beside the first."""
        most = WAVE if self._is_here else min(FOREIGN_WAVE, max(WHOLE, sum(call.memory.sizes) // 2))
        return min(most, self.budget.limit // 2)

    def _buffer(self, call: SaveLoadCall, wave_bytes: int) -> AbstractAsyncContextManager[Sequential]:
        """Nothing goes on behind the only wave; or where there is no time to wait for the memory that it has, too."""
        is_alone = sum(call.memory.sizes) <= wave_bytes or call.deadline <= anyio.current_time()
        return nullcontext(Sequential()) if is_alone else double_buffer()

    def _take_wave(self, call: SaveLoadCall, waiting: deque[int], wave_bytes: int) -> list[int]:
        wave = [waiting.popleft()]
        payload, wire = call.size(wave[0]), self._wire_size(call, wave[0])
        while waiting and len(wave) < AT_ONCE:
            payload, wire = payload + call.size(waiting[0]), wire + self._wire_size(call, waiting[0])
            if payload > wave_bytes or wire > self.budget.limit // 2:
                break
            wave.append(waiting.popleft())
        return wave

    def _wire_size(self, call: SaveLoadCall, value: int) -> int:
        return call.size(value) + self.wrapping.nbytes

    async def _take_budget(self, call: SaveLoadCall, wave: list[int], lent: ExitStack) -> None:
        nbytes = sum(self._wire_size(call, value) for value in wave)
        try:
            await self.budget.take(nbytes, call.deadline)
        except TimeoutError:
            raise PoolTimeout(
                f"{self.budget.taken} of {self.budget.limit} bytes were in flight until the deadline"
            ) from None
        lent.callback(self.budget.give, nbytes)

    @staticmethod
    def _gathered(call: SaveLoadCall, addresses: Mapping[int, int]) -> list[CopyStep]:
        return [copies.gathered() for copies in call.memory.copy_lists(addresses)]

    @staticmethod
    def _scattered(call: SaveLoadCall, addresses: Mapping[int, int]) -> list[CopyStep]:
        return [copies.scattered() for copies in call.memory.copy_lists(addresses)]

    async def _move(self, name: StreamName, call: SaveLoadCall, steps: Sequence[CopyStep], loans: LoanSet) -> None:
        try:
            await self._copy_streams.move(name, steps, call.copying, loans)
        finally:
            call.is_stuck |= loans.is_stuck

    def _local_room(self, call: SaveLoadCall, addresses: Mapping[int, int], loans: LoanSet) -> dict[int, Reservation]:
        """Memory of the local read cache for those that it has not yet."""
        reservations = {v: self.local.make_room(call.keys[v], call.size(v)) for v in addresses}
        return {v: loans.add(reservation) for v, reservation in reservations.items() if reservation is not None}

    @staticmethod
    def _copied(
        call: SaveLoadCall, addresses: Mapping[int, int], reservations: Mapping[int, Reservation]
    ) -> list[CopyStep]:
        return copies([(reservation.address, addresses[v], call.size(v)) for v, reservation in reservations.items()])

    def _keep_local(self, call: SaveLoadCall, reservations: Mapping[int, Reservation]) -> None:
        for value, reservation in reservations.items():
            self.local.store(call.keys[value], reservation)
