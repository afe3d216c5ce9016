"""The clock of tests jumps to the next timer when nothing works, and stands still while anything does."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable

import anyio
import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, TransferTimeout
from aiodatadist.testing import linked_pair, soft_faults_cleared, soft_hold
from tests.clock import AutojumpLoop, jumped, took

pytestmark = pytest.mark.autojump
DAY = 86_400.0
DESC = CacheDesc(2, [4, 1 << 20], DataType.DT_UINT8)


async def test_a_day_takes_no_time() -> None:
    assert isinstance(asyncio.get_running_loop(), AutojumpLoop)
    with took(DAY):
        await anyio.sleep(DAY)


async def test_timers_strike_in_their_order_and_on_time() -> None:
    struck: list[float] = []

    async def strike(seconds: float) -> None:
        await anyio.sleep(seconds)
        struck.append(seconds)

    with took(3.0):
        async with anyio.create_task_group() as tasks:
            for seconds in (3.0, 1.0, 2.0):
                tasks.start_soon(strike, seconds)
    assert struck == [1.0, 2.0, 3.0]


def in_c() -> None:
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 400_000)  # which gives the interpreter's lock up


def in_python() -> None:
    for _ in range(3_000_000):
        pass


@pytest.mark.parametrize("work", [in_c, in_python])
async def test_it_stands_still_while_a_thread_works(work: Callable[[], None]) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        work()
        loop.call_soon_threadsafe(done.set)

    thread = threading.Thread(target=run)
    with took(0.0):
        thread.start()
        with anyio.fail_after(0.000_001):
            await done.wait()
    thread.join()


async def test_it_stands_still_while_a_device_copies() -> None:
    async with linked_pair(DESC) as (_, decoder, _, target):
        with took(0.0):
            for _ in range(20):
                await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), target, [0, 1], [2, 3])


async def test_a_deadline_strikes_what_stands_at_a_hold() -> None:
    async with linked_pair(DESC, sync_kv_timeout=7_200_000) as (_, decoder, _, target):
        with soft_faults_cleared(), soft_hold("HcclBatchGet") as hold, soft_hold("aclrtStreamAbort") as abort:
            before = jumped()
            pull = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), target, [0], [1], deadline=3_600)
            await hold.arrived()
            assert jumped() == before
            await abort.arrived()
            # The clock may jump once more while the stream's thread goes to abort.
            assert 3_600 <= jumped() - before < 7_200
            assert not pull.done(), "it ends when the device has let go"
            abort.release()
            hold.release()
            with pytest.raises(TransferTimeout):
                await pull
