"""What every engine's pool lends by: never more than there is, and until a deadline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import anyio

from aiodatadist.context_caching.pools.contract import PoolTimeout
from aiodatadist.values import checks


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
        raise ValueError(f"{len(keys)} keys, but {len(others)} {name}: there must be one for each key")
