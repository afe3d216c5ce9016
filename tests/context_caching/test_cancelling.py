"""Cancelled at any await, a save or load has let go of everything, and no byte lands any more."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import anyio
import pytest

from aiodatadist._concurrency.byte_budget import ByteBudget
from aiodatadist._context_caching.transfer.envelope import Envelope
from aiodatadist._context_caching.transfer.pipeline import SaveLoadCall
from aiodatadist._context_caching.transfer.start_limiter import PER_ROUND, StartLimiter
from aiodatadist._testing.cancelling import CancelAt
from aiodatadist._testing.views import pipeline_of, store_of, transfers_of
from aiodatadist.context_caching import (
    CcResult,
    ContextCache,
    EmsInternalError,
    EmsTimeout,
    MemoryPool,
    Transfer,
)
from aiodatadist.errors import FeatureNotEnabled
from aiodatadist.testing import soft_fault, soft_faults_cleared
from tests.context_caching.fakes import Foreign
from tests.context_caching.kit import Kv, block_slots, by_slots, kv_in, opened

LARGE: dict[str, Any] = {"rows": [[(2048,), (2048,)]] * 2, "blocks": 64}
"""4 MiB. Of this, and of an eighth of it, more is copied than runs in the submitting call."""
HASHES = list(range(64))


@pytest.mark.parametrize("how", ["task", "handle"])
@pytest.mark.parametrize("what", ["save", "load"])
@pytest.mark.parametrize(
    "wave",
    [pytest.param(4 << 20, id="in one wave"), pytest.param(3 << 19, id="in three"),
     pytest.param(1 << 19, id="in eight", marks=pytest.mark.nightly)],
)  # fmt: skip
@pytest.mark.parametrize("is_here", [False, True], ids=["foreign", "embedded"])
async def test_a_call_cancelled_at_any_await_has_let_go_and_can_be_made_again(
    is_here: bool, wave: int, what: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodatadist._context_caching.transfer.pipeline.FOREIGN_WAVE", wave)
    monkeypatch.setattr("aiodatadist._context_caching.transfer.pipeline.WAVE", wave)
    kv = Kv(**LARGE)
    async with await MemoryPool.open(32 << 20) as inner:
        pool = Foreign(inner)
        for call in ("exists_many", "stage", "put_many", "get_many"):
            pool.misdeeds[call] = anyio.lowlevel.checkpoint
        async with opened(inner if is_here else pool, kv, read_cache_bytes=1 << 19) as cache:
            if what == "load":
                await cache.save(HASHES, **by_slots(HASHES), write_rcache=False)
            k = 1
            while await cancelled_at(k, cache, what, how):
                assert cache.statistics.bytes_in_flight == 0
                assert not transfers_of(cache)
                assert not store_of(inner).is_lent
                before = kv.image()
                again = cache.load if what == "load" else cache.save
                assert (await again([3], **by_slots([3]))).success == 1
                assert kv.image() == before or what == "load"
                assert kv.rows(block_slots(range(4, 64))) == [row[4 * len(row) // 64 :] for row in before]
                if what == "save":
                    await cache.remove(HASHES)
                k += 1
            # a load of memory in this process may end in the call that starts it, and then no await is left
            assert k > (3 if not is_here else int(what == "save"))


async def cancelled_at(k: int, cache: ContextCache, what: str, how: str) -> bool:
    """Cancel a save or load when its work waits for the k-th time; False when it ended before."""
    work, lens = getattr(pipeline_of(cache), what), None

    async def watched(call: SaveLoadCall, *note: Any) -> None:
        nonlocal lens
        await anyio.lowlevel.checkpoint()  # the task that waits for it has begun to
        lens = CancelAt(k, work(call, *note), transfer.cancel if how == "handle" else waiting.cancel)
        await lens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_of(cache), what, watched)
        transfer = getattr(cache, f"start_{what}")(HASHES, **by_slots(HASHES))
        waiting = asyncio.create_task(_wait(transfer))
        await asyncio.wait([waiting])
        assert transfer.done()
        await transfer.quiesced()
    assert lens is not None
    was_cancelled: bool = lens.suspensions >= k
    assert waiting.cancelled() or (how == "handle" and not transfer.cancelled()) or not was_cancelled
    assert transfer.cancelled() or transfer.result() == CcResult(64, 64)  # done in the very tick, perhaps
    return was_cancelled


async def _wait(transfer: Transfer) -> None:
    await transfer


async def test_a_device_that_hangs_costs_the_deadline_and_lands_nothing_later() -> None:
    async with kv_in("device") as kv, opened("memory:", kv) as cache:
        await cache.save([1], **by_slots([0]))
        before = kv.image()
        with soft_faults_cleared():
            soft_fault("aclrtMemcpyAsync:hang")
            with pytest.raises(EmsTimeout):
                await cache.load([1], **by_slots([5]), timeout=0.1)
        assert kv.image() == before
        assert (await cache.load([1], **by_slots([5]))).success == 1


async def test_a_device_that_fails_is_an_internal_error() -> None:
    async with kv_in("device") as kv, opened("memory:", kv) as cache:
        with soft_faults_cleared():
            soft_fault("aclrtMemcpyAsync:exec=507053")
            with pytest.raises(EmsInternalError) as caught:
                await cache.save([1], **by_slots([0]))
        assert caught.value.partial == CcResult(0, 1)
        assert (await cache.exists([1])).success == 0
        assert (await cache.save([1], **by_slots([0]))).success == 1


STUCK = """
import asyncio
import logging
import numpy as np
from aiodatadist.context_caching import CcConfig_v1, ContextCache, EmsException, EmsInternalError, MemoryPool
from aiodatadist._device import Device
from aiodatadist.testing import soft_fault, soft_faults_cleared

