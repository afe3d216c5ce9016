"""First come, first served: a task takes what it wants in its turn, or leaves the line with nothing."""

from __future__ import annotations

import asyncio
import math
from functools import partial

import anyio
import pytest

from aiodatadist._concurrency.byte_budget import ByteBudget
from aiodatadist._concurrency.fair_queue import FairQueue


class Stock:
    """A stock of things, and a line for them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.line = FairQueue()
        self.order: list[str] = []

    def attempt(self, wanted: int) -> int | None:
        if wanted < 0:
            raise ValueError(f"{wanted} things")
        if wanted > self.count:
            return None
        self.count -= wanted
        return wanted

    async def take(self, name: str, wanted: int, deadline: float = math.inf) -> None:
        await self.line.take(partial(self.attempt, wanted), deadline)
        self.order.append(name)

    def give(self, count: int) -> None:
        self.count += count
        self.line.call()


async def tasks_in_line(stock: Stock, *wishes: tuple[str, int]) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(stock.take(*wish)) for wish in wishes]
    await anyio.wait_all_tasks_blocked()
    return tasks


async def test_what_is_there_is_taken_without_waiting() -> None:
    stock = Stock(3)
    taking = stock.take("first", 3)
    with pytest.raises(StopIteration):
        taking.send(None)
    assert stock.order == ["first"]


async def test_a_newcomer_does_not_pass_the_line_and_the_line_is_served_in_order() -> None:
    stock = Stock(2)
    tasks = await tasks_in_line(stock, ("large", 9), ("small", 1), ("smaller", 1))
    assert (stock.order, len(stock.line)) == ([], 3)
    stock.give(9)
    await asyncio.gather(*tasks)
    assert (stock.order, stock.count, len(stock.line)) == (["large", "small", "smaller"], 0, 0)


async def test_a_cancelled_task_takes_nothing_and_the_next_one_attempts() -> None:
    stock = Stock(2)
    large, small = await tasks_in_line(stock, ("large", 9), ("small", 2))
    large.cancel()
    await asyncio.wait([large, small])
    assert large.cancelled()
    assert (stock.order, stock.count) == (["small"], 0)


async def test_one_that_is_cancelled_when_it_has_been_called_passes_the_call_on() -> None:
    stock = Stock(0)
    first, second = await tasks_in_line(stock, ("first", 1), ("second", 1))
    stock.give(1)
    first.cancel()
    await asyncio.wait([first, second])
    assert (stock.order, stock.count) == (["second"], 0)


async def test_a_deadline_that_has_passed_means_now_or_never() -> None:
    stock = Stock(1)
    await stock.take("now", 1, 0)
    with pytest.raises(TimeoutError):
        await stock.take("never", 1, 0)
    assert (stock.order, len(stock.line)) == (["now"], 0)


async def test_what_an_attempt_raises_ends_its_own_wait_only() -> None:
    stock = Stock(0)
    tasks = await tasks_in_line(stock, ("first", 1), ("wrong", -1), ("second", 1))
    stock.give(2)
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in done] == [type(None), ValueError, type(None)]
    assert stock.order == ["first", "second"]


async def test_a_budget_gives_more_than_its_limit_to_one_task_alone() -> None:
    budget = ByteBudget(10)
    await budget.take(25)
    assert (budget.taken, budget.most, budget.free) == (25, 25, -15)
    with pytest.raises(TimeoutError):
        await budget.take(1, 0)
    budget.give(20)
    await budget.take(5, 0)
    assert (budget.taken, budget.most, budget.free) == (10, 25, 0)
