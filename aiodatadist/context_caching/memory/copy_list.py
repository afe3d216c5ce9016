"""Which ranges a copy moves between the caller's memory and values, as grids."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from aiodatadist.values.descriptors import Placement
from aiodatadist.values.grid import Grid

PlacementsOf = Callable[[Iterable[int]], list[Placement | None]]


class CopyStep(NamedTuple):
    """Ranges to copy. ``grid.local`` is the side that is written."""

    to: Placement
    source: Placement
    grid: Grid


class CopyList(NamedTuple):
    """Where values are in the caller's memory: ``grid.local`` is that, ``grid.remote`` is the values' own."""

    placement: Placement
    grid: Grid

    def gathered(self) -> CopyStep:
        """Into the values."""
        return CopyStep(Placement.HOST, self.placement, self.grid.mirrored())

    def scattered(self) -> CopyStep:
        """Out of the values."""
        return CopyStep(self.placement, Placement.HOST, self.grid)


def copies(pairs: Sequence[tuple[int, int, int]]) -> list[CopyStep]:
    """From value to value: (destination, source, bytes)."""
    by_size: dict[int, list[tuple[int, int]]] = {}
    for to, source, nbytes in pairs:
        by_size.setdefault(nbytes, []).append((to, source))
    return [
        CopyStep(Placement.HOST, Placement.HOST, at_addresses([a for a, _ in ends], [b for _, b in ends], nbytes))
        for nbytes, ends in by_size.items()
    ]


def at_addresses(local: Sequence[int], remote: Sequence[int], nbytes: int) -> Grid:
    """Ranges of equal length, each at an address of its own on both sides."""
    origin = array("Q", [0])
    return Grid(origin, origin, array("Q", local), array("Q", remote), 1, 1, nbytes, nbytes)
