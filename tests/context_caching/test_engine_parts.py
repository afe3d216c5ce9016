"""Parts of the pools: memory lent in turn, and threads for calls that may hang."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aiodatadist._concurrency.byte_budget import ByteBudget
from aiodatadist._context_caching.pools.arena import Arena
from aiodatadist._context_caching.pools.buffers import Buffers
from aiodatadist._context_caching.pools.contract import GetStatus, PoolKey, PoolTimeout, PoolUnreachable, PutStatus
from aiodatadist._context_caching.pools.mooncake import pool as mooncake
from aiodatadist._context_caching.pools.mooncake import store as mooncake_store
from aiodatadist._context_caching.pools.mooncake.pieces import MooncakeStage
from aiodatadist._context_caching.pools.mooncake.place import Place
from aiodatadist._context_caching.pools.mooncake.pool import MooncakePool
from aiodatadist._context_caching.pools.redis.nodes import parse_nodes
from aiodatadist._context_caching.pools.worker_threads import TooManyHang, WorkerThreads
from aiodatadist._testing.views import store_of
from aiodatadist.testing.pools import MIB, fetch, new_key, soon, store

KIB = 1024


async def test_no_call_overtakes_and_a_cancelled_wait_lets_the_next_one_have_its_turn() -> None:
    budget, order = ByteBudget(10), []
    await budget.take(8)

    async def take(name: str, nbytes: int) -> None:
        await budget.take(nbytes)
        order.append(name)

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as impatient:
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(take, "impatient", 10)
                await anyio.lowlevel.checkpoint()
                group.start_soon(take, "large", 9)
                await anyio.lowlevel.checkpoint()
                group.start_soon(take, "small", 1)  # there is room, but not its turn
                await anyio.wait_all_tasks_blocked()
                assert order == []
                impatient.cancel()
        await anyio.wait_all_tasks_blocked()
        assert order == []
        budget.give(8)
    assert order == ["large", "small"]
    assert budget.free == 0


async def test_an_arena_lends_everything_again_however_it_was_cut() -> None:
    arena = Arena(64 * KIB)
    sizes = [1, 4 * KIB, 9 * KIB, 20 * KIB]
    assert arena.fitting([*sizes, 24 * KIB, 4 * KIB]) == [True, True, True, True, False, True]
    pieces = await arena.lend(sizes)
    spans = sorted((piece.address, piece.address + piece.nbytes) for piece in pieces)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for piece in (pieces[2], pieces[0], pieces[3], pieces[1]):
        piece.release()
        piece.release()
    (whole,) = await arena.lend([60 * KIB])
    with pytest.raises(ValueError, match="another pool"):
        whole.taken(Arena(64 * KIB))
    taken = whole.taken(arena)
    whole.release()
    taken.view()[:] = b"x" * 60 * KIB
    with pytest.raises(ValueError, match="released"):
        whole.view()


async def test_buffers_are_used_again_unless_a_reader_may_be_left() -> None:
    buffers = Buffers(10 * KIB)
    first, second = await buffers.lend([4 * KIB, 4 * KIB])
    first.view()[:] = b"1" * 4 * KIB
    second.view()[:] = b"2" * 4 * KIB
    kept = second.view()
    second.is_idle = False
    first.release()
    second.release()
    again = await buffers.lend([4 * KIB, 4 * KIB])
    assert [buffer.view()[0] for buffer in again] == [ord("1"), 0]
    assert kept == b"2" * 4 * KIB
    for buffer in again:
        buffer.release()
    (whole,) = await buffers.lend([10 * KIB])  # what is kept of other sizes has gone
    assert (buffers._kept_bytes, whole.nbytes) == (0, 10 * KIB)


async def test_memory_that_the_process_does_not_have_is_not_missing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = Buffers(10 * KIB)
    made = itertools.count()
    allocate = buffers._memory

    def fail(nbytes: int) -> object:
        if next(made) == 1:
            raise MemoryError
        return allocate(nbytes)

    monkeypatch.setattr(buffers, "_memory", fail)
    with pytest.raises(MemoryError):
        await buffers.lend([4 * KIB, 3 * KIB, KIB])
    assert buffers._budget.free == 10 * KIB
    with anyio.fail_after(20):
        (whole,) = await buffers.lend([10 * KIB])
    whole.release()


async def test_sizes_that_are_not_asked_for_any_more_leave_nothing_behind() -> None:
    buffers = Buffers(10 * KIB)
    for size in range(1, 100):
        (buffer,) = await buffers.lend([size])
        buffer.is_idle = size % 2 == 0
        buffer.release()
    (whole,) = await buffers.lend([10 * KIB])
    kept = buffers._kept
    assert not kept
    whole.release()
    assert list(kept) == [10 * KIB]


class Hanging:
    """Calls that return when they are told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun = threading.Semaphore(0)
        self.over = 0
        self.all_over = anyio.Event()

    def count(self) -> None:
        self.over += 1
        if self.over == 3:
            self.all_over.set()

    def call(self) -> str:
        self.begun.release()
        self.go_on.wait()
        return "done"


