"""A memory pool: one allocation of the device, or of the host, cut into pages."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

from aiodatadist.config.option_rules import PoolConfig
from aiodatadist.errors import InternalError, OutOfMemory, ParamInvalid

__all__ = ["PagePool", "PoolConfig", "PoolUsage"]


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Bytes of a pool. ``largest`` is the largest piece to be had; ``pinned`` what transfers or peers may touch now.

    ``withheld`` is the part of ``pinned`` into which a peer may still write that was stopped in the middle of it and lost its
    link. It is not given on before that peer's process goes on, or ends.
    """

    total: int
    free: int
    largest: int
    pinned: int
    withheld: int = 0


class PagePool:
    """Whole pages: the smallest extent that is large enough is cut, neighbours are joined when they are freed.

    Pure arithmetic: it hands out addresses and touches none. Free extents are known by their first page and by the page
    behind them, so that joining looks at two; and they are sorted by length, so that finding one takes a binary search.

    Args:
        name: how the messages call the pool.
        base: address of its first byte.
        config: how large the pool and a page are.
        pinned: says how many bytes transfers use now, and how many of them are withheld; asked only for :meth:`usage` and
            the message of a failure.
        oldest_pin: says in words what has been pinned the longest, or nothing; asked only for the message of a failure.
    """

    def __init__(
        self,
        name: str,
        base: int,
        config: PoolConfig,
        pinned: Callable[[], tuple[int, int]] = lambda: (0, 0),
        oldest_pin: Callable[[], str] = lambda: "",
    ) -> None:
        self.name = name
        self.base = base
        self.page = config.page
        self._pages = self._free_pages = config.pages
        self._pinned = pinned
        self._oldest_pin = oldest_pin
        self._used: dict[int, int] = {}  # first page: pages
        self._free: dict[int, int] = {}
        self._ends: dict[int, int] = {}  # page behind a free extent: its first page
        self._by_size: list[tuple[int, int]] = []  # (pages, first page) of the free extents, sorted
        self._add(0, self._pages)

    def allocate(self, nbytes: int) -> int:
        """The address of ``nbytes``, rounded up to pages; a whole number of pages from ``base``.

        Raises:
            ParamInvalid: ``nbytes`` is not at least 1.
            OutOfMemory: no extent is large enough. The message names free, largest and pinned bytes, and the oldest pin.
        """
        address = self._take(nbytes)
        if address is None:
            raise self.no_room(nbytes)
        return address

    def take_all(self, nbytes: int, count: int) -> list[int] | None:
        """The addresses of ``count`` allocations of ``nbytes`` each; None where there is no room for all, and none was taken.

        Raises ParamInvalid: ``nbytes`` is not at least 1.
        """
        addresses: list[int] = []
        while len(addresses) < count:
            address = self._take(nbytes)
            if address is None:
                for taken in addresses:
                    self.free(taken)
                return None
            addresses.append(address)
        return addresses

    def _take(self, nbytes: int) -> int | None:
        if nbytes < 1:
            raise ParamInvalid(f"{self.name}: nbytes is {nbytes}: an allocation has at least 1 byte")
        pages = -(-nbytes // self.page)
        place = bisect_left(self._by_size, (pages, 0))
        if place == len(self._by_size):
            return None
        length, first = self._by_size[place]
        self._remove(first)
        if length > pages:
            self._add(first + pages, length - pages)
        self._used[first] = pages
        self._free_pages -= pages
        return self.base + first * self.page

    def free(self, address: int) -> None:
        """Give an allocation back.

        Raises:
            InternalError: no allocation begins there, or not any more. Nothing is changed.
        """
        first, inside = divmod(address - self.base, self.page)
        if inside or first not in self._used:
            raise InternalError(f"{self.name}: {address:#x} cannot be freed: no allocation begins there")
        pages = self._used.pop(first)
        self._free_pages += pages
        if first + pages in self._free:
            pages += self._remove(first + pages)
        if first in self._ends:
            first = self._ends[first]
            pages += self._remove(first)
        self._add(first, pages)

    def room_for(self, nbytes: int) -> int:
        """How many allocations of ``nbytes`` each there is room for now."""
        pages = -(-nbytes // self.page)
        return sum(length // pages for length, _ in self._by_size)

    def could_hold(self, nbytes: int, count: int) -> bool:
        """Whether so many allocations of ``nbytes`` each fit when nothing else is allocated."""
        return -(-nbytes // self.page) * count <= self._pages

    def usage(self) -> PoolUsage:
        """How full it is now."""
        largest = max((pages for pages, _ in self._by_size[-1:]), default=0)  # other threads ask, too
        return PoolUsage(self._pages * self.page, self._free_pages * self.page, largest * self.page, *self._pinned())

    def no_room(self, nbytes: int, count: int = 1, but: str = "") -> OutOfMemory:
        """What is raised where ``count`` allocations of ``nbytes`` each cannot be had. ``but``: what else there is to say."""
        now = self.usage()
        what = f"{nbytes} bytes do" if count == 1 else f"{count} x {nbytes} bytes do"
        return OutOfMemory(
            f"{self.name}: {what} not fit: {now.free} of {now.total} bytes are free, the largest piece has "
            f"{now.largest}, {now.pinned} are pinned by transfers and peers{_withheld(now)}{self._oldest_pin()}; "
            f"pages have {self.page} bytes{but}",
            hint="deallocate caches, or make the pool larger",
        )

    # ---- free extents ----

    def _add(self, first: int, pages: int) -> None:
        self._free[first] = pages
        self._ends[first + pages] = first
        insort(self._by_size, (pages, first))

    def _remove(self, first: int) -> int:
        """Forget a free extent; returns its pages."""
        pages = self._free.pop(first)
        del self._ends[first + pages]
        del self._by_size[bisect_left(self._by_size, (pages, first))]
        return pages


def _withheld(now: PoolUsage) -> str:
    if not now.withheld:
        return ""
    return f", {now.withheld} of them by peers that were stopped while they wrote, and have neither gone on nor ended"
