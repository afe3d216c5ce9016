"""Transfers that are started in callbacks of the event loop, where no task is."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aiodatadist import BlockLease, BlocksCacheKey, CacheDesc, CacheTask, DataType, TransferWithCacheKeyConfig
from aiodatadist._concurrency.scope import Scope
from aiodatadist._concurrency.signal import Signal
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._counting import Call, Ended
from aiodatadist.context_caching import CcConfig_v1, ContextCache
from aiodatadist.testing import linked_pair

DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
T = TypeVar("T")


async def in_callback(call: Callable[[], T]) -> T:
    """Call it outside any task and return its result."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        assert asyncio.current_task() is None
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    loop.call_soon(run)
    return await result


@pytest.mark.parametrize("one_sided", [True, False])
async def test_pulls_start_in_callbacks(one_sided: bool) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=one_sided) as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager

        def pull() -> CacheTask:  # by a name that the peer has to be asked about
            return manager.pull_blocks(BlocksCacheKey(1), cache, [1, 2], [5, 6], notify=b"here")

        task = await in_callback(pull)
        assert (await task).bytes == 4 * 4096
        assert (await (await in_callback(pull))).bytes == 4 * 4096


class Unusual(BaseException):
    """An exception like pytest's own failures."""


@pytest.mark.parametrize("one_sided", [True, False])
async def test_whatever_a_done_callback_raises_the_transfer_ends_and_the_link_lasts(
    one_sided: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=one_sided) as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager

        def fail(_: CacheTask) -> None:
            raise Unusual

        task = manager.pull_blocks(BlocksCacheKey(1), cache, [1, 2], [5, 6])
        task.add_done_callback(fail)
        with anyio.fail_after(20):
            assert (await task).bytes == 4 * 4096
        assert (await manager.pull_blocks(BlocksCacheKey(1), cache, [3], [3])).bytes == 2 * 4096
        assert "a done callback failed" in caplog.text


async def test_whatever_the_callback_of_a_lease_raises_the_others_are_told_and_the_link_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked_pair(DESC) as (prompt, decoder, source, cache):
        told: list[str] = []

        def fail(_: BlockLease) -> None:
            raise Unusual

        lease = prompt.datadist.cache_manager.lease_blocks(source, [1], 5)
        lease.add_done_callback(fail)
        lease.add_done_callback(lambda lease: told.append(str(lease.ended)))
        await decoder.datadist.cache_manager.pull_leased(lease.ticket(), cache, [2])
        with anyio.fail_after(20):
            await lease.wait_ended()
        assert told == ["taken"]
        assert "a done callback failed" in caplog.text
        assert (await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [3])).bytes == 2 * 4096


@pytest.mark.parametrize("when", ["beginning", "end"])
async def test_whatever_an_observer_raises_the_transfer_ends(when: str, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def began(self, call: Call) -> Callable[[Ended], None]:
            if when == "beginning":
                raise Unusual
            return self.ended

        def ended(self, what: Ended) -> None:
            raise Unusual

    async with linked_pair(DESC) as (_, decoder, _, cache):
        decoder.datadist.observer = Failing()
        pull = decoder.datadist.cache_manager.pull_blocks
        for source in range(2):
            assert (await pull(BlocksCacheKey(1), cache, [source], [5])).bytes == 2 * 4096
        assert f"at the {when} of pull_blocks" in caplog.text


async def interrupted(raising: Callable[[], object]) -> None:
    """Call something in a done callback, in a program that would otherwise never end."""
    async with linked_pair(DESC) as (_, decoder, _, cache):
        task = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1, 2], [5, 6])
        task.add_done_callback(lambda _: raising())
        await anyio.sleep_forever()


async def interrupted_layer(raising: Callable[[], object]) -> None:
    """Call something in a synchronizer's coroutine, in a program that would otherwise never end."""

    class Raising:
        async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            raising()
            return True

    async with linked_pair(DESC) as (prompt, _, cache, _):
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(1), range(1))
        prompt.datadist.cache_manager.transfer_cache_async(cache, Raising(), [config], [0], [1])
        await anyio.sleep_forever()


by_signal = pytest.mark.parametrize("program", [interrupted, interrupted_layer])


@by_signal
def test_what_a_signal_handler_raises_in_code_of_the_callers_ends_the_event_loop(
    program: Callable[[Callable[[], object]], Coroutine[Any, Any, None]],
) -> None:
    """Raise from a signal handler, as ``signal.signal(SIGTERM, lambda *_: sys.exit())`` does, while that code runs."""

    def leave(*_: object) -> None:
        raise SystemExit(5)

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        with pytest.raises(SystemExit, match="5"):
            asyncio.run(program(lambda: signal.raise_signal(signal.SIGUSR1)))
    finally:
        signal.signal(signal.SIGUSR1, before)