logging.basicConfig()

async def main():
    device = await Device.open(0)
    memory = device.allocate(1 << 16)
    tensor = np.frombuffer(memory.view(), np.uint8).reshape(16, 4, 1024)
    pool = await MemoryPool.open(1 << 20)
    cache = await ContextCache.open(CcConfig_v1(0, 0, "m"), pool)
    await cache.register_kvcache([[tensor]])
    await cache.save([1], slots=[0], offsets=[1])
    with soft_faults_cleared():
        soft_fault("aclrtMemcpyAsync:hang;aclrtStreamAbort:fail=507000@*")
        transfer = cache.start_load([1], slots=[5], offsets=[1], timeout=0.05)
        try:
            await transfer
        except EmsException as error:
            print(error.status_code().name)
        try:
            await transfer.quiesced()
        except EmsInternalError as error:
            print(error.message())
        for call in (lambda: cache.start_save([2], slots=[5], offsets=[1]), cache.unregister_kvcache):
            try:
                call()
            except EmsException as error:
                print(error.message())
        assert (await cache.save([3], slots=[6], offsets=[1])).success == 1
        try:
            await cache.aclose()
        except EmsInternalError as error:
            print("closing:", error.status_code().name)
    await pool.aclose()

asyncio.run(main())
"""


def test_memory_that_a_device_never_lets_go_of_is_never_used_again() -> None:
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", STUCK]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "EMS_INTERNAL_ERROR",
        "load of 1 keys: the device did not release the memory",
        "slots[0] is 5, which another save or load uses: wait until that has ended",
        "1 saves and loads use the registered cache: wait until they have ended",
        "closing: EMS_INTERNAL_ERROR",
    ]
    assert "closed while 1 values or stages are lent; its memory is not freed" in done.stderr


async def test_a_budget_is_given_in_order_and_those_who_give_up_do_not_count() -> None:
    budget, order = ByteBudget(10), []
    await budget.take(8, 0)
    with pytest.raises(TimeoutError):
        await budget.take(3, 0)
    await budget.take(2, 0)

    async def want(name: str, nbytes: int) -> None:
        await budget.take(nbytes, float("inf"))
        order.append(name)

    tasks = [asyncio.create_task(want(name, nbytes)) for name, nbytes in (("a", 6), ("b", 9), ("c", 1), ("d", 2))]
    await anyio.lowlevel.checkpoint()
    budget.give(8)
    await tasks[0]
    assert order == ["a"]
    tasks[1].cancel()  # it stood in the way of the two behind it
    await asyncio.wait(tasks[1:3])
    assert order == ["a", "c"]
    assert (budget.taken, budget.most) == (9, 10)
    budget.give(1)
    await tasks[3]


async def test_turns_let_the_loop_breathe() -> None:
    turns, begun, rounds = StartLimiter(), 0, []

    async def begin() -> None:
        nonlocal begun
        await turns.wait()
        begun += 1

    async with anyio.create_task_group() as group:
        for _ in range(10 * PER_ROUND):
            group.start_soon(begin)
        last = 0
        while begun < 10 * PER_ROUND:
            await asyncio.sleep(0)
            rounds.append(begun - last)
            last = begun
    assert max(rounds) <= 2 * PER_ROUND


async def test_an_envelope_without_xxhash_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xxhash", None)
    with pytest.raises(FeatureNotEnabled, match="xxhash"):
        Envelope()
    async with await MemoryPool.open(1024) as inner:
        with pytest.raises(EmsInternalError, match="xxhash"):
            async with opened(Foreign(inner)):
                pass


async def test_a_done_callback_that_fails_concerns_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError("of the callback's own")

    async with opened("memory:", Kv()) as cache:
        transfer = cache.start_save([1], **by_slots([0]))
        told: list[bool] = []
        transfer.add_done_callback(fail)
        transfer.add_done_callback(lambda done: told.append(done.done()))
        assert (await transfer).success == 1
        transfer.add_done_callback(fail)
        assert told == [True]
        assert [record.getMessage() for record in caplog.records] == ["save of 1 keys: a done callback failed"] * 2
        assert (await cache.load([1], **by_slots([1]))).success == 1
