"""The local read cache: copies of values in this process, above any pool. Made of the same store as the embedded pool.

Values are named by their contents, so a copy is not stale; it goes only when room is needed, or when it is removed. What this
process removes it does not keep; who gives other contents to a key of its own has to know that other processes' copies stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiodatadist.context_caching.pools.contract import PoolKey, Value
from aiodatadist.context_caching.pools.lru_store import LruStore, Reservation


class LocalReadCache:
    """Bounded in bytes; with 0 bytes it has nothing and takes nothing.

    Attributes:
        removals: how often something was removed. What was read before one may be what was removed, and is not kept.
    """

    def __init__(self, lru_store: LruStore | None) -> None:
        self._store = lru_store
        self.removals = 0

    @classmethod
    async def open(cls, nbytes: int, device_id: int) -> LocalReadCache:
        """Raises LLMException: there is not so much memory."""
        return cls(await LruStore.open("local read cache", nbytes, device_id) if nbytes else None)

    def find(self, key: PoolKey, nbytes: int) -> Value | None:
        """A copy of exactly that size, pinned until it is released."""
        loan = self._store.lend(key) if self._store is not None else None
        if loan is not None and loan.nbytes != nbytes:
            loan.release()
            return None
        return loan

    def has(self, keys: Sequence[PoolKey]) -> list[bool]:
        """Of which there are copies; those count as used now."""
        return [False] * len(keys) if self._store is None else self._store.touch_all(keys)

    def make_room(self, key: PoolKey, nbytes: int) -> Reservation | None:
        """Memory for a copy; None if there is one already, or no room. Never waits."""
        if self._store is None or key in self._store:
            return None
        return self._store.make_room(nbytes)

    def store(self, key: PoolKey, reservation: Reservation) -> None:
        """Keep what was filled in."""
        if self._store is not None:
            self._store.store(key, reservation)

    def remove(self, keys: Sequence[PoolKey]) -> None:
        self.removals += 1
        if self._store is not None:
            for key in keys:
                self._store.drop(key)

    async def aclose(self) -> None:
        if self._store is not None:
            await self._store.aclose()
