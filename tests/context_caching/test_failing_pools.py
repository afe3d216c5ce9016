"""A pool that never answers, answers late, raises or lies: it costs its own call, the deadline, and never a wrong byte."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

from aiodatadist._context_caching.pool_guard import PoolGuard
from aiodatadist._context_caching.pools.contract import (
    GetStatus,
    PoolKey,
    PoolTimeout,
    PoolUnreachable,
    PutStatus,
    Stage,
    Value,
)
from aiodatadist._context_caching.transfer.pipeline import LATE_TOLERANCE
from aiodatadist._testing.views import entries_of, store_of
from aiodatadist.context_caching import (
    CcResult,
    CcStatus,
    ContextCache,
    EmsException,
    EmsInternalError,
    EmsInvalidArgument,
    EmsIoError,
    EmsTimeout,
    HealthGate,
    HealthRules,
    KvBufferWrapper,
    MemoryPool,
)
from tests.clock import took
from tests.context_caching.fakes import Foreign, Misdeed, fails_with, from_then_on, never
from tests.context_caching.kit import ROOM, Kv, block_slots, by_slots, opened, rank

LIMIT = 20.0


@asynccontextmanager
async def foreign(nbytes: int = ROOM) -> AsyncIterator[Foreign]:
    async with await MemoryPool.open(nbytes) as inner:
        yield Foreign(inner)


@asynccontextmanager
async def loaded(pool: Foreign, kv: Kv, **options: Any) -> AsyncIterator[ContextCache]:
    """Open a cache that has saved the first four blocks."""
    async with opened(pool, kv, **options) as cache:
        assert (await cache.save([1, 2, 3, 4], **by_slots(range(4)))).success == 4
        pool.asked.clear()
        yield cache


@pytest.mark.autojump
@pytest.mark.parametrize("call", ["exists_many", "stage", "put_many", "get_many"])
async def test_a_pool_that_never_answers_costs_the_deadline(call: str) -> None:
    kv = Kv()
    async with foreign() as pool, loaded(pool, kv) as cache:
        pool.misdeeds[call] = never
        before = kv.image()
        work, hashes = (cache.load, [1, 2]) if call == "get_many" else (cache.save, [8, 9])
        with took(LIMIT + LATE_TOLERANCE), pytest.raises(EmsTimeout) as caught:
            await work(hashes, **by_slots([8, 9]), timeout=LIMIT)
        assert caught.value.partial == CcResult(0, 2)
        assert caught.value.partial.details == (CcStatus.TIMEOUT,) * 2
        assert kv.image() == before
        assert cache.statistics.bytes_in_flight == 0
        pool.misdeeds.clear()
        assert (await cache.save([8, 9], **by_slots([8, 9]))).success == 2
        assert (await cache.load([8, 9], **by_slots([0, 1]))).success == 2
    assert not store_of(pool.inner).is_lent


@pytest.mark.autojump
async def test_exists_of_a_pool_that_never_answers_finds_nothing() -> None:
    async with foreign() as pool, loaded(pool, Kv()) as cache:
        pool.misdeeds["exists_many"] = pool.misdeeds["healthy"] = never
        with took(LIMIT + LATE_TOLERANCE):
            result = await cache.exists([1, 2], timeout=LIMIT)
        assert (result.success, result.details) == (0, (CcStatus.TIMEOUT,) * 2)
        assert not await cache.check_health()


async def test_an_answer_that_comes_late_lands_nowhere() -> None:
    kv = Kv()
    async with foreign() as pool, loaded(pool, kv) as cache:
        released, answered = anyio.Event(), anyio.Event()

        async def late() -> None:
            try:
                await released.wait()
            finally:
                answered.set()

        pool.misdeeds["get_many"] = late
        before = kv.image()
        with pytest.raises(EmsTimeout):
            await cache.load([1, 2], **by_slots([8, 9]), timeout=0.05)
        released.set()
        await answered.wait()
        await anyio.lowlevel.checkpoint()
        assert kv.image() == before


raising = pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PoolUnreachable("no server there"), EmsIoError),
        (PoolTimeout("too slow"), EmsTimeout),
        (ZeroDivisionError("a bug of the engine's"), EmsIoError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)


@raising
@pytest.mark.parametrize("call", ["exists_many", "stage", "put_many", "get_many", "remove_many"])
async def test_a_pool_that_raises(call: str, error: Exception, expected: type[EmsException]) -> None:
    kv = Kv()
    async with foreign() as pool, loaded(pool, kv) as cache:
        pool.misdeeds[call] = fails_with(error)
        work: dict[str, Callable[[], Awaitable[object]]] = {
            "get_many": lambda: cache.load([1], **by_slots([8])),
            "remove_many": lambda: cache.remove([1]),
        }
        with pytest.raises(expected) as caught:
            await work.get(call, lambda: cache.save([8], **by_slots([8])))()
        assert str(error) in caught.value.message()
        if call == "exists_many":
            assert (await cache.exists([1])).success == 0
    assert not store_of(pool.inner).is_lent


@pytest.mark.autojump
@pytest.mark.parametrize("misdeed", [fails_with(PoolUnreachable("gone")), never], ids=["raises", "hangs"])
async def test_a_pool_that_dies_in_mid_load_loses_no_byte_that_was_counted(
    misdeed: Misdeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodatadist._context_caching.transfer.pipeline.FOREIGN_WAVE", 1)  # every block travels alone
    kv = Kv()
    async with foreign() as pool, loaded(pool, kv) as cache:
        saved = kv.rows(block_slots([0, 1]))
        pool.misdeeds["get_many"] = from_then_on(3, misdeed)
        with pytest.raises((EmsIoError, EmsTimeout)) as caught:
            await cache.load([1, 2, 3, 4], **by_slots([8, 9, 10, 11]), timeout=LIMIT)
        assert caught.value.partial == CcResult(2, 4)
        assert kv.rows(block_slots([8, 9])) == saved


async def test_behind_a_gap_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodatadist._context_caching.transfer.pipeline.FOREIGN_WAVE", 1)
    async with foreign() as pool, loaded(pool, Kv()) as cache:
        await cache.remove([2])
        result = await cache.load([1, 2, 3, 4], **by_slots([8, 9, 10, 11]))
        assert result.details == (CcStatus.OK, CcStatus.MISS, CcStatus.SKIPPED, CcStatus.SKIPPED)
        assert pool.asked["get_many"] == 2


async def test_waves_of_small_values_leave_room_for_another_within_the_bytes_in_flight() -> None:
    class Measuring(Foreign):
        most = 0

        async def stage(self, sizes: Sequence[int], *, deadline: float) -> list[Stage | None]:
            self.most = max(self.most, sum(sizes))
            return await super().stage(sizes, deadline=deadline)

    async with await MemoryPool.open(1 << 20) as inner:
        pool = Measuring(inner)
        async with opened(pool, Kv(rows=[[(1,)]], blocks=64), bytes_in_flight=1000) as cache:
            assert (await cache.save(list(range(64)), **by_slots(range(64)))).success == 64
        assert 400 < pool.most <= 500


@pytest.mark.parametrize(
    ("values", "in_flight", "waves"), [(4, 1000, 1), (5, 1000, 2), (16, 1000, 2), (32, 1000, 4), (16, 8, 4), (4, 8, 1)]
)
async def test_a_call_that_is_worth_it_has_two_waves_at_least(
    values: int, in_flight: int, waves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = Kv(rows=[[(512,)]], blocks=64)
    nbytes = len(kv.rows(block_slots([0]))[0])
    monkeypatch.setattr("aiodatadist._context_caching.transfer.pipeline.WHOLE", 4 * nbytes)
    monkeypatch.setattr("aiodatadist._context_caching.transfer.pipeline.FOREIGN_WAVE", 8 * nbytes)
    room = in_flight * (nbytes + 64)
    async with foreign() as pool, opened(pool, kv, bytes_in_flight=room) as cache:
        await cache.save([100], **by_slots([63]))  # with the note
        pool.asked.clear()
        assert (await cache.save(list(range(values)), **by_slots(range(values)))).success == values
        assert pool.asked["put_many"] == waves
        assert (await cache.load(list(range(values)), **by_slots(range(values)))).success == values
        assert pool.asked["get_many"] == waves
        assert cache.statistics.most_bytes_in_flight <= room


async def test_a_copy_is_there_when_the_value_is_and_not_before() -> None:
    kv = Kv()
    async with foreign() as pool, opened(pool, kv, read_cache_bytes=ROOM) as cache:
        await cache.save([0], **by_slots([0]))
        putting, may_put = anyio.Event(), anyio.Event()

        async def slowly() -> None:
            putting.set()
            await may_put.wait()
            raise PoolUnreachable("gone")

        pool.misdeeds["put_many"] = slowly
        transfer = cache.start_save([1], **by_slots([1]))
        await putting.wait()
        assert (await cache.exists([1], read_local_only=True)).success == 0
        may_put.set()
        with pytest.raises(EmsIoError):
            await transfer
        assert (await cache.exists([1], read_local_only=True)).success == 0
        del pool.misdeeds["put_many"]
        await cache.save([1], **by_slots([1]))
        assert (await cache.exists([0, 1], read_local_only=True)).success == 2


async def test_no_copy_is_kept_of_what_another_was_faster_with_or_removed_meanwhile() -> None:
    async with foreign() as pool, opened(pool, read_cache_bytes=ROOM) as cache, opened(pool) as other:

        async def first() -> None:
            pool.misdeeds.clear()
            await other.save_values(["a"], [[bytearray(b"theirs")]])

        async def removed() -> None:
            pool.misdeeds.clear()
            await cache.remove_values(["b"])

        for name, misdeed in (("a", first), ("b", removed)):
            pool.misdeeds["put_many"] = misdeed
            assert (await cache.save_values([name], [[bytearray(b"mine!!")]])).success == 1
            into = bytearray(6)
            assert (await cache.load_values([name], [[into]], read_local_only=True)).success == 0
        assert (await cache.load_values(["a"], [[into]])).success == 1
        assert into == b"theirs"


async def test_faults_with_single_values_are_counted_as_such() -> None:
    class Faulty(Foreign):
        async def put_many(
            self, keys: Sequence[PoolKey], stages: Sequence[Stage], *, deadline: float
        ) -> list[PutStatus]:
            return [PutStatus.FAILED, *(await super().put_many(keys, stages, deadline=deadline))[1:]]

        async def get_many(
            self, keys: Sequence[PoolKey], sizes: Sequence[int], *, deadline: float
        ) -> list[Value | GetStatus]:
            values = await super().get_many(keys, sizes, deadline=deadline)
            if not isinstance(values[-1], GetStatus):
                values[-1].release()
            return [*values[:-1], GetStatus.FAILED]

    async with await MemoryPool.open(ROOM) as inner, opened(Faulty(inner), Kv()) as cache:
        result = await cache.save_values(["a", "b", "c"], [[bytearray(8)]] * 3)
        assert result.details == (CcStatus.IO_ERROR, CcStatus.OK, CcStatus.OK)
        assert (cache.statistics.failed, cache.statistics.saved, cache.statistics.rejected) == (1, 2, 0)
        result = await cache.load_values(["b", "c"], [[bytearray(8)], [bytearray(8)]])
        assert result.details == (CcStatus.OK, CcStatus.IO_ERROR)
        assert (cache.statistics.failed, cache.statistics.loaded, cache.statistics.missed) == (2, 1, 0)


class Impatient(Foreign):
    """There is memory for one call at a time, and no call waits for it."""

    is_lent = False

    async def stage(self, sizes: Sequence[int], *, deadline: float) -> list[Stage | None]:
        if self.is_lent:
            return [None] * len(sizes)
        self.is_lent = True
        return await super().stage(sizes, deadline=deadline)

    async def put_many(self, keys: Sequence[PoolKey], stages: Sequence[Stage], *, deadline: float) -> list[PutStatus]:
        try:
            return await super().put_many(keys, stages, deadline=deadline)
        finally:
            self.is_lent = False


async def test_a_wave_that_has_no_room_beside_the_one_before_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = Kv(blocks=16)
    wave = 4 * sum(len(row) // 16 for row in kv.image())  # 4 blocks
    monkeypatch.setattr("aiodatadist._context_caching.transfer.pipeline.FOREIGN_WAVE", wave)

    async def slowly() -> None:
        for _ in range(100):
            await anyio.lowlevel.checkpoint()

    async with await MemoryPool.open(ROOM) as inner, opened(pool := Impatient(inner), kv) as cache:
        pool.misdeeds["put_many"] = slowly
        assert (await cache.save(list(range(16)), **by_slots(range(16)))).success == 16


@pytest.mark.autojump
async def test_without_time_only_what_takes_no_waiting_is_done() -> None:
    kv = Kv()
    async with foreign() as pool, loaded(pool, kv, read_cache_bytes=ROOM) as cache:
        saved = kv.rows(block_slots([0]))
        await cache.load([1], **by_slots([5]))
        pool.misdeeds["get_many"] = pool.misdeeds["exists_many"] = never
        assert (await cache.load([1], **by_slots([6]), timeout=0)).success == 1  # a copy is here
        assert kv.rows(block_slots([6])) == saved
        assert (await cache.exists([1], timeout=0)).success == 1
        await cache.remove([1])
        with took(2 * LATE_TOLERANCE):
            with pytest.raises(EmsTimeout):
                await cache.load([1], **by_slots([6]), timeout=0)
            assert (await cache.exists([1], timeout=0)).success == 0


@pytest.mark.parametrize("is_here", [True, False], ids=["embedded", "foreign"])
async def test_without_time_a_call_does_not_wait_for_the_memory_that_it_has_itself(
    is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = Kv(blocks=64)
    nbytes = sum(len(row) for row in kv.image())
    monkeypatch.setattr("aiodatadist._context_caching.transfer.pipeline.WAVE", nbytes // 8)
    monkeypatch.setattr("aiodatadist._context_caching.transfer.pipeline.FOREIGN_WAVE", nbytes // 8)
    inner = await MemoryPool.open(4 * nbytes + (1 << 20))
    pool = inner if is_here else Foreign(inner)
    async with inner, opened(pool, kv, bytes_in_flight=nbytes // 7) as cache:
        everything = list(range(64))
        assert (await cache.save(everything, **by_slots(everything), timeout=0)).success == 64
        saved = kv.image()
        kv.wipe()
        assert (await cache.load(everything, **by_slots(everything), timeout=0)).success == 64
        assert kv.image() == saved


def damage_the_second(pool: Foreign, at: int) -> None:
    lru_store = store_of(pool.inner)
    entry = list(entries_of(pool.inner).values())[1]  # the note of the layout is last
    with lru_store.view(entry.address, entry.nbytes) as view:
        view[at] ^= 0x40


async def test_what_is_behind_a_damaged_value_does_not_land(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodatadist._context_caching.transfer.pipeline.FOREIGN_WAVE", 1)
    kv = Kv()
    async with foreign() as pool, loaded(pool, kv) as cache:
        before = kv.rows(block_slots([10, 11]))
        damage_the_second(pool, -1)
        result = await cache.load([1, 2, 3, 4], **by_slots([8, 9, 10, 11]))
        assert result.details == (CcStatus.OK, CcStatus.MISS, CcStatus.SKIPPED, CcStatus.SKIPPED)
        assert kv.rows(block_slots([10, 11])) == before


@pytest.mark.parametrize("at", [0, 8, 17, 30, 40, 70, -1])
async def test_a_damaged_value_is_a_miss(at: int) -> None:
    kv = Kv()
    async with foreign() as pool, loaded(pool, kv) as cache:
        damage_the_second(pool, at)
        before = kv.image()
        result = await cache.load([1, 2, 3], **by_slots([8, 9, 10]))
        padding = range(40, 64)
        assert result.success == (3 if at in padding else 1)
        if at not in padding:
            assert cache.statistics.damaged == 1
            assert kv.rows(block_slots([9, 10])) == [row[9 * len(row) // 16 : 11 * len(row) // 16] for row in before]


async def test_a_value_of_another_key_is_a_miss() -> None:
    kv = Kv()
    async with foreign() as pool, loaded(pool, kv) as cache:
        lru_store = store_of(pool.inner)
        a, b = list(entries_of(pool.inner).values())[:2]
        with lru_store.view(a.address, a.nbytes) as left, lru_store.view(b.address, b.nbytes) as right:
            right[:] = left
        assert (await cache.load([1, 2], **by_slots([8, 9]))).success == 1


# ---- the health gate ----


async def test_a_gate_stops_the_use_of_a_pool_until_it_was_healthy_three_times() -> None:
    kv, gate = Kv(), HealthGate(HealthRules(probe_every=0.01))
    async with foreign() as pool, loaded(pool, kv, gate=gate) as cache:
        probes = anyio.Event()

        async def ill() -> None:
            if pool.asked["healthy"] >= 3:
                probes.set()
            raise PoolUnreachable("ill")

        pool.misdeeds["get_many"] = pool.misdeeds["healthy"] = ill
        with pytest.raises(EmsIoError):
            await cache.load([1], **by_slots([5]))
        asked = pool.asked["get_many"]
        assert (await cache.load([1], **by_slots([5]))).details == (CcStatus.SKIPPED,)
        assert (await cache.save([9], **by_slots([5]))).success == 0
        assert (await cache.exists([1])).success == 0
        with pytest.raises(ValueError, match=r"slots\[0\] is 999: must be in"):  # arguments are checked all the same
            await cache.load([1], slots=[999], offsets=[1])
        await probes.wait()
        assert pool.asked["get_many"] == asked
        recovered = anyio.Event()

        async def fourth() -> None:
            recovered.set()

        del pool.misdeeds["get_many"]
        pool.misdeeds["healthy"] = from_then_on(4, fourth)
        await recovered.wait()
        assert (await cache.load([1], **by_slots([5]))).success == 1


async def test_the_log_says_when_a_gate_closes_and_when_it_opens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aiodatadist")
    gate = HealthGate(HealthRules(probe_every=0.01, successes=2))
    async with foreign() as pool, loaded(pool, Kv(), gate=gate) as cache:
        recovering, recovered = anyio.Event(), anyio.Event()

        async def ill() -> None:
            await recovering.wait()

        async def third() -> None:
            recovered.set()

        pool.misdeeds["healthy"] = ill
        pool.misdeeds["get_many"] = fails_with(PoolUnreachable("gone"))
        for _ in range(2):
            transfers = [cache.start_load([1], **by_slots([at])) for at in (5, 6)]
            for transfer in transfers:
                await transfer.quiesced()
        assert not gate.is_open
        pool.misdeeds["healthy"] = from_then_on(3, third)
        recovering.set()
        await recovered.wait()
    said = [
        (record.levelname, record.getMessage()) for record in caplog.records if "foreign pool" in record.getMessage()
    ]
    assert [level for level, _ in said] == ["WARNING", "INFO"]
    assert said[0][1].startswith("the foreign pool is not used for now, and every call misses: it is probed in 0.0 s")
    assert said[1][1] == "the foreign pool is used again"


async def test_a_gate_says_when_it_is_probed(caplog: pytest.LogCaptureFixture) -> None:
    async with foreign() as pool, loaded(pool, Kv(), gate=HealthGate(HealthRules(probe_every=5000))) as cache:
        pool.misdeeds["get_many"] = fails_with(PoolUnreachable("gone"))
        with pytest.raises(EmsIoError):
            await cache.load([1], **by_slots([5]))
        assert re.search(r"it is probed in (5000\.0|49\d\d\.\d) s", caplog.text)


async def test_a_gate_is_one_caches() -> None:
    gate = HealthGate()
    async with foreign() as pool:
        async with opened(pool, gate=gate) as cache:
            with pytest.raises(EmsInvalidArgument, match="this gate belongs to another cache that is open"):
                await ContextCache.open(rank(), pool, gate=gate)
            assert await cache.check_health()
        with pytest.raises(EmsInvalidArgument, match="is not a kind of pool"):
            await ContextCache.open(rank(), "ftp://there", gate=gate)
        async with opened(pool, gate=gate) as cache:
            assert await cache.check_health()


def test_a_gate_that_was_given_back_is_not_given_back_again() -> None:
    gate = HealthGate()
    first = PoolGuard(gate)
    first.give()
    PoolGuard(gate)
    first.give()
    with pytest.raises(EmsInvalidArgument, match="this gate belongs to another cache that is open"):
        PoolGuard(gate)


class Faulty(HealthGate):
    """A gate of the caller's own that has a bug."""

    is_faulty = False

    def failed(self, now: float) -> None:
        raise ZeroDivisionError("in failed")

    def probed(self, healthy: bool, now: float) -> None:
        if self.is_faulty:
            raise ZeroDivisionError("in probed")


