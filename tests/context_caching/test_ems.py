"""EMS's own interface: its life, from threads, from event loops, and what outlives nothing."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from aiodatadist._context_caching.ems.common import exception
from aiodatadist._context_caching.pools.contract import KVPool, PoolRefused, PoolUnreachable
from aiodatadist.context_caching import ContextCache, MemoryPool
from aiodatadist.context_caching.ems import (
    CcCacheConfig,
    CcConfig,
    CcFuture,
    CcKvOption,
    CcResult,
    ContextCache_v1,
    ContextCaching,
    Ems,
    EmsConfig,
    EmsErrorCode,
    EmsException,
    KvBufferWrapper,
    PrimaryKey,
)
from tests import children
from tests.context_caching.fakes import Foreign, never
from tests.context_caching.kit import BLOCK, Kv, block_slots, rank
from tests.stopwatch import lasting

V0 = EmsConfig(cc_config=CcConfig(0, 0, "model"), access_id="tenant", access_key="k" * 32)
V1 = EmsConfig(cc_config_v1=rank(), cc_cache=CcCacheConfig(read_cache_bytes=1 << 20))


@pytest.fixture(autouse=True)
def ended(no_leaks: None) -> Iterator[None]:
    yield
    Ems.shutdown()
    assert "aiodatadist Ems" not in {thread.name for thread in threading.enumerate()}


def v1() -> ContextCache_v1:
    Ems.init(V1)
    cc = Ems.get_cc()
    assert isinstance(cc, ContextCache_v1)
    return cc


def v0() -> ContextCaching:
    Ems.init(V0)
    cc = Ems.get_cc()
    assert isinstance(cc, ContextCaching)
    return cc


def code_of(call: Any, *args: Any) -> EmsErrorCode:
    with pytest.raises(EmsException) as caught:
        call(*args)
    assert caught.value.message()
    return caught.value.status_code()


def test_its_life() -> None:
    assert Ems.get_cc() is None
    assert not Ems.check_health()
    Ems.shutdown()
    assert code_of(Ems.init, None) is EmsErrorCode.EMS_INVALID_ARGUMENT
    cc = v1()
    Ems.init(EmsConfig(cc_config_v1=rank(), cc_cache=CcCacheConfig(read_cache_bytes=1 << 20)))
    assert Ems.get_cc() is cc
    assert Ems.check_health()
    assert code_of(Ems.init, V0) is EmsErrorCode.EMS_INVALID_ARGUMENT
    Ems.shutdown()
    assert Ems.get_cc() is None
    assert code_of(cc.exists, [1]) is EmsErrorCode.EMS_INVALID_ARGUMENT
    Ems.init(EmsConfig())
    assert Ems.get_cc() is None


def test_blocks_make_the_round_trip() -> None:
    cc, kv = v1(), Kv()
    cc.register_kvcache(kv.layers)
    saved = kv.rows(block_slots([0, 1]))
    assert cc.save(block_slots([0, 1]), [7, -7], [BLOCK, BLOCK]) == CcResult(2, 2)
    kv.wipe()
    future = cc.async_load(block_slots([4, 5]), [7, -7], [BLOCK, BLOCK], CcKvOption(read_local_only=True))
    assert cc.get_result(future) == future.result() == CcResult(2, 2)
    assert cc.is_ready(future)
    assert kv.rows(block_slots([4, 5])) == saved
    assert cc.exists([7, -7, 8]) == CcResult(2, 3)
    assert cc.exists([7], CcKvOption(timeout=0), lease=0.005, all_ranks=True).success == 1
    assert cc.remove([7]) == 1
    assert cc.load(hashes=[7], chunk_descs=[[(0, BLOCK)]]).success == 0
    cc.unregister_kvcache()


def test_values_make_the_round_trip() -> None:
    cc = v0()
    data = [bytearray(b"key" * 99), bytearray(b"value" * 99)]
    keys: list[PrimaryKey | str] = [PrimaryKey("block", "rank 0"), "old"]
    buffers = [[KvBufferWrapper.from_buffer(part)] for part in data]
    assert cc.save(CcKvOption(), keys, buffers).success == 2
    copies = [bytearray(len(part)) for part in data]
    wanted = [[KvBufferWrapper.from_buffer(part)] for part in copies]
    assert cc.async_load(CcKvOption(), keys, wanted).result().success == 2
    assert copies == data
    assert cc.remove(keys) == 2


def test_many_threads_at_a_time() -> None:
    cc, kv = v1(), Kv(blocks=64)
    cc.register_kvcache(kv.layers)
    saved = kv.image()

    def round_trip(i: int) -> int:
        slots = block_slots([2 * i, 2 * i + 1])
        hashes = [2 * i, 2 * i + 1]
        return cc.save(slots, hashes, [BLOCK] * 2).success

    def load(i: int) -> int:
        return cc.load(block_slots([i]), [i], [BLOCK]).success

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(round_trip, range(32))) == [2] * 32
        kv.wipe()
        assert list(threads.map(load, range(64))) == [1] * 64
    assert kv.image() == saved


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pools open whose reads never end."""

    async def open_pool(url: str) -> KVPool:
        pool = Foreign(await MemoryPool.open(1 << 20))
        pool.misdeeds["get_many"] = never
        return pool

    monkeypatch.setattr("aiodatadist._context_caching.cache.open_pool", open_pool)


