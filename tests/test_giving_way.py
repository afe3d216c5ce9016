"""Small transfers end inside the call: awaiting them lets the event loop go round all the same, once in a millisecond."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from time import monotonic

import numpy as np
import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, CacheTask, DataType, LLMException
from aiodatadist._context_caching.results import CcStatus
from aiodatadist._device import Program
from aiodatadist._testing.views import pipeline_of
from aiodatadist.context_caching import CcConfig_v1, ContextCache, HealthGate
from aiodatadist.testing import inside, linked_pair, open_cluster
from tests import children
from tests.held import let_pass

DESC = CacheDesc(2, [16, 64], DataType.DT_UINT8)
KEY = BlocksCacheKey(1)
POOL = '{"memory_size": 67108864, "page_shift": 12}'
MANY = 200_000
"""Calls after which a loop that nothing ends gives up: it is told to take some hundreds."""

Once = Callable[[], Awaitable[object]]


async def pulls(stack: AsyncExitStack) -> Once:
    _, decoder, _, cache = await stack.enter_async_context(linked_pair(DESC))
    manager = decoder.datadist.cache_manager
    await manager.pull_blocks(KEY, cache, [3], [5])
    return lambda: manager.pull_blocks(KEY, cache, [3], [5])


async def pushes(stack: AsyncExitStack) -> Once:
    _, decoder, _, cache = await stack.enter_async_context(linked_pair(DESC))
    manager = decoder.datadist.cache_manager
    await manager.push_blocks(KEY, cache, [3], [5])
    return lambda: manager.push_blocks(KEY, cache, [3], [5])


async def pulls_that_fail(stack: AsyncExitStack) -> Once:
    """Fail pulls with a block number beyond the 16 of the peer's cache, which this end knows by then."""
    _, decoder, _, cache = await stack.enter_async_context(linked_pair(DESC))
    manager = decoder.datadist.cache_manager
    await manager.pull_blocks(KEY, cache, [3], [5])

    async def once() -> None:
        with pytest.raises(LLMException):
            await manager.pull_blocks(KEY, cache, [16], [5])

    return once


async def copies(stack: AsyncExitStack) -> Once:
    cluster = await stack.enter_async_context(open_cluster(7))
    cache = await cluster.blocks(DESC)
    return lambda: cluster.datadist.cache_manager.copy_blocks(cache, {1: [2]})


async def programs(stack: AsyncExitStack) -> Once:
    cluster = await stack.enter_async_context(open_cluster(7))
    stream = cluster.datadist.device.open_stream("tight")
    stack.push_async_callback(stream.aclose)
    return lambda: stream.submit(Program(), 1.0).wait()


async def notes(stack: AsyncExitStack) -> Once:
    prompt, decoder, _, _ = await stack.enter_async_context(linked_pair(DESC))

    async def take() -> None:
        async for _ in prompt.datadist.notifications():
            pass

    taker = asyncio.create_task(take())
    stack.callback(taker.cancel)
    return lambda: decoder.datadist.notify(1, b"x")


async def allocations(stack: AsyncExitStack) -> Once:
    """Allocate caches with keys, so that dropping the id waits for nothing. The pool is emptied before it is full."""
    cluster = await stack.enter_async_context(open_cluster(7, mem_pool_cfg=POOL))
    manager, number = cluster.datadist.cache_manager, iter(range(10**9))

    async def once() -> None:
        key = CacheKey(7, next(number))
        cache = await manager.allocate_cache(CacheDesc(1, [1, 64], DataType.DT_UINT8), [key])
        await manager.deallocate_cache(cache)
        if key.req_id > 10_000:
            await manager.remove_cache_key(CacheKey(7, key.req_id - 10_000))

    return once


async def removals_of_what_is_not_there(stack: AsyncExitStack) -> Once:
    cluster = await stack.enter_async_context(open_cluster(7, mem_pool_cfg=POOL))
    return lambda: cluster.datadist.cache_manager.remove_cache_key(CacheKey(7, 1))


async def _context_cache(stack: AsyncExitStack, gate: HealthGate | None = None) -> ContextCache:
    opening = ContextCache.open(CcConfig_v1(rank_id=0, device_id=0, model_id="model"), "memory:", gate=gate)
    cache = await stack.enter_async_context(await opening)
    await cache.register_kvcache([[np.zeros((8, 4, 16), np.float16)]])
    return cache


async def questions(stack: AsyncExitStack) -> Once:
    cache = await _context_cache(stack)
    await cache.save([1], chunks=[[(0, 4)]])
    return lambda: cache.exists([1, 2, 3])


def shut(gate: HealthGate, cache: ContextCache) -> None:
    while gate.is_open:
        cache._guard.failed(pipeline_of(cache))


async def questions_at_a_shut_gate(stack: AsyncExitStack) -> Once:
    gate = HealthGate()
    cache = await _context_cache(stack, gate)
    shut(gate, cache)
    assert (await cache.exists([1])).details == (CcStatus.SKIPPED,)
    return lambda: cache.exists([1])


async def loads_at_a_shut_gate(stack: AsyncExitStack) -> Once:
    gate = HealthGate()
    cache = await _context_cache(stack, gate)
    shut(gate, cache)

    async def once() -> None:
        await cache.start_load([1], chunks=[[(0, 4)]])

    return once


