"""Rules by which every engine's pool lends memory: never more than there is, and until a deadline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import anyio

from aiodatadist._context_caching.pools.contract import PoolTimeout
from aiodatadist._values import checks


@contextmanager
def until(deadline: float, what: str) -> Iterator[None]:
    """Cancel the body at the deadline.

    Raises:
        PoolTimeout: if the body had not ended by then.
    """
    with anyio.CancelScope(deadline=deadline) as scope:
        yield
    if scope.cancelled_caught:
        raise PoolTimeout(f"{what}: not done by the deadline")


def fitting(sizes: Sequence[int], largest: int, capacity: int, page: int = 1) -> list[bool]:
    """Return for each size True if it fits, beside those before it, into an empty pool of ``capacity`` bytes.

    Raises:
        TypeError, ValueError: if a size is not an int, or below 1.
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
    """Raise ValueError unless there is one of ``others`` for each key."""
    if len(keys) != len(others):
        raise ValueError(f"{len(keys)} keys, but {len(others)} {name}: there must be one for each key")