async def test_a_peer_that_hangs_has_its_share_of_threads_and_no_more() -> None:
    calls, hanging, fine = WorkerThreads(4, 2), Hanging(), Hanging()
    fine.go_on.set()
    for _ in range(2):
        abandoned = asyncio.create_task(calls.run("hangs", hanging.call, hanging.count))
        await asyncio.to_thread(hanging.begun.acquire)
        abandoned.cancel()
        with pytest.raises(asyncio.CancelledError):
            await abandoned
    with pytest.raises(TooManyHang):
        await calls.run("hangs", hanging.call, hanging.count)
    assert hanging.over == 1, "the refused one only: the others are under way"
    for _ in range(5):
        assert await calls.run("works", fine.call, fine.count) == "done"
    assert fine.over == 5
    assert not await calls.aclose(0.05)
    hanging.go_on.set()
    with anyio.fail_after(20):
        await hanging.all_over.wait()
    assert (calls.running, calls.abandoned) == (0, 0)


@pytest.mark.usefixtures("no_leaks")
async def test_calls_give_what_they_give_and_their_threads_end() -> None:
    calls, threads = WorkerThreads(3, 3), threading.active_count()

    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await calls.run("peer", fail, lambda: None)
    results: list[int] = []

    async def run(number: int) -> None:
        results.append(await calls.run("peer", lambda: number, lambda: None))

    async with anyio.create_task_group() as group:
        for number in range(50):
            group.start_soon(run, number)
    assert sorted(results) == list(range(50))
    assert threading.active_count() <= threads + 3
    assert await calls.aclose(5)
    assert threading.active_count() == threads


def test_what_a_cluster_says_of_itself() -> None:
    view = parse_nodes(
        "a 10.0.0.1:6379@16379,kv-1.example myself,master - 0 0 1 connected 0-5460 [93->-b]\n"
        "b 10.0.0.2:6379@16379 master,fail - 1 0 2 disconnected 5461-10922 10930\n"
        "c 10.0.0.3:6379@16379 slave a 0 0 1 connected\n"
        "d :0@0 master,noaddr - 1 0 2 disconnected\n"
        "e :6380@16380 master - 0 0 3 connected 16383\n",
        "10.0.0.9",
    )
    assert [view.owners[slot] for slot in (0, 5460, 5461, 10930, 10929, 16383)] == [
        ("kv-1.example", 6379),
        ("kv-1.example", 6379),
        ("10.0.0.2", 6379),
        ("10.0.0.2", 6379),
        None,
        ("10.0.0.9", 6380),
    ]
    assert view.failed == {("10.0.0.2", 6379)}


async def test_a_look_that_hangs_holds_up_no_call_that_has_returned() -> None:
    calls, go_on, over = WorkerThreads(1, 1), threading.Event(), []

    async def look() -> None:
        go_on.set()
        await anyio.sleep_forever()

    with anyio.fail_after(20):
        assert await calls.run("peer", lambda: go_on.wait(5), lambda: over.append(1), look, 0.01)
    assert over == [1]
    assert await calls.aclose(5)


async def test_a_look_that_fails_ends_the_wait() -> None:
    calls, go_on = WorkerThreads(1, 1), threading.Event()

    async def look() -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        await calls.run("peer", lambda: go_on.wait(5), lambda: None, look, 0.01)
    assert calls.abandoned == 1
    go_on.set()
    assert await calls.aclose(5)


async def test_who_waits_for_a_thread_when_they_end_is_told(no_leaks: None) -> None:
    calls, go_on, over = WorkerThreads(1, 1), threading.Event(), []

    async def wait(peer: str) -> None:
        with pytest.raises(PoolUnreachable, match="closed"), anyio.fail_after(20):
            await calls.run(peer, lambda: None, lambda: over.append(peer))

    async with anyio.create_task_group() as group:
        group.start_soon(calls.run, "busy", lambda: go_on.wait(20), lambda: over.append("busy"))
        await anyio.wait_all_tasks_blocked()
        async with anyio.create_task_group() as waiting:
            for peer in ("busy", "other"):  # one for its share, one for any thread
                waiting.start_soon(wait, peer)
            await anyio.wait_all_tasks_blocked()
            assert not await calls.aclose(0.05)
        assert sorted(over) == ["busy", "other"], "although the one under way has not returned"
        await wait("later")
        go_on.set()
    await wait("late")
    assert await calls.aclose(5)
    assert sorted(over) == ["busy", "busy", "late", "later", "other"]
    assert calls.running == 0


