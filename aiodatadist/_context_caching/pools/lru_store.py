"""Values in one piece of host memory, bounded in bytes. The least recently used is evicted; lent values stay.

The memory is pinned memory of a device, from and to which a stream can copy. Callers store and read right there, so
that nothing is copied inside. It is cut into pages: values of equal size find room as long as there is room.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from aiodatadist._cache.pool import PagePool
from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._config.option_rules import MAX_PAGES, PoolConfig
from aiodatadist._context_caching.errors import EmsInvalidArgument
from aiodatadist._context_caching.pools.contract import PoolKey
from aiodatadist._device import Device, Memory
from aiodatadist._values.descriptors import Placement
from aiodatadist.errors import OutOfMemory

logger = logging.getLogger(__name__)

PAGE_SHIFT = 10
"""Binary logarithm of the page size: values take whole pages of 1 KiB."""


def in_pages(nbytes: int) -> int:
    """Return the bytes of the whole pages that a value takes."""
    return -(-nbytes >> PAGE_SHIFT) << PAGE_SHIFT


def machine_bytes() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Reservation:
    """Memory for one value, lent until it is stored or released: a ``Stage`` of the contract."""

    __slots__ = ("_store", "address", "nbytes")

    def __init__(self, lru_store: LruStore, address: int, nbytes: int) -> None:
        self._store: LruStore | None = lru_store
        self.address: int = address
        self.nbytes: int = nbytes

    def view(self) -> memoryview:
        if self._store is None:
            raise ValueError("this memory was stored or released")
        return self._store.view(self.address, self.nbytes)

    def release(self) -> None:
        lru_store = self._take()
        if lru_store is not None:
            lru_store.returned(self.address)

    def _take(self) -> LruStore | None:
        lru_store, self._store = self._store, None
        return lru_store


class _Entry:
    __slots__ = ("address", "is_dropped", "nbytes", "pins")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address: int = address
        self.nbytes: int = nbytes
        self.pins: int = 0
        self.is_dropped: bool = False


class PinnedValue:
    """A stored value, pinned until it is released. A :class:`~aiodatadist._context_caching.pools.contract.Value`."""

    __slots__ = ("_entry", "_key", "_store", "address", "nbytes")

    def __init__(self, lru_store: LruStore, key: PoolKey, entry: _Entry) -> None:
        self._store: LruStore | None = lru_store
        self._key = key
        self._entry = entry
        self.address: int = entry.address
        self.nbytes: int = entry.nbytes

    def view(self) -> memoryview:
        if self._store is None:
            raise ValueError("this value was released")
        return self._store.view(self.address, self.nbytes).toreadonly()

    def release(self) -> None:
        lru_store, self._store = self._store, None
        if lru_store is not None:
            lru_store.unpinned(self._key, self._entry)


class LruStore:
    """A store on the event loop on which it was opened. No method waits, except opening and closing.

    Attributes:
        capacity: bytes of the whole pages.
        evicted: values that were evicted.
        on_room: called when memory was released, or a value can be evicted again.
    """

    def __init__(self, device: Device, memory: Memory, name: str, config: PoolConfig) -> None:
        self.capacity: int = config.pages * config.page
        self.evicted: int = 0
        self.on_room: Callable[[], None] = lambda: None
        self._device = device
        self._memory = memory
        self._name = name
        self._pages = PagePool(name, memory.address, config)
        self._entries: dict[PoolKey, _Entry] = {}
        self._idle: OrderedDict[PoolKey, _Entry] = OrderedDict()  # unpinned; the least recently used is first
        self._lent = 0

    @classmethod
    async def open(cls, name: str, nbytes: int, device_id: int) -> LruStore:
        """Allocate ``nbytes`` of host memory, rounded up to pages.

        Raises:
            EmsInvalidArgument: if this machine has less memory.
            LLMException: if there is no such device, or not enough memory now.
        """
        most = min(machine_bytes(), (MAX_PAGES - 1) << PAGE_SHIFT)
        if nbytes > most:
            raise EmsInvalidArgument(f"the {name} has {nbytes} bytes: must have at most {most} on this machine")
        config = PoolConfig(memory_size=in_pages(nbytes), page_shift=PAGE_SHIFT)
        device = await Device.open(device_id)
        try:
            memory = await in_thread(device.allocate, config.memory_size, Placement.HOST)
        except BaseException:
            await device.aclose()
            raise
        return cls(device, memory, name, config)

    async def aclose(self) -> None:
        """Release the memory. If some of it is still lent it leaks, because freeing it would crash its users."""
        if self._lent:
            logger.warning(
                "%s: closed while %d values or stages are lent; its memory is not freed", self._name, self._lent
            )
            self._memory.is_stuck = True
        await self._device.aclose()

    @property
    def is_lent(self) -> bool:
        """True if a reservation or a pinned value is in use."""
        return self._lent > 0

    @property
    def used(self) -> int:
        """Bytes of allocated pages."""
        return self.capacity - self._pages.usage().free

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: PoolKey) -> bool:
        return key in self._entries

    def view(self, address: int, nbytes: int) -> memoryview:
        """Return the bytes of a range, writable."""
        start = address - self._memory.address
        return self._memory.view()[start : start + nbytes]

    # ---- storing ----

    def make_room(self, nbytes: int) -> Reservation | None:
        """Return memory for a value, evicting others. Return None if it is too large, or lent values are in its way."""
        if not 0 < nbytes <= self.capacity:
            return None
        while True:
            try:
                address = self._pages.allocate(nbytes)
            except OutOfMemory:
                if not self._idle:
                    return None
                self._evict()
            else:
                self._lent += 1
                return Reservation(self, address, nbytes)

    def _evict(self) -> None:
        key, entry = self._idle.popitem(last=False)
        del self._entries[key]
        self._pages.free(entry.address)
        self.evicted += 1

    def store(self, key: PoolKey, reservation: Reservation) -> bool:
        """Keep a filled reservation under a key. Return False, and release it, if the key has a value already."""
        if reservation._store is not self:
            raise ValueError("this memory is not lent by this pool, or was stored or released before")
        if key in self._entries:
            self.touch(key)
            reservation.release()
            return False
        reservation._take()
        self._lent -= 1
        self._entries[key] = self._idle[key] = _Entry(reservation.address, reservation.nbytes)
        self.on_room()
        return True

    def returned(self, address: int) -> None:
        """Take back a reservation that was not used."""
        self._lent -= 1
        self._pages.free(address)
        self.on_room()

    # ---- reading ----

    def lend(self, key: PoolKey) -> PinnedValue | None:
        """Return a value, pinned, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if not entry.pins:
            del self._idle[key]
        entry.pins += 1
        self._lent += 1
        return PinnedValue(self, key, entry)

    def unpinned(self, key: PoolKey, entry: _Entry) -> None:
        """Take back a pinned value. It counts as used until now."""
        self._lent -= 1
        entry.pins -= 1
        if entry.pins:
            return
        if entry.is_dropped:
            self._pages.free(entry.address)
        else:
            self._idle[key] = entry
        self.on_room()

    def touch(self, key: PoolKey) -> bool:
        """Return True if there is a value; it counts as used now."""
        if key in self._idle:
            self._idle.move_to_end(key)
            return True
        return key in self._entries

    def touch_all(self, keys: Sequence[PoolKey]) -> list[bool]:
        """Touch many keys, at the speed of C if all are there and none is in use."""
        try:
            deque(map(self._idle.move_to_end, keys), 0)
        except KeyError:
            return list(map(self.touch, keys))
        return [True] * len(keys)

    def drop(self, key: PoolKey) -> bool:
        """Remove a value; return True if there was one. Callers that hold it keep it."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        if entry.pins:
            entry.is_dropped = True
        else:
            del self._idle[key]
            self._pages.free(entry.address)
            self.on_room()
        return True
