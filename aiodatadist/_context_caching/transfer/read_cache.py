"""The local read cache: copies of values in this process, above any pool, in the embedded pool's store.

Values are named by their contents, so a copy is never stale. It goes only when room is needed, or when it is removed. A
process forgets what it removes itself; but if it stores other contents under one of its own keys, copies in other
processes stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiodatadist._context_caching.pools.contract import PoolKey, Value
from aiodatadist._context_caching.pools.lru_store import LruStore, Reservation


class LocalReadCache:
    """A cache bounded in bytes. With 0 bytes it is always empty.

    Attributes:
        removals: number of removals. A value read before a removal may be the removed one, and is not kept.
    """

    def __init__(self, lru_store: LruStore | None) -> None:
        self._store = lru_store
        self.removals = 0

    @classmethod
    async def open(cls, nbytes: int, device_id: int) -> LocalReadCache:
        """Allocate the memory. Raises LLMException if there is not enough."""
        return cls(await LruStore.open("local read cache", nbytes, device_id) if nbytes else None)

    def find(self, key: PoolKey, nbytes: int) -> Value | None:
        """Return a copy of exactly this size, pinned until it is released, or None."""
        loan = self._store.lend(key) if self._store is not None else None
        if loan is not None and loan.nbytes != nbytes:
            loan.release()
            return None
        return loan

    def has(self, keys: Sequence[PoolKey]) -> list[bool]:
        """Return for each key True if there is a copy. These copies count as used now."""
        return [False] * len(keys) if self._store is None else self._store.touch_all(keys)

    def make_room(self, key: PoolKey, nbytes: int) -> Reservation | None:
        """Return memory for a copy, or None if there is one already, or no room. Never waits."""
        if self._store is None or key in self._store:
            return None
        return self._store.make_room(nbytes)

    def store(self, key: PoolKey, reservation: Reservation) -> None:
        """Keep a copy that has been filled in."""
        if self._store is not None:
            self._store.store(key, reservation)

    def remove(self, keys: Sequence[PoolKey]) -> None:
        """Forget the copies of these keys."""
        self.removals += 1
        if self._store is not None:
            for key in keys:
                self._store.drop(key)

    async def aclose(self) -> None:
        """Release the memory."""
        if self._store is not None:
            await self._store.aclose()