async def loads(stack: AsyncExitStack) -> Once:
    cache = await _context_cache(stack)
    await cache.save([1], chunks=[[(0, 4)]])
    return lambda: cache.load([1], chunks=[[(0, 4)]])


async def health_checks(stack: AsyncExitStack) -> Once:
    return (await _context_cache(stack)).check_health


KINDS = [
    pulls, pushes, pulls_that_fail, copies, programs, notes, allocations,
    removals_of_what_is_not_there, questions, questions_at_a_shut_gate, loads_at_a_shut_gate, loads, health_checks,
]  # fmt: skip


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
async def once(request: pytest.FixtureRequest) -> AsyncIterator[Once]:
    async with AsyncExitStack() as stack:
        yield await request.param(stack)


async def repeat(once: Once, count: list[int]) -> None:
    for _ in range(MANY):
        await once()
        count[0] += 1


async def test_a_timeout_ends_a_tight_loop(once: Once) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await repeat(once, [0])


async def test_a_cancellation_ends_a_tight_loop_and_what_it_used_can_be_used_again(once: Once) -> None:
    count = [0]
    task = asyncio.create_task(repeat(once, count))

    def cancel() -> None:
        """Cancel in the middle of the loop, once the first one is done, which may take longer on a busy machine."""
        if count[0]:
            task.cancel()
        else:
            asyncio.get_running_loop().call_later(0.02, cancel)

    asyncio.get_running_loop().call_later(0.02, cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    await once()


async def test_a_ticker_ticks_beside_a_tight_loop() -> None:
    async with AsyncExitStack() as stack:
        once = await pulls(stack)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticker = asyncio.create_task(tick())
        await asyncio.sleep(0)
        while ticks < 10:  # for ever, if the tight loop never lets the event loop go round
            await once()
        ticker.cancel()


async def test_two_tight_loops_make_headway_together() -> None:
    async with AsyncExitStack() as stack:
        once = await pulls(stack)
        counts = [[0], [0]]
        tasks = [asyncio.create_task(repeat(once, count)) for count in counts]
        while not all(count[0] > 1 for count in counts):
            assert not any(task.done() for task in tasks), counts
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_single_await_suspends_nothing() -> None:
    async with AsyncExitStack() as stack:
        once = await pulls(stack)
        rounds = 0

        def went_round() -> None:
            nonlocal rounds
            rounds += 1

        suspended = 0
        for _ in range(40):
            await let_pass(0.001)  # what gives way after a millisecond does not here
            before = rounds
            asyncio.get_running_loop().call_soon(went_round)
            await once()
            suspended += rounds > before
        assert suspended < 20, "one of 40 may take more than a millisecond on a loaded machine, half of them not"


async def test_cancelled_while_it_gives_way_a_transfer_keeps_its_result_and_holds_nothing() -> None:
    async with linked_pair(DESC) as (prompt, decoder, source, cache):
        manager = decoder.datadist.cache_manager
        await manager.pull_blocks(KEY, cache, [3], [5])
        pulled: list[CacheTask] = []

        async def pull_late() -> None:
            await asyncio.sleep(0)
            manager.pull_blocks(KEY, cache, [3], [5])
            end = monotonic() + 0.002
            while monotonic() < end:
                pass
            pulled.append(manager.pull_blocks(KEY, cache, [4], [6]))
            assert pulled[0].done()
            task.cancel()  # what a timeout or Ctrl-C does meanwhile
            await pulled[0]

        task = asyncio.create_task(pull_late())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not pulled[0].cancelled()
        assert pulled[0].result().bytes == DESC.num_tensors * DESC.stride
        assert (await pulled[0]).bytes == DESC.num_tensors * DESC.stride
        first, second = prompt.memory(source).view(), decoder.memory(cache).view()
        assert bytes(second[6 * 64 : 7 * 64]) == bytes(first[4 * 64 : 5 * 64])
        entry = inside(decoder.datadist).registry.table.find(cache.cache_id)
        assert entry is not None
        assert entry.leases == 0
        by_id = CacheKeyByIdAndIndex(1, source.cache_id)
        await manager.pull_blocks(by_id, cache, [3], [5])


INTERRUPTED = """
import asyncio, os, signal, sys, threading
from aiodatadist import BlocksCacheKey, CacheDesc, DataType
from aiodatadist.testing import linked_pair

async def main():
    async with linked_pair(CacheDesc(2, [16, 64], DataType.DT_UINT8)) as (_, decoder, _, cache):
        pull = decoder.datadist.cache_manager.pull_blocks
        await pull(BlocksCacheKey(1), cache, [3], [5])
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            for _ in range(100_000):
                await pull(BlocksCacheKey(1), cache, [3], [5])
        except asyncio.CancelledError:
            print("interrupted", flush=True)
            raise
        print("not interrupted", flush=True)

if sys.argv[1] == "uvloop":
    import uvloop
    factory = uvloop.new_event_loop
else:
    factory = asyncio.new_event_loop
with asyncio.Runner(loop_factory=factory) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_first_ctrl_c_ends_a_tight_loop(loop: str) -> None:
    done = children.run(
        [sys.executable, "-c", INTERRUPTED, loop], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.stdout == "interrupted\n", done.stderr
    assert done.returncode == -signal.SIGINT, done.stderr