async def says_that_it_has_ended(cache: ContextCache, where: str, caplog: pytest.LogCaptureFixture) -> None:
    words = rf"this cache has ended: ZeroDivisionError\('{where}'\)"
    with pytest.raises(EmsInternalError, match=words):
        await cache.save([1], **by_slots([0]))
    with pytest.raises(EmsInternalError, match=words):
        cache.start_load_values(["a"], [[bytearray(8)]])
    with pytest.raises(EmsInternalError, match=words):
        await cache.exists([1])
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.getMessage() for record in told] == [f"this cache has ended: ZeroDivisionError('{where}')"]
    assert told[0].exc_info is not None
    with pytest.raises(EmsInternalError, match=words):
        await cache.aclose()
    with pytest.raises(EmsInvalidArgument, match="this cache is closed"):
        await cache.save([1], **by_slots([0]))
    assert not await cache.check_health()


async def test_a_cache_whose_own_task_failed_says_why(caplog: pytest.LogCaptureFixture) -> None:
    gate = Faulty(HealthRules(probe_every=0.01))
    async with foreign() as pool, loaded(pool, Kv(), gate=gate) as cache:
        pool.misdeeds["get_many"] = never
        transfer = cache.start_load([1], **by_slots([5]))
        gate.is_faulty = True
        with pytest.raises(EmsInternalError, match="this cache has ended: ZeroDivisionError") as caught:
            await transfer
        assert caught.value.partial == CcResult(0, 1)
        await says_that_it_has_ended(cache, "in probed", caplog)


