"""Ranges that a copy moves between the caller's memory and values, as grids."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from aiodatadist._values.descriptors import Placement
from aiodatadist._values.grid import Grid

PlacementsOf = Callable[[Iterable[int]], list[Placement | None]]


class CopyStep(NamedTuple):
    """Ranges to copy. ``grid.local`` is the side that is written."""

    to: Placement
    source: Placement
    grid: Grid


class CopyList(NamedTuple):
    """The places of values in the caller's memory (``grid.local``), and in the values themselves (``grid.remote``)."""

    placement: Placement
    grid: Grid

    def gathered(self) -> CopyStep:
        """Return the copy from the caller's memory into the values."""
        return CopyStep(Placement.HOST, self.placement, self.grid.mirrored())

    def scattered(self) -> CopyStep:
        """Return the copy from the values into the caller's memory."""
        return CopyStep(self.placement, Placement.HOST, self.grid)


def copies(pairs: Sequence[tuple[int, int, int]]) -> list[CopyStep]:
    """Return the copies between values; each pair is (destination, source, bytes)."""
    by_size: dict[int, list[tuple[int, int]]] = {}
    for to, source, nbytes in pairs:
        by_size.setdefault(nbytes, []).append((to, source))
    return [
        CopyStep(Placement.HOST, Placement.HOST, at_addresses([a for a, _ in ends], [b for _, b in ends], nbytes))
        for nbytes, ends in by_size.items()
    ]


def at_addresses(local: Sequence[int], remote: Sequence[int], nbytes: int) -> Grid:
    """Return the grid of ranges of equal length, each with its own address on both sides."""
    origin = array("Q", [0])
    return Grid(origin, origin, array("Q", local), array("Q", remote), 1, 1, nbytes, nbytes)