def test_a_timeout_is_in_milliseconds(hanging: None) -> None:
    cc, kv = v1(), Kv()
    cc.register_kvcache(kv.layers)
    with lasting(0.3, 0.1), pytest.raises(EmsException) as caught:
        cc.load([0], [1], [1], CcKvOption(timeout=100))
    assert caught.value.status_code() is EmsErrorCode.EMS_IO_TIMEOUT
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.partial == CcResult(0, 1)


class NotForCallers(threading.Condition):
    """A condition that callers must not wait for: an interrupt behind the acquisition would leave its lock taken."""

    def __enter__(self) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        return super().__enter__()


def test_an_interrupted_caller_leaves_no_lock_that_the_loop_waits_for() -> None:
    cc, kv = v1(), Kv()
    cc.register_kvcache(kv.layers)
    future = cc.async_save(block_slots([0]), [7], [BLOCK])
    future._ended._condition = NotForCallers()
    assert future.result().success == 1
    assert future.done()


def test_shutdown_ends_what_is_under_way(hanging: None) -> None:
    cc, kv = v1(), Kv()
    cc.register_kvcache(kv.layers)
    futures = [cc.async_load([i], [i], [1]) for i in range(8)]
    assert not any(map(cc.is_ready, futures))
    results: list[EmsErrorCode] = []
    waiting = threading.Thread(target=lambda: results.append(code_of(futures[0].result)))
    waiting.start()
    Ems.shutdown()
    waiting.join()
    assert results == [EmsErrorCode.EMS_INTERNAL_ERROR]
    assert all(future.done() for future in futures)
    assert code_of(cc.get_result, futures[3]) is EmsErrorCode.EMS_INTERNAL_ERROR


def test_health_is_false_while_it_shuts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    async def hang() -> None:
        asked.set()
        await never()

    async def open_pool(url: str) -> KVPool:
        pool = Foreign(await MemoryPool.open(1 << 20))
        pool.misdeeds["healthy"] = hang
        return pool

    monkeypatch.setattr("aiodatadist._context_caching.cache.open_pool", open_pool)
    v1()
    with ThreadPoolExecutor(1) as threads:
        health = threads.submit(Ems.check_health)
        asked.wait()
        Ems.shutdown()
        assert health.result() is False