async def test_a_cache_whose_transfer_failed_beyond_telling_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async with foreign() as pool, loaded(pool, Kv(), gate=Faulty()) as cache:
        pool.misdeeds["get_many"] = fails_with(PoolUnreachable("gone"))
        with pytest.raises(EmsIoError, match="gone"):
            await cache.load([1], **by_slots([5]))
        await says_that_it_has_ended(cache, "in failed", caplog)


@pytest.mark.parametrize("timeout", [None, 5, 0])
async def test_a_call_that_fails_closes_the_gate_unless_it_had_no_time(timeout: float | None) -> None:
    gate = HealthGate(HealthRules(probe_every=5000))
    async with foreign() as pool, loaded(pool, Kv(), gate=gate) as cache:
        work: dict[str, Callable[[], Awaitable[object]]] = {
            "get_many": lambda: cache.load([1], **by_slots([8]), timeout=timeout),
            "exists_many": lambda: cache.exists([1], timeout=timeout),
            "remove_many": lambda: cache.remove([1], timeout=timeout),
        }
        for call, made in work.items():
            gate.is_open = True
            pool.misdeeds[call] = fails_with(PoolTimeout("too late"))
            with suppress(EmsTimeout):
                await made()
            assert pool.asked[call]
            assert gate.is_open == (timeout == 0), call