@by_signal
def test_ctrl_c_in_code_of_the_callers_ends_the_event_loop(
    program: Callable[[Callable[[], object]], Coroutine[Any, Any, None]],
) -> None:
    """``asyncio.run`` would cancel the program's task instead, and raise nothing here."""
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(program(lambda: signal.raise_signal(signal.SIGINT)))
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    finally:
        loop.close()


async def test_pull_starts_in_the_done_callback_of_another() -> None:
    async with linked_pair(DESC) as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager
        second: asyncio.Future[CacheTask] = asyncio.get_running_loop().create_future()

        def go_on(_: CacheTask) -> None:
            second.set_result(manager.pull_blocks(BlocksCacheKey(1), cache, [3], [3]))

        manager.pull_blocks(BlocksCacheKey(1), cache, [1, 2], [5, 6]).add_done_callback(go_on)
        assert (await (await second)).bytes == 2 * 4096


async def test_pull_that_began_in_a_callback_is_cancelled_before_its_task_began() -> None:
    async with linked_pair(DESC) as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager

        def pull() -> CacheTask:
            task = manager.pull_blocks(BlocksCacheKey(1), cache, [1, 2], [5, 6])
            assert task.cancel()
            return task

        task = await in_callback(pull)
        await task.synchronize()
        assert task.cancelled()
        assert (await manager.pull_blocks(BlocksCacheKey(1), cache, [1, 2], [5, 6])).bytes == 4 * 4096


class Patient:
    """Layers that a task has to wait for."""

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None = None) -> bool:
        await anyio.lowlevel.checkpoint()
        return True


async def test_layered_transfer_starts_in_a_callback() -> None:
    async with linked_pair(DESC) as (prompt, _, source, _):
        manager = prompt.datadist.cache_manager
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(1), range(1))
        task = await in_callback(lambda: manager.transfer_cache_async(source, Patient(), [config], [1], [2]))
        assert (await task).bytes == 2 * 4096


async def test_save_and_load_start_in_callbacks() -> None:
    tensors = [[np.arange(8 * 16 * 64, dtype=np.float16).reshape(8, 16, 64) + 1 for _ in "KV"] for _ in range(2)]
    config = CcConfig_v1(rank_id=0, device_id=0, model_id="model")
    async with await ContextCache.open(config, "memory:?bytes=16MiB") as cache:
        await cache.register_kvcache(tensors)
        saved = await in_callback(lambda: cache.start_save([11, 12], chunks=[[(0, 16), (16, 16)]]))
        assert (await saved).success == 2
        loaded = await in_callback(lambda: cache.start_load([11, 12], chunks=[[(32, 16), (48, 16)]]))
        assert (await loaded).success == 2
        assert (tensors[0][0][2] == tensors[0][0][0]).all()


async def test_scope_that_was_cancelled_before_a_task_entered_it_stops_it() -> None:
    def cancelled() -> Scope:
        scope = Scope()
        scope.cancel()
        return scope

    with await in_callback(cancelled) as scope:
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert scope.cancel_called


async def test_scope_has_a_deadline_from_before_and_from_within() -> None:
    now = asyncio.get_running_loop().time()
    early, later = Scope(), Scope()
    early.deadline = now - 1
    with early:
        await anyio.sleep_forever()
    with later:
        asyncio.get_running_loop().call_soon(setattr, later, "deadline", now - 1)
        await anyio.sleep_forever()
    assert early.cancelled_caught
    assert later.cancelled_caught
    assert (early.deadline, later.deadline) == (now - 1, now - 1)


async def test_signal_is_made_set_and_awaited_anywhere() -> None:
    def is_set(event: Signal) -> Signal:
        event.set()
        assert event.is_set()
        return event

    await (await in_callback(lambda: is_set(Signal()))).wait()
    event = await in_callback(Signal)
    assert not event.is_set()
    async with anyio.create_task_group() as group:
        group.start_soon(event.wait)
        await anyio.lowlevel.checkpoint()
        await in_callback(lambda: is_set(event))


async def test_tasks_of_a_group_start_in_callbacks_but_not_when_it_has_ended() -> None:
    done = []

    async def work(word: str) -> None:
        await anyio.lowlevel.checkpoint()
        done.append(word)

    async with anyio.create_task_group() as group:
        spawner = Spawner(group)
        spawner.start_soon(work, "task")
        await in_callback(lambda: spawner.start_soon(work, "callback"))
        await anyio.lowlevel.checkpoint()
    assert sorted(done) == ["callback", "task"]
    await in_callback(lambda: spawner.start_soon(work, "late"))
    await anyio.lowlevel.checkpoint()
    assert len(done) == 2