def test_what_was_lost_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(mooncake_store, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(mooncake_store, "LOST_KEYS", 3)
    lost = mooncake_store.Lost(10)
    lost.add("abc")
    lost.add("a")
    lost.add("d")
    assert [key in lost for key in "abcd"] == [True, False, True, True], "the one that was last seen first has gone"
    lost.forget("cx")
    assert [key in lost for key in "abcd"] == [True, False, False, True]
    now += 10
    assert not any(key in lost for key in "abcd")


class Engine:
    """A stand-in for Mooncake's store. Every key is listed; reading one raises, or finds its owner gone."""

    def __init__(self) -> None:
        self.gone = False
        self.go_on = threading.Event()

    def batch_get_into(self, keys: list[str], *_: object) -> list[int]:
        if not self.gone:
            raise RuntimeError("out of order")
        self.go_on.wait(5)
        return [mooncake_store.NODE_GONE] * len(keys)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [1] * len(keys)

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, Any]:
        return {}

    def batch_remove(self, keys: list[str], is_forced: bool) -> list[int]:
        return [0] * len(keys)

    def unregister_buffer(self, address: int) -> None:
        pass


@pytest.fixture
async def broken_engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MooncakePool]:
    """Open a pool over the broken engine, with 64 MiB, that asks no master."""
    monkeypatch.setattr(mooncake_store, "give_back", lambda: None)
    monkeypatch.setattr(mooncake, "AT_ONCE", 2)
    pool = MooncakePool(Place("nowhere", 1, 2, 64 * MIB, 4, 1), None, Engine(), Arena(64 * MIB))
    pool._seen = math.inf
    async with aclosing(pool):
        yield pool


async def all_is_free(pool: MooncakePool) -> None:
    (stage,) = await pool.stage([63 * MIB], deadline=soon())
    assert stage is not None
    stage.release()


async def test_a_bad_stage_costs_no_memory_for_the_good_ones(broken_engine: MooncakePool) -> None:
    keys, foreign = [new_key(), new_key()], await Arena(64 * KIB).lend([KIB])
    for bad in (None, MooncakeStage(foreign[0])):
        good, released = await broken_engine.stage([30 * MIB, KIB], deadline=soon())
        assert good is not None
        assert released is not None
        released.release()
        with pytest.raises(ValueError, match="another pool"):
            await broken_engine.put_many(keys, [good, bad or released], deadline=soon())
        await all_is_free(broken_engine)
        (good,) = await broken_engine.stage([30 * MIB], deadline=soon())
        assert good is not None
        with pytest.raises(ValueError, match="another pool"):
            await broken_engine.put_many(keys, [good, good], deadline=soon())
        await all_is_free(broken_engine)


async def test_an_engine_that_raises_is_heard_as_itself(broken_engine: MooncakePool) -> None:
    for count in (1, 40):  # one call of the engine, and several
        with pytest.raises(RuntimeError, match="out of order"):
            await broken_engine.get_many([new_key() for _ in range(count)], [KIB] * count, deadline=soon())
        await all_is_free(broken_engine)


async def are_there(pool: MooncakePool, keys: list[PoolKey]) -> list[bool]:
    return await pool.exists_many(keys, deadline=soon())


async def test_what_could_not_be_read_is_absent_until_it_is_put_or_removed(broken_engine: MooncakePool) -> None:
    pool, keys = broken_engine, [new_key() for _ in range(3)]
    store_of(pool).gone = True
    store_of(pool).go_on.set()
    assert await fetch(pool, keys, [KIB] * 3) == [GetStatus.MISS] * 3
    assert await are_there(pool, keys) == [False] * 3
    assert await store(pool, keys[:1], [b"value"]) == [PutStatus.PRESENT]
    assert await pool.remove_many(keys[1:2], deadline=soon()) == 1
    assert await are_there(pool, keys) == [True, True, False]


@pytest.mark.parametrize("is_put", [False, True])
async def test_a_read_that_comes_back_late_says_nothing_of_what_was_put_since(
    broken_engine: MooncakePool, is_put: bool
) -> None:
    pool, key = broken_engine, new_key()
    store_of(pool).gone = True
    with pytest.raises(PoolTimeout):
        await pool.get_many([key], [63 * MIB], deadline=anyio.current_time() + 0.05)
    assert await are_there(pool, [key]) == [True]
    if is_put:
        assert await store(pool, [key], [b"value"]) == [PutStatus.PRESENT]
    store_of(pool).go_on.set()
    await all_is_free(pool)  # it has come back
    assert await are_there(pool, [key]) == [is_put]


@pytest.mark.parametrize("is_known", [False, True])
async def test_keys_of_a_peer_that_is_not_asked_are_absent_if_it_is_known(
    broken_engine: MooncakePool, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(peer: str, call: object, over: Callable[[], object], *_: object) -> None:
        over()
        raise TooManyHang(peer)

    pool, key = broken_engine, new_key()
    if is_known:  # some segment fails: calls are made for each by itself
        pool._segments, pool._suspects = ["hangs", "fails"], {"fails": math.inf}
    with monkeypatch.context() as patch:
        patch.setattr(pool._calls, "run", refuse)
        assert await fetch(pool, [key], [KIB]) == [GetStatus.FAILED]
    assert await are_there(pool, [key]) == [not is_known]
