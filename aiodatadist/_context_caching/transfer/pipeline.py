"""Saves and loads in waves: a limited number of bytes of host memory at a time, whatever a call asks for.

To save, the pool lends stages, the stream gathers the caller's bytes into them, and the pool takes them. To load, the
pool lends values, and the stream scatters them. A pool's engine never sees the caller's memory: whatever it does after
a deadline or a cancellation, it does to the pool's memory.
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

from aiodatadist._concurrency.byte_budget import ByteBudget
from aiodatadist._context_caching.memory.copy_list import CopyStep, copies
from aiodatadist._context_caching.memory.regions import Memory
from aiodatadist._context_caching.pools.contract import (
    GetStatus,
    KVPool,
    PoolKey,
    PoolTimeout,
    PoolUnreachable,
    PutStatus,
    Stage,
    Value,
)
from aiodatadist._context_caching.pools.lru_store import Reservation
from aiodatadist._context_caching.results import CcResult, CcStatus
from aiodatadist._context_caching.transfer.copies import CopyStreams, StreamName
from aiodatadist._context_caching.transfer.double_buffer import Sequential, double_buffer
from aiodatadist._context_caching.transfer.envelope import Bare, Envelope, Wrapping
from aiodatadist._context_caching.transfer.loans import LoanSet
from aiodatadist._context_caching.transfer.read_cache import LocalReadCache
from aiodatadist._context_caching.transfer.write_watch import WriteWatch
from aiodatadist._counting import Incident, Incidents
from aiodatadist._counting.callbacks import current_task, is_delivered, shown

logger = logging.getLogger(__name__)

WAVE = 32 << 20
"""Bytes that a call handles at a time; a larger value goes alone."""
FOREIGN_WAVE = 16 << 20
"""The same for a pool outside this process: one wave is gathered or scattered while another travels."""
WHOLE = 8 << 20
"""Bytes of a call that go to such a pool in one wave, because more waves cost more than they hide."""
AT_ONCE = 512
"""Values that the pool is asked for at a time."""
DAMAGED = 65536
"""Most keys that are remembered because their values are damaged."""
HEALTH_TIMEOUT = 1.0
"""Seconds that a health check may take."""
LATE_TOLERANCE = 0.02
"""Seconds by which a pool may report a missed deadline late, before the caller stops waiting for it."""

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
    GetStatus.FORGED: CcStatus.MISS,
    GetStatus.EXPIRED: CcStatus.MISS,
}

_SPOILED = {GetStatus.FORGED, GetStatus.EXPIRED, GetStatus.WRONG_LENGTH}

T = TypeVar("T")


async def in_time(work: Coroutine[Any, Any, T], deadline: float) -> T:
    """Return the result of the work. Raises PoolTimeout if it is not done shortly after the deadline."""
    with anyio.CancelScope(deadline=deadline + LATE_TOLERANCE):
        return await work
    raise PoolTimeout("not done by the deadline")


@dataclass
class _Found:
    """The values that a wave found, from its first one without a gap.

    Attributes:
        loans: everything that was lent for it.
        removals: the local read cache's count of removals before the search.
        addresses: addresses of the payloads.
        remote: those of the values that the pool lent.
        is_damaged: True if the values end in front of a damaged one.
    """

    loans: LoanSet
    removals: int
    addresses: dict[int, int] = field(default_factory=dict)
    remote: dict[int, Value] = field(default_factory=dict)
    is_damaged: bool = False

    def end_before(self, value: int) -> None:
        """Drop this value and all behind it, because it is damaged."""
        self.is_damaged = True
        self.addresses = {v: address for v, address in self.addresses.items() if v < value}
        self.remote = {v: lent for v, lent in self.remote.items() if v < value}


@dataclass
class SaveLoadCall:
    """A save or load."""

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
        """Return the result by the caller's keys: for each key the first failure of its values, or OK."""
        details = [CcStatus.OK] * self.total
        for owner, status in zip(self.memory.owners, self.statuses, strict=True):
            if details[owner] is CcStatus.OK:
                details[owner] = status or unknown
        return CcResult.of(details)

    def size(self, value: int) -> int:
        """Return the bytes of a value's payload."""
        return self.memory.sizes[value]