def test_health_is_false_for_those_who_ask_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask a client that was found, but has ended before the question."""
    v1()
    client = Ems._client
    Ems.shutdown()
    monkeypatch.setattr(Ems, "_client", client)
    assert Ems.check_health() is False
    monkeypatch.undo()


# ---- event loops ----


async def test_a_future_can_be_awaited_on_any_loop_and_cancelled_there(hanging: None) -> None:
    def start() -> CcFuture:
        cc, kv = v1(), Kv()
        cc.register_kvcache(kv.layers)
        assert cc.save(block_slots([0]), [1], [BLOCK]).success == 1
        return cc.async_load([20], [1], [1])

    future = await asyncio.to_thread(start)
    task = asyncio.create_task(future)
    await asyncio.sleep(0)
    assert not future.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert future.done()
    with pytest.raises(EmsException, match="cancelled"):
        await future


async def test_blocking_on_a_loop_works_and_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    cc, kv = v1(), Kv()
    cc.register_kvcache(kv.layers)
    assert cc.save(block_slots([0]), [1], [BLOCK]).success == 1
    assert await cc.async_load(block_slots([3]), [1], [BLOCK]) == CcResult(1, 1)
    assert kv.rows(block_slots([0])) == kv.rows(block_slots([3]))
    assert caplog.text.count("stops an event loop") == 1


def test_blocking_on_the_private_loop_is_refused(hanging: None) -> None:
    cc, kv = v1(), Kv()
    cc.register_kvcache(kv.layers)
    future = cc.async_load([0], [1], [1])

    async def block(_: ContextCache) -> None:
        for call in (future.result, lambda: cc.exists([1]), lambda: cc.save([0], [1], [1])):
            with pytest.raises(RuntimeError, match="cannot wait for itself"):
                call()

    cc._client.run(block)


# ---- what may go wrong at the start ----


def test_a_pool_that_is_not_there_yet_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    is_there = False

    async def open_pool(url: str) -> KVPool:
        if not is_there:
            raise PoolUnreachable("connection refused")
        return await MemoryPool.open(1 << 20)

    monkeypatch.setattr("aiodatadist._context_caching.cache.open_pool", open_pool)
    for _ in range(2):
        assert code_of(Ems.init, V1) is EmsErrorCode.EMS_RECOVERD_ERROR
        assert Ems.get_cc() is None
        assert not Ems.check_health()
    is_there = True
    assert v1().exists([1]).success == 0


def test_a_pool_that_refuses_is_not_worth_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_pool(url: str) -> KVPool:
        raise PoolRefused("invalid username-password pair")

    monkeypatch.setattr("aiodatadist._context_caching.cache.open_pool", open_pool)
    assert code_of(Ems.init, V1) is EmsErrorCode.EMS_IO_ERROR
    assert Ems.get_cc() is None


def test_a_wrong_pool_is_a_wrong_argument() -> None:
    assert code_of(Ems.init, EmsConfig(cc_config_v1=rank(), pool="ftp://x")) is EmsErrorCode.EMS_INVALID_ARGUMENT
    nowhere = EmsConfig(cc_config_v1=rank(device_id=9999), cc_cache=CcCacheConfig(read_cache_bytes=1))
    assert code_of(Ems.init, nowhere) is EmsErrorCode.EMS_INTERNAL_ERROR


FORK = """
import os
from aiodatadist.context_caching.ems import CcConfig_v1, Ems, EmsConfig, EmsErrorCode, EmsForkError
Ems.init(EmsConfig(cc_config_v1=CcConfig_v1(0, 0, "m")))
cc = Ems.get_cc()
child = os.fork()
if not child:
    for call in (Ems.get_cc, Ems.check_health, lambda: cc.exists([1]), lambda: Ems.init(EmsConfig())):
        try:
            call()
        except EmsForkError as error:
            assert error.status_code() is EmsErrorCode.EMS_INTERNAL_ERROR, error
            assert f"in process {os.getppid()}: this is its child, process {os.getpid()}" in error.message(), error
        else:
            os._exit(1)
    Ems.shutdown()
    os._exit(0)
print(os.waitpid(child, 0)[1], Ems.check_health())
Ems.shutdown()
"""


def test_after_a_fork_the_child_is_told() -> None:
    done = children.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False, timeout=30)
    assert done.stdout == "0 True\n", done.stderr


def test_a_process_that_forgets_it_ends_all_the_same() -> None:
    code = FORK.partition("child = ")[0]
    done = children.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_exceptions_are_also_where_ems_has_them() -> None:
    assert exception.EmsErrorCode is EmsErrorCode
    assert exception.EmsException is EmsException


def test_nothing_is_left_behind() -> None:
    def round_trip() -> None:
        cc, kv = v1(), Kv()
        cc.register_kvcache(kv.layers)
        assert cc.save(block_slots([0]), [1], [BLOCK]).success == 1
        Ems.shutdown()

    round_trip()
    files, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for _ in range(3):
        round_trip()
    assert len(list(Path("/proc/self/fd").iterdir())) <= files
    for thread in threading.enumerate():
        if thread.name == "aiodatadist call":  # it has told what it did, and ends
            thread.join(10)
    assert threading.active_count() <= threads


@pytest.mark.parametrize("call", ["save", "load", "async_save", "async_load"])
def test_v1_arguments_of_a_v0_client_are_refused_with_the_reason(call: str) -> None:
    cc = v0()
    method = getattr(cc, call)
    slots, option = list(range(BLOCK)), CcKvOption()
    for given, words in (
        ((slots, [1], [BLOCK]), {}),
        ((slots, [1], [BLOCK], option), {}),
        ((), {"slot_mapping": slots, "hashes": [1], "offsets": [BLOCK]}),
        ((), {"option": option, "hashes": [1], "chunk_descs": [[(0, BLOCK)]]}),
        ((None, [1]), {"chunk_descs": [[(0, BLOCK)]]}),
    ):
        with pytest.raises(EmsException, match="this client is V0") as caught:
            method(*given, **words)
        assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
    with pytest.raises(TypeError, match="nothing_at_all"):
        method(option, [], [], nothing_at_all=1)
