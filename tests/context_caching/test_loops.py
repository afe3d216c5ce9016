"""A cache belongs to one event loop and one process: what comes from elsewhere is told so at once, and nothing hangs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from aiodatadist._testing.views import resident_task
from aiodatadist.context_caching import (
    CcResult,
    ContextCache,
    EmsInternalError,
    EmsInvalidArgument,
    MemoryPool,
    Transfer,
)
from tests import children
from tests.context_caching.fakes import Foreign
from tests.context_caching.kit import ROOM, Kv, by_slots, rank

pytestmark = pytest.mark.usefixtures("no_leaks")

BUFFERS = [[bytearray(8)]]
CALLS: dict[str, Callable[[ContextCache], Awaitable[object]]] = {
    "register_kvcache": lambda cache: cache.register_kvcache(Kv().layers),
    "save": lambda cache: cache.save([1], **by_slots([0])),
    "load": lambda cache: cache.load([1], **by_slots([0])),
    "save_values": lambda cache: cache.save_values(["a"], BUFFERS),
    "load_values": lambda cache: cache.load_values(["a"], BUFFERS),
    "exists": lambda cache: cache.exists([1]),
    "match_prefix": lambda cache: cache.match_prefix([1]),
    "remove": lambda cache: cache.remove([1]),
    "remove_values": lambda cache: cache.remove_values(["a"]),
    "check_health": lambda cache: cache.check_health(),
}
CLOSING: dict[str, Callable[[ContextCache], Awaitable[object]]] = {
    "aclose": lambda cache: cache.aclose(),
    "aexit": lambda cache: cache.__aexit__(None, None, None),
}
STARTS: dict[str, Callable[[ContextCache], object]] = {
    "start_save": lambda cache: cache.start_save([1], **by_slots([0])),
    "start_load": lambda cache: cache.start_load([1], **by_slots([0])),
    "start_save_values": lambda cache: cache.start_save_values(["a"], BUFFERS),
    "start_load_values": lambda cache: cache.start_load_values(["a"], BUFFERS),
    "unregister_kvcache": lambda cache: cache.unregister_kvcache(),
}


def of(calls: dict[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("call", calls.values(), ids=list(calls))


async def opened() -> ContextCache:
    cache = await ContextCache.open(rank())
    await cache.register_kvcache(Kv().layers)
    return cache


@pytest.fixture
def loops() -> Iterator[tuple[asyncio.Runner, asyncio.Runner]]:
    with asyncio.Runner() as its, asyncio.Runner() as other:
        yield its, other


def go(loop: asyncio.Runner, call: Callable[[], Awaitable[object]]) -> None:
    """Run it there up to where it first waits, which it should not come to."""

    async def run() -> None:
        steps = call().__await__()
        try:
            next(steps)
        finally:
            steps.close()

    loop.run(run())


@of({**CALLS, **CLOSING})
def test_every_call_from_another_loop_is_refused_at_once(
    call: Callable[[ContextCache], Awaitable[object]], loops: tuple[asyncio.Runner, asyncio.Runner]
) -> None:
    its, other = loops
    cache = its.run(opened())
    with pytest.raises(EmsInvalidArgument, match="this cache belongs to another event loop"):
        go(other, lambda: call(cache))
    assert its.run(cache.check_health())
    its.run(cache.aclose())
    other.run(cache.aclose())  # there is nothing left to do


@of(STARTS)
def test_a_call_without_an_event_loop_is_told_the_rule(
    call: Callable[[ContextCache], object], loops: tuple[asyncio.Runner, asyncio.Runner]
) -> None:
    its, _ = loops
    cache = its.run(opened())
    with pytest.raises(EmsInvalidArgument, match="call this on the event loop that opened the cache"):
        call(cache)
    its.run(cache.aclose())


@of(CLOSING)
def test_a_cache_has_ended_with_its_loop(call: Callable[[ContextCache], Awaitable[object]]) -> None:
    cache = asyncio.run(opened())

    async def afterwards() -> None:
        with pytest.raises(EmsInvalidArgument, match="this cache has ended with its event loop"):
            await cache.exists([1])
        assert not await cache.check_health()
        await call(cache)
        with pytest.raises(EmsInvalidArgument, match="this cache is closed"):
            await cache.exists([1])
        await call(cache)

    asyncio.run(afterwards())


KILLED = """
import asyncio, os
from aiodatadist.context_caching import CcConfig_v1, ContextCache, EmsInternalError
loop = asyncio.new_event_loop()
cache = loop.run_until_complete(ContextCache.open(CcConfig_v1(0, 0, "m")))
loop.close()
assert not asyncio.run(cache.check_health())
try:
    asyncio.run(cache.aclose())
