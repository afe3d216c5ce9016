"""A line for room in a pool: first come, first served, each for as long as it is willing to wait."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodatadist import OutOfMemory
from aiodatadist._cache.pool import PagePool, PoolConfig
from aiodatadist._cache.room_queue import RoomQueue
from tests.clock import took
from tests.profiles import examples

PAGE = 1 << 10
BASE = 1 << 30


class Pool:
    """A pool of ``pages``, its line, and who was served in which order."""

    def __init__(self, pages: int = 8) -> None:
        self.pages = PagePool("the pool", BASE, PoolConfig(memory_size=pages * PAGE, page_shift=10))
        self.room = RoomQueue(self.pages)
        self.served: dict[str, list[int]] = {}

    async def take(self, name: str, pages: int, count: int = 1, seconds: float = math.inf) -> None:
        attempt = partial(self.pages.take_all, pages * PAGE, count)
        self.served[name] = await self.room.in_turn(pages * PAGE, count, attempt, seconds)

    def take_now(self, pages: int) -> list[int]:
        return self.room.at_once(pages * PAGE, 1, partial(self.pages.take_all, pages * PAGE, 1))

    def free(self, name: str) -> None:
        for address in self.served.pop(name):
            self.pages.free(address)
        self.room.call()

    @property
    def is_empty(self) -> bool:
        usage = self.pages.usage()
        return usage.free == usage.largest == usage.total


async def start(*calls: Callable[[], Coroutine[Any, Any, Any]]) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(call(), name=f"caller {i}") for i, call in enumerate(calls)]
    await anyio.wait_all_tasks_blocked()
    return tasks


async def test_room_that_is_there_is_taken_without_waiting() -> None:
    pool = Pool()
    with pytest.raises(StopIteration):
        pool.take("a", 8).send(None)
    assert pool.served == {"a": [BASE]}
    assert not len(pool.room)


async def test_a_small_one_behind_a_large_one_waits_too_and_both_are_served_in_order() -> None:
    pool = Pool()
    await pool.take("first", 6)
    tasks = await start(lambda: pool.take("large", 8), lambda: pool.take("small", 1))
    assert (list(pool.served), len(pool.room)) == (["first"], 2)
    pool.free("first")
    await anyio.wait_all_tasks_blocked()
    assert list(pool.served) == ["large"]
    pool.free("large")
    await asyncio.gather(*tasks)
    assert list(pool.served) == ["small"]


async def test_what_does_not_wait_gets_nothing_while_others_do_and_is_told_so() -> None:
    pool = Pool()
    await pool.take("first", 6)
    (waiter,) = await start(lambda: pool.take("large", 4))
    with pytest.raises(
        OutOfMemory,
        match=r"1024 bytes do not fit: 2048 of 8192 bytes are free.*, behind 1 in line: first 4096 bytes for "
        r"task 'caller 0', which has waited for .* s \[",
    ):
        pool.take_now(1)
    pool.free("first")
    with pytest.raises(OutOfMemory, match="behind 1"):
        pool.take_now(1)  # it is free, and on its way to the one that waits
    await waiter
    assert pool.take_now(1) == [BASE + 4 * PAGE]


async def test_time_runs_out_for_one_and_the_next_has_its_turn() -> None:
    pool = Pool()
    await pool.take("first", 6)
    large, small = await start(lambda: pool.take("large", 4, seconds=0.05), lambda: pool.take("small", 2))
    with pytest.raises(
        OutOfMemory, match=r"4096 bytes do not fit: 2048 of 8192 .*pages have 1024 bytes; it waited for 0\.\d+ s \["
    ):
        await large
    await small
    assert list(pool.served) == ["first", "small"]


async def test_a_wait_that_ends_says_who_was_in_front() -> None:
    pool = Pool()
    await pool.take("first", 6)
    large, small = await start(lambda: pool.take("large", 2, 4), lambda: pool.take("small", 1, seconds=0.05))
    with pytest.raises(
        OutOfMemory,
        match=r"it waited for 0\.\d+ s, behind 1 in line: first 4 x 2048 bytes for task 'caller 0'",
    ):
        await small
    assert len(pool.room) == 1
    large.cancel()
    await asyncio.wait([large])


@pytest.mark.autojump
@pytest.mark.parametrize("seconds", [0, 50])
async def test_it_ends_in_time(seconds: float) -> None:
    pool = Pool()
    await pool.take("first", 8)
    with took(seconds), pytest.raises(OutOfMemory, match="it waited for"):
        await pool.take("late", 1, seconds=seconds)


async def test_what_the_empty_pool_could_not_hold_is_not_waited_for() -> None:
    pool = Pool()
    await pool.take("first", 8)
    for pages, count in ((9, 1), (3, 3), (1, 9)):
        with pytest.raises(OutOfMemory, match="it would not fit into the empty pool"):
            await pool.take("larger", pages, count)
    assert not len(pool.room)


async def test_an_attempt_that_raises_ends_its_own_wait_only() -> None:
    pool = Pool()
    await pool.take("first", 8)

    def attempt() -> None:
        if pool.pages.usage().free:
            raise ValueError("the name is taken")

    wrong, right = await start(lambda: pool.room.in_turn(PAGE, 1, attempt, math.inf), lambda: pool.take("right", 8))
    pool.free("first")
    with pytest.raises(ValueError, match="the name is taken"):
        await wrong
    await right
    assert list(pool.served) == ["right"]


@pytest.mark.parametrize("victim", ["large", "middle", "small"])
@pytest.mark.parametrize("moment", ["while it waits", "in its turn"])
async def test_one_that_is_cancelled_has_taken_nothing_and_stands_in_no_way(victim: str, moment: str) -> None:
    pool = Pool()
    await pool.take("first", 8)
    wishes = {"large": 8, "middle": 4, "small": 4}
    tasks = dict(zip(wishes, await start(*(partial(pool.take, *wish) for wish in wishes.items())), strict=True))
    if moment == "in its turn":
        pool.free("first")  # the first in the line is called, and its task has not run yet
    tasks[victim].cancel()
    await asyncio.wait([tasks[victim]])
    assert tasks[victim].cancelled()
    if moment == "while it waits":
        pool.free("first")
    await anyio.wait_all_tasks_blocked()
    for name in [each for each in wishes if each != victim]:
        await tasks[name]
        pool.free(name)
        await anyio.wait_all_tasks_blocked()
    assert pool.is_empty
    assert not len(pool.room)


OPERATIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 12), st.integers(1, 3)),
    st.tuples(st.sampled_from(["free", "cancel"]), st.integers(0, 20), st.just(0)),
)


class Model:
    """The same pool and line, as a program without tasks: after each step those in front that fit are served."""

    def __init__(self) -> None:
        self.pages = PagePool("model", BASE, PoolConfig(memory_size=16 * PAGE, page_shift=10))
        self.line: deque[tuple[str, int, int]] = deque()
        self.served: dict[str, list[int]] = {}

    def settle(self) -> None:
        while self.line:
            name, pages, count = self.line[0]
            addresses = self.pages.take_all(pages * PAGE, count)
            if addresses is None:
                return
            self.line.popleft()
            self.served[name] = addresses

    def free(self, name: str) -> None:
        for address in self.served.pop(name):
            self.pages.free(address)

    def leave(self, name: str) -> None:
        self.line = deque(wish for wish in self.line if wish[0] != name)


@given(st.lists(OPERATIONS, max_size=40))
@settings(max_examples=examples(40), deadline=None)
def test_any_program_is_served_as_by_the_model(operations: list[tuple[str, int, int]]) -> None:
    asyncio.run(run_beside_model(operations))


async def run_beside_model(operations: list[tuple[str, int, int]]) -> None:
    pool, model, tasks = Pool(16), Model(), dict[str, asyncio.Task[None]]()
    for number, (what, first, second) in enumerate(operations):
        if what == "ask" and first * second <= 16:
            name = f"{number}"
            tasks[name] = asyncio.create_task(pool.take(name, first, second))
            model.line.append((name, first, second))
        elif what == "free" and model.served:
            name = list(model.served)[first % len(model.served)]
            model.free(name)
            pool.free(name)
        elif what == "cancel" and model.line:
            name = model.line[first % len(model.line)][0]
            model.leave(name)
            tasks[name].cancel()
        model.settle()
        await anyio.wait_all_tasks_blocked()
        assert pool.served == model.served
        assert len(pool.room) == len(model.line)
        assert pool.pages.usage() == model.pages.usage()
    await end(pool, tasks)


async def end(pool: Pool, tasks: dict[str, asyncio.Task[None]]) -> None:
    for name, task in tasks.items():
        if name not in pool.served:
            task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    for name in list(pool.served):
        pool.free(name)
    assert pool.is_empty
