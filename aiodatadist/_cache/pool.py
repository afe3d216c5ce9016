"""A memory pool: one allocation of the device or the host, cut into pages."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

from aiodatadist._config.option_rules import PoolConfig
from aiodatadist.errors import InternalError, OutOfMemory, ParamInvalid

__all__ = ["PagePool", "PoolConfig", "PoolUsage"]


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Bytes of a pool. ``largest`` is the largest free piece; transfers use, or peers may touch, ``pinned`` bytes.

    ``withheld`` is the part of ``pinned`` into which a peer may still write that was stopped while it wrote and lost
    its link. It is not reused until that peer's process has continued or ended.
    """

    total: int
    free: int
    largest: int
    pinned: int
    withheld: int = 0


class PagePool:
    """A pool of whole pages: the smallest sufficient extent is cut, and neighbours are joined when they are freed.

    Pure arithmetic: it hands out addresses and touches none. Free extents are indexed by their first page and by the
    page behind them, so that joining looks at two. They are also sorted by length, so that finding one takes a binary
    search.

    Args:
        name: the pool's name in messages.
        base: address of its first byte.
        config: size of the pool and of a page.
        pinned: returns the bytes that transfers use now, and how many of them are withheld; asked only for
            :meth:`usage` and the message of a failure.
        oldest_pin: returns what has been pinned for longest, in words; asked only for the message of a failure.
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
        self.page: int = config.page
        self._pages = self._free_pages = config.pages
        self._pinned = pinned
        self._oldest_pin = oldest_pin
        self._used: dict[int, int] = {}  # number of pages by first page
        self._free: dict[int, int] = {}
        self._ends: dict[int, int] = {}  # first page of a free extent by the page behind it
        self._by_size: list[tuple[int, int]] = []  # (pages, first page) of the free extents, sorted
        self._add(0, self._pages)

    def allocate(self, nbytes: int) -> int:
        """Return the address of ``nbytes``, rounded up to pages; its distance from ``base`` is a whole number of pages.

        Raises:
            ParamInvalid: if ``nbytes`` is below 1.
            OutOfMemory: if no extent is large enough. The message has the free, largest and pinned bytes, and the
                oldest pin.
        """
        address = self._take(nbytes)
        if address is None:
            raise self.no_room(nbytes)
        return address

    def take_all(self, nbytes: int, count: int) -> list[int] | None:
        """Return the addresses of ``count`` allocations of ``nbytes`` each, or None if they do not all fit.

        In that case nothing is taken. Raises ParamInvalid if ``nbytes`` is below 1.
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
        """Free an allocation.

        Raises:
            InternalError: if no allocation begins there, or no longer. Nothing is changed.
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
        """Return how many allocations of ``nbytes`` each fit now."""
        pages = -(-nbytes // self.page)
        return sum(length // pages for length, _ in self._by_size)

    def could_hold(self, nbytes: int, count: int) -> bool:
        """Return True if this many allocations of ``nbytes`` each fit into the empty pool."""
        return -(-nbytes // self.page) * count <= self._pages

    def usage(self) -> PoolUsage:
        """Return the usage of the pool now."""
        # a slice, because other threads call this, too
        largest = max((pages for pages, _ in self._by_size[-1:]), default=0)
        return PoolUsage(self._pages * self.page, self._free_pages * self.page, largest * self.page, *self._pinned())

    def no_room(self, nbytes: int, count: int = 1, but: str = "") -> OutOfMemory:
        """Return the error for ``count`` allocations of ``nbytes`` each that do not fit.

        ``but`` is appended to the message.
        """
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
        """Remove a free extent from the index; return its pages."""
        pages = self._free.pop(first)
        del self._ends[first + pages]
        del self._by_size[bisect_left(self._by_size, (pages, first))]
        return pages


def _withheld(now: PoolUsage) -> str:
    if not now.withheld:
        return ""
    return f", {now.withheld} of them by peers that were stopped while they wrote, and have neither continued nor ended"
