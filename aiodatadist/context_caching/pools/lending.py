"""What every engine's pool lends by: in the order in which it was asked for, never more than there is, until a deadline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import anyio

from aiodatadist.context_caching.pools.contract import PoolTimeout
from aiodatadist.values import checks

T = TypeVar("T")


@contextmanager
def until(deadline: float, what: str) -> Iterator[None]:
    """The body ends at the deadline.

    Raises:
        PoolTimeout: it had not come to its own end by then.
    """
    with anyio.CancelScope(deadline=deadline) as scope:
        yield
    if scope.cancelled_caught:
        raise PoolTimeout(f"{what}: not done by the deadline")


def fitting(sizes: Sequence[int], largest: int, capacity: int, page: int = 1) -> list[bool]:
    """Which values of these sizes, beginning with the first, have room in an empty pool of ``capacity`` bytes.

    Raises:
        TypeError, ValueError: a size is not an int, or not at least 1.
    """
    fits = []
    for i, size in enumerate(sizes):
        if checks.integer(size, f"sizes[{i}]", checks.UINT64) < 1:
            raise ValueError(f"sizes[{i}] is {size}: a value has at least 1 byte")
        taken = -(-size // page) * page
        fits.append(size <= largest and taken <= capacity)
        capacity -= taken if fits[-1] else 0
    return fits


def same_length(keys: Sequence[object], others: Sequence[object], name: str) -> None:
    """Raises ValueError: there has to be one of ``others`` for each key."""
    if len(keys) != len(others):
        raise ValueError(f"{len(keys)} keys, but {len(others)} {name}: there has to be one for each key")


class _Turn:
    def __init__(self) -> None:
        self.called = anyio.Event()


class FairQueue:
    """Callers who want something that there may not be enough of: none overtakes, so a large wish is not starved."""

    def __init__(self) -> None:
        self._waiting: deque[_Turn] = deque()

    async def take(self, attempt: Callable[[], T | None]) -> T:
        """What ``attempt`` returns, as soon as it returns something. Does not wait, nor yield, if it does so at once."""
        if not self._waiting and (taken := attempt()) is not None:
            return taken
        turn = _Turn()
        self._waiting.append(turn)
        try:
            while True:
                turn.called = anyio.Event()
                if self._waiting[0] is turn and (taken := attempt()) is not None:
                    return taken
                await turn.called.wait()
        finally:
            self._waiting.remove(turn)
            self.call()

    def call(self) -> None:
        """There is more than before: the first tries again."""
        if self._waiting:
            self._waiting[0].called.set()


class ByteBudget:
    """So many bytes, and no more, are in use at a time."""

    def __init__(self, nbytes: int) -> None:
        self.capacity = nbytes
        self.free = nbytes
        self._turns = FairQueue()

    async def take(self, nbytes: int) -> None:
        """All of them at once, when that many are free. Cancelled: none."""
        if nbytes > self.capacity:
            raise ValueError(f"{nbytes} bytes are wanted: there are only {self.capacity}")

        def attempt() -> bool | None:
            if nbytes > self.free:
                return None
            self.free -= nbytes
            return True

        await self._turns.take(attempt)

    def give(self, nbytes: int) -> None:
        self.free += nbytes
        self._turns.call()