async def test_a_call_of_a_closed_cache_does_not_close_the_next_ones_gate() -> None:
    gate, asked, answer = HealthGate(HealthRules(probe_every=5000)), anyio.Event(), anyio.Event()

    async def late() -> None:
        asked.set()
        await answer.wait()
        raise PoolUnreachable("gone")

    async with foreign() as pool, anyio.create_task_group() as group:
        async with loaded(pool, Kv(), gate=gate) as cache:
            pool.misdeeds["exists_many"] = late
            group.start_soon(cache.exists, [1])
            await asked.wait()
        pool.misdeeds.clear()
        async with opened(pool, Kv(), gate=gate):
            answer.set()
            await anyio.wait_all_tasks_blocked()
            assert gate.is_open


async def test_a_wrong_argument_does_not_close_the_gate() -> None:
    gate = HealthGate()
    async with foreign() as pool, loaded(pool, Kv(), gate=gate) as cache:
        with pytest.raises(ValueError, match="offsets"):
            await cache.load([1], slots=[0], offsets=[2])
        with pytest.raises(EmsInvalidArgument, match="memory of this process"):
            await cache.save_values(["a"], [[KvBufferWrapper(4096, 10)]])
        assert gate.is_open


def test_the_gates_arithmetic() -> None:
    gate = HealthGate(HealthRules(successes=3, changes=3, window=60))
    story: list[tuple[float, bool, bool]] = [  # when, whether it was good, whether it is open afterwards
        (0, True, True),
        (2, False, False),
        (3, True, False),
        (4, True, False),
        (5, False, False),  # not three in a row
        (6, True, False),
        (7, True, False),
        (8, True, True),
        (9, False, False),  # the third change within a minute: it is flapping
        *((float(now), True, False) for now in range(10, 62)),
        (62.5, True, True),  # the first change is more than a minute ago
    ]
    for now, good, is_open in story:
        gate.probed(good, now)
        assert gate.is_open == is_open, now


async def test_a_pool_that_is_not_there_cannot_be_opened() -> None:
    class Gone(MemoryPool):
        @classmethod
        async def open(cls, nbytes: int | str, *, device_id: int = 0) -> Gone:
            raise PoolUnreachable("connection refused")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aiodatadist._context_caching.pools.open.MemoryPool", Gone)
        with pytest.raises(EmsIoError, match="connection refused"):
            await ContextCache.open(rank(), "memory:")
