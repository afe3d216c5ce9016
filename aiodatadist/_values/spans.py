"""Ranges of memory that do not overlap, each with what it stands for. Pure arithmetic."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Spans(Generic[T]):
    """A table of ranges of memory, in the order of their addresses. The caller adds none that overlaps another."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._spans: list[tuple[int, T]] = []  # the end of each, and what it stands for

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[T]:
        return (value for _, value in self._spans)

    def add(self, address: int, nbytes: int, value: T) -> None:
        """Add a range."""
        at = bisect_left(self._starts, address)
        self._starts.insert(at, address)
        self._spans.insert(at, (address + nbytes, value))

    def remove(self, address: int) -> None:
        """Remove the range that starts at an address. Has no effect if none does."""
        at = bisect_left(self._starts, address)
        if at < len(self._starts) and self._starts[at] == address:
            del self._starts[at], self._spans[at]

    def overlapped(self, address: int, nbytes: int) -> T | None:
        """Return what the first range stands for that shares a byte with this one; None if none does."""
        at = max(0, bisect_right(self._starts, address) - 1)
        for start, (end, value) in zip(self._starts[at : at + 2], self._spans[at : at + 2], strict=True):
            if start < address + nbytes and address < end:
                return value
        return None

    def around(self, address: int, nbytes: int) -> T | None:
        """Return what the range stands for that contains these bytes, all of them; None if none does."""
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        end, value = self._spans[at]
        return value if address + nbytes <= end else None

    def covering(self, addresses: array[int], lengths: array[int]) -> tuple[dict[T, None], list[int]]:
        """Return what the ranges stand for that contain these bytes, each once, and the numbers of those in no range."""
        lowest = min(addresses)
        only = self.around(lowest, max(addresses) + max(lengths) - lowest)
        if only is not None:  # the usual case: all of them are in one region
            return {only: None}, []
        found: dict[T, None] = {}
        missing: list[int] = []
        for number, (address, nbytes) in enumerate(zip(addresses, lengths, strict=True)):
            value = self.around(address, nbytes)
            if value is None:
                missing.append(number)
            else:
                found[value] = None
        return found, missing
