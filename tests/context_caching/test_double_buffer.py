"""Work behind a body: as much at a time as allowed, nothing after its end, and the first error counts."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from aiodatadist._context_caching.transfer.double_buffer import DoubleBuffer, double_buffer
from tests.held import turns


class Gates:
    """Work that ends when its gate is opened."""

    def __init__(self, count: int) -> None:
        self.gates = [anyio.Event() for _ in range(count)]
        self.begun: list[int] = []
        self.ended: list[int] = []

    async def work(self, number: int) -> None:
        self.begun.append(number)
        try:
            await self.gates[number].wait()
        finally:
            self.ended.append(number)

    async def begin(self, behind: DoubleBuffer, number: int) -> None:
        await behind.go_on(lambda: self.work(number), is_last=False)
        assert self.begun[-1] == number


async def test_two_go_on_at_a_time() -> None:
    gates = Gates(3)
    async with double_buffer() as behind:
        for number in range(2):
            await behind.room()
            await gates.begin(behind, number)
        room = asyncio.create_task(behind.room())
        await turns()
        assert not room.done()
        gates.gates[0].set()
        await room
        await gates.begin(behind, 2)
        assert behind.is_busy
        for gate in gates.gates:
            gate.set()
        await behind.done()
    assert sorted(gates.ended) == [0, 1, 2]


async def test_nothing_goes_on_when_the_body_is_over() -> None:
    gates = Gates(2)

    async def body() -> None:
        async with double_buffer() as behind:
            await gates.begin(behind, 0)
            await gates.begin(behind, 1)
            gates.gates[0].set()
            gates.gates[1].set()
            raise KeyError("the body's own")

    with pytest.raises(KeyError):
        await body()
    assert sorted(gates.ended) == [0, 1]


async def test_an_error_ends_what_else_goes_on_and_the_body() -> None:
    gates = Gates(1)

    async def fail() -> None:
        raise OSError("the first")

    async def body() -> None:
        async with double_buffer() as behind:
            await gates.begin(behind, 0)
            await behind.go_on(fail, is_last=False)
            await behind.done()

    with pytest.raises(OSError, match="the first"):
        await body()
    assert gates.ended == [0]


async def test_the_first_of_two_errors_is_told() -> None:
    gates = Gates(1)

    async def fail_when_cancelled() -> None:
        try:
            await gates.work(0)
        except anyio.get_cancelled_exc_class() as cancelled:
            raise KeyError("the second") from cancelled

    async def fail() -> None:
        raise OSError("the first")

    async def body() -> None:
        async with double_buffer() as behind:
            await behind.go_on(fail_when_cancelled, is_last=False)
            await behind.go_on(fail, is_last=False)
            await behind.done()

    with pytest.raises(OSError, match="the first"):
        await body()
    assert gates.ended == [0]


async def test_the_last_is_waited_for() -> None:
    gates = Gates(2)
    gates.gates[1].set()
    async with double_buffer() as behind:
        await gates.begin(behind, 0)
        await behind.go_on(lambda: gates.work(1), is_last=True)
        assert gates.ended == [1]
        gates.gates[0].set()
    assert gates.ended == [1, 0]


async def test_what_was_cancelled_behind_is_not_taken_for_done() -> None:
    async def end_cancelled() -> None:
        raise asyncio.CancelledError("its stream was closed")

    async def body() -> None:
        async with double_buffer() as behind:
            await behind.go_on(end_cancelled, is_last=False)

    with pytest.raises(asyncio.CancelledError):
        await body()


async def test_a_scope_that_is_cancelled_says_so_itself() -> None:
    async def end_cancelled() -> None:
        raise asyncio.CancelledError("its stream was closed")

    with anyio.CancelScope() as scope:
        async with double_buffer() as behind:
            await behind.go_on(end_cancelled, is_last=False)
            scope.cancel()
            await behind.done()
    assert scope.cancelled_caught