class TransferPipeline:
    """The state that all calls of a cache share."""

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
        self._is_sealed = pool.capabilities.sealed
        self.wrapping: Wrapping = Bare() if self._is_here or self._is_sealed else Envelope()
        self._damaged: dict[PoolKey, None] = {}  # in order of age: the oldest is dropped first
        self._writes = WriteWatch()

    async def ask(self, question: Coroutine[Any, Any, T], deadline: float) -> T:
        """Await an answer of the pool; the caller's own scope ends shortly after the deadline.

        If the deadline has passed already, the pool only does what needs no waiting.

        Raises:
            PoolTimeout, PoolUnreachable: if there is no answer, and for everything else that a pool raises.
        """
        task = current_task()
        try:
            if anyio.current_time() < deadline:
                return await question
            with anyio.CancelScope(deadline=anyio.current_time() + LATE_TOLERANCE):
                return await question
        except (PoolTimeout, PoolUnreachable):
            raise
        except BaseException as error:  # whatever it is: a pool may be the caller's own class
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
        """Store values, and set their statuses.

        Values without room beside the rest of their wave are tried again after it. Values that are there stay, except
        those that a load of this cache found damaged: they are replaced. A value that the pool cannot keep together
        with the values before it is rejected: it would evict them, and without them it is never read.

        Args:
            beside: bytes that must find room, too.

        Raises:
            EmsInvalidArgument: if an address is not mapped. Nothing was started.
            PoolTimeout, PoolUnreachable, LLMException: if the save failed; no more of the caller's bytes are read.
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
                    elif len(stages) < len(wave):  # there may be room once the other waves have been put
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
        """Return the values that are not there yet, or damaged."""
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
                self._damaged.pop(call.keys[value], None)  # the damaged value will be replaced now
        self.counts["present"] += len(values) - len(absent)
        return absent

    async def _fill(
        self, call: SaveLoadCall, wave: list[int], loans: LoanSet
    ) -> tuple[dict[int, Stage], dict[int, Reservation]]:
        """Fill stages with the values that find room: all, some or none. Fill copies for the local read cache, too.

        The local read cache may keep its copies once the pool has stored the values.
        """
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
        """Read values, and set their statuses, up to the first that is missing.

        If a value fails, values behind it may have landed.

        Raises:
            EmsInvalidArgument: if an address is not mapped. Nothing was started.
            PoolTimeout, PoolUnreachable, LLMException: if the load failed; no more bytes land.
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
                    # a pool in this process answers at once: two waves queue on the stream, which never idles
                    if not self._is_here:
                        await buffer.done()
                    if before is not None and before.is_damaged:
                        return
                    before = found
                    left = wave[len(found.addresses) :]
                    is_last = call.statuses[left[0]] is not None if left else not waiting
                    await buffer.go_on(partial(self._land, call, found, lent.pop_all()), is_last=is_last)
                if is_last:
                    return
                if left:  # the pool had no memory left for these
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
                self._note_spoiled(call.keys[value], answer)
                call.statuses[value] = _GOT[answer]
                self.counts["failed" if answer is GetStatus.FAILED else "missed"] += 1
            else:
                values[value] = loans.add(answer)
        return values

    async def _land(self, call: SaveLoadCall, found: _Found, lent: ExitStack) -> None:
        """Copy a wave into the caller's memory, up to the first damaged value.

        Values from the pool go into the local read cache, too.
        """
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
        """Keep only the values in front of the first damaged one."""
        proven = await self.wrapping.proven([call.keys[v] for v in found.remote], list(found.remote.values()))
        damaged = [v for v, is_proven in zip(found.remote, proven, strict=True) if not is_proven]
        for value in damaged:
            told = "a value of the %s pool is damaged: it counts as absent", self.pool.capabilities.name
            self.incidents.add(Incident.VALUE_DAMAGED, logger, *told)
            call.statuses[value] = CcStatus.MISS
            self._replace_soon(call.keys[value])
        self.counts["missed"] += len(damaged)
        self.counts["damaged"] += len(damaged)
        if damaged:
            found.end_before(damaged[0])

    def _replace_soon(self, key: PoolKey) -> None:
        """Remember a value that cannot be used, so that the next save replaces it."""
        self._damaged[key] = None
        if len(self._damaged) > DAMAGED:
            del self._damaged[next(iter(self._damaged))]

    def _note_spoiled(self, key: PoolKey, why: GetStatus) -> None:
        """Count a value of a sealed pool that is not as a member put it there. For a truncated one, the length tells."""
        if not self._is_sealed or why not in _SPOILED:
            return
        self._replace_soon(key)
        if why is GetStatus.EXPIRED:
            return
        self.counts["forged"] += 1
        told = "a value of the %s pool is not as a member of the group sealed it: it counts as absent"
        self.incidents.add(Incident.VALUE_FORGED, logger, told, self.pool.capabilities.name)

    # ---- small values ----

    async def read_layout_record(self, key: PoolKey, nbytes: int, deadline: float) -> bytes | None:
        """Return a small value, or None if it is missing or damaged."""
        header = self.wrapping.nbytes
        with LoanSet() as loans:
            (answer,) = await self.ask(self.pool.get_many([key], [nbytes + header], deadline=deadline), deadline)
            if isinstance(answer, GetStatus):
                self._note_spoiled(key, answer)
                return None
            value = loans.add(answer)
            if not all(await self.wrapping.proven([key], [value])):
                return None
            with value.view() as view:
                return bytes(view[header:])

    async def has_layout_record(self, key: PoolKey, deadline: float) -> bool:
        """Return True if the pool has a record under this key."""
        (is_there,) = await self.ask(self.pool.exists_many([key], deadline=deadline), deadline)
        return is_there

    async def write_layout_record(self, key: PoolKey, record: bytes, deadline: float) -> bool:
        """Store a small value in place of any other; return True if it is there now."""
        if await self.has_layout_record(key, deadline):
            if await self.read_layout_record(key, len(record), deadline) == record:
                return True
            # it is another layout's, or damaged
            await self.ask(self.pool.remove_many([key], deadline=deadline), deadline)
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
        """Return the payload of a wave, so that there is room for two waves, and work behind the first."""
        most = WAVE if self._is_here else min(FOREIGN_WAVE, max(WHOLE, sum(call.memory.sizes) // 2))
        return min(most, self.budget.limit // 2)

    def _buffer(self, call: SaveLoadCall, wave_bytes: int) -> AbstractAsyncContextManager[Sequential]:
        """Return the way in which waves overlap.

        They do not if there is only one wave, or no time to wait for the memory of a second one.
        """
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
        """Reserve memory of the local read cache for values that it does not have."""
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