except EmsInternalError as error:
    print(error.message(), flush=True)
os._exit(0)
"""

FORK = """
import asyncio, os
from aiodatadist.context_caching import CcConfig_v1, ContextCache

async def main():
    async with await ContextCache.open(CcConfig_v1(0, 0, "m")) as cache:
        child = os.fork()
        if not child:
            try:
                cache.aclose().send(None)
            except StopIteration:
                os._exit(0)
            os._exit(1)
        print(os.waitpid(child, 0)[1], await cache.check_health())

asyncio.run(main())
"""


def said_by(code: str) -> str:
    done = children.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_cache_whose_loop_did_not_end_it_says_that_nothing_was_given_back() -> None:
    words = "the event loop of this cache was closed before the cache: nothing was released"
    assert said_by(KILLED) == words


def test_a_forked_child_leaves_the_cache_to_its_parent() -> None:
    assert said_by(FORK) == "0 True"


async def test_a_cache_whose_task_was_cancelled_says_so() -> None:
    cache = await opened()
    assert resident_task(cache) is not None
    resident_task(cache).cancel()
    await asyncio.wait([resident_task(cache)])
    with pytest.raises(EmsInternalError, match="this cache has ended: its task was cancelled"):
        await cache.exists([1])
    await cache.aclose()


def test_a_transfer_is_awaited_and_cancelled_on_its_loop(loops: tuple[asyncio.Runner, asyncio.Runner]) -> None:
    its, other = loops
    released = asyncio.Event()

    async def start() -> tuple[ContextCache, Foreign, Transfer]:
        pool = Foreign(await MemoryPool.open(ROOM))
        pool.misdeeds["exists_many"] = released.wait
        cache = await ContextCache.open(rank(), pool)
        await cache.register_kvcache(Kv().layers)
        return cache, pool, cache.start_save([1], **by_slots([0]))

    async def wait() -> CcResult:
        return await transfer

    async def cancel() -> None:
        transfer.cancel()

    async def release() -> CcResult:
        released.set()
        return await transfer

    cache, pool, transfer = its.run(start())
    with pytest.raises(EmsInvalidArgument, match="there is no event loop here: use save of 1 keys"):
        transfer.cancel()
    for call in (wait, transfer.quiesced, cancel):
        with pytest.raises(EmsInvalidArgument, match="this is another event loop: use save of 1 keys"):
            go(other, call)
    assert its.run(release()).success == 1
    with pytest.raises(EmsInvalidArgument, match="this is another event loop: use save of 1 keys"):  # ended or not
        go(other, wait)
    assert transfer.result().success == 1
    its.run(cache.aclose())
    its.run(pool.aclose())


LEFT = """
import asyncio
from aiodatadist.context_caching import CcConfig_v1, ContextCache, EmsInternalError, HealthGate

gate, config = HealthGate(), CcConfig_v1(0, 0, "m")
loop = asyncio.new_event_loop()
cache = loop.run_until_complete(ContextCache.open(config, gate=gate))
loop.close()

async def main():
    try:
        await cache.aclose()
    except EmsInternalError:
        async with await ContextCache.open(config, gate=gate) as other:
            print(await cache.check_health(), await other.check_health())

asyncio.run(main())
"""


def test_the_gate_of_a_cache_whose_loop_was_closed_is_free_and_the_cache_is_not_healthy() -> None:
    assert said_by(LEFT) == "False True"
