"""What goes on behind a body: as much at a time as it may, nothing once it is over, and the first error counts."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from aiodatadist.context_caching.behind import Behind, some_behind


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

    async def begin(self, behind: Behind, number: int) -> None:
        await behind.go_on(lambda: self.work(number), is_last=False)
        while number not in self.begun:
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_so_many_go_on_at_a_time(most: int) -> None:
    gates = Gates(most + 1)
    async with some_behind(most) as behind:
        for number in range(most):
            await behind.room()
            await gates.begin(behind, number)
        assert behind.is_busy
        with anyio.move_on_after(0.02) as scope:
            await behind.room()
        assert scope.cancelled_caught
        gates.gates[0].set()
        await behind.room()
        await gates.begin(behind, most)
        for gate in gates.gates:
            gate.set()
        await behind.done()
    assert sorted(gates.ended) == list(range(most + 1))


async def test_nothing_goes_on_when_the_body_is_over() -> None:
    gates = Gates(2)

    async def body() -> None:
        async with some_behind(2) as behind:
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
        async with some_behind(2) as behind:
            await gates.begin(behind, 0)
            await behind.go_on(fail, is_last=False)
            await behind.done()

    with pytest.raises(OSError, match="the first"):
        await body()
    assert gates.ended == [0]


async def test_the_last_is_waited_for() -> None:
    gates = Gates(2)
    gates.gates[1].set()
    async with some_behind(1) as behind:
        await gates.begin(behind, 0)
        await behind.go_on(lambda: gates.work(1), is_last=True)
        assert gates.ended == [1]
        gates.gates[0].set()
    assert gates.ended == [1, 0]
