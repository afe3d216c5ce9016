"""The embedded pool: values in memory of this process. It needs no server and never grows a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import anyio.lowlevel

from aiodatadist._concurrency.fair_queue import FairQueue
from aiodatadist._context_caching import checks as rules
from aiodatadist._context_caching.pools.contract import (
    Capabilities,
    GetStatus,
    KVPool,
    NodeInfo,
    PoolKey,
    PoolTimeout,
    PoolUnreachable,
    PutStatus,
    Stage,
    Value,
)
from aiodatadist._context_caching.pools.lru_store import LruStore, Reservation, in_pages

AT_ONCE = 256
"""Keys that are looked up before other tasks get a turn."""


class MemoryPool(KVPool):
    """A pool bounded in bytes that evicts the least recently used value. Nothing is copied: stages are its own memory.

    A value counts as used when it is stored, when ``exists_many`` finds it, and while a reader holds it. Lent values
    are not evicted. Values take whole pages of 1 KiB. Open it with ``await MemoryPool.open("1GiB")``; it is an async
    context manager.

    Attributes:
        capacity: bytes.
    """

    capabilities: Capabilities = Capabilities("memory", in_process=True)

    def __init__(self, lru_store: LruStore) -> None:
        self.capacity: int = lru_store.capacity
        self._store = lru_store
        self._line = FairQueue()  # calls that wait for room
        self._is_closed = False
        lru_store.on_room = self._line.call

    @classmethod
    async def open(cls, nbytes: int | str, *, device_id: int = 0) -> Self:
        """Allocate this many bytes of host memory, or ``"1GiB"``; pinned if the device needs that.

        Raises:
            EmsInvalidArgument: if ``nbytes`` is below 1 or above this machine's memory, or no event loop runs here.
            LLMException: if there is no such device, or not enough memory now.
        """
        rules.on_a_loop("a pool")
        return cls(await LruStore.open("memory pool", rules.size(nbytes, "nbytes", 1), device_id))

    async def stage(self, sizes: Sequence[int], *, deadline: float) -> list[Stage | None]:
        """Return memory for these values.

        Waits only if there is no room for any of them because other calls hold it. Calls are served in order.
        """
        self._check_open()
        if not sizes:
            return []
        for i, size in enumerate(sizes):
            rules.integer(size, f"sizes[{i}]", 1)
        try:
            return await self._line.take(lambda: self._find_room(sizes), deadline)
        except TimeoutError:
            raise PoolTimeout("the memory pool had no room in time: all of it is lent") from None

    def _find_room(self, sizes: Sequence[int]) -> list[Stage | None] | None:
        """Return memory for some of the values, or only None if none can ever fit. Return None if all must wait."""
        self._check_open()
        stages: list[Stage | None] = [self._store.make_room(size) for size in sizes]
        is_hopeless = all(size > self.capacity for size in sizes)
        return stages if is_hopeless or any(stages) else None

    def keeps(self, sizes: Sequence[int]) -> int:
        room = self.capacity
        for i, size in enumerate(sizes):
            if size <= self.capacity:
                room -= in_pages(size)
                if room < 0:
                    return i
        return len(sizes)

    def why_no_room(self, nbytes: int) -> str:
        if nbytes > self.capacity:
            return f"the pool has {self.capacity} (bytes=)"
        return f"the pool has {self.capacity} (bytes=), which must hold everything that one call saves"

    async def put_many(self, keys: Sequence[PoolKey], stages: Sequence[Stage], *, deadline: float) -> list[PutStatus]:
        self._check_open()
        return [self._put(key, stage) for key, stage in zip(keys, stages, strict=True)]

    def _put(self, key: PoolKey, stage: Stage) -> PutStatus:
        if not isinstance(stage, Reservation):
            raise TypeError(f"{stage!r} is not a stage of this pool")
        return PutStatus.STORED if self._store.store(key, stage) else PutStatus.PRESENT

    async def get_many(
        self, keys: Sequence[PoolKey], sizes: Sequence[int], *, deadline: float
    ) -> list[Value | GetStatus]:
        self._check_open()
        return [self._get(key, size) for key, size in zip(keys, sizes, strict=True)]

    def _get(self, key: PoolKey, size: int) -> Value | GetStatus:
        loan = self._store.lend(key)
        if loan is None:
            return GetStatus.MISS
        if loan.nbytes != size:
            loan.release()
            return GetStatus.WRONG_LENGTH
        return loan

    async def exists_many(self, keys: Sequence[PoolKey], *, lease: float = 0.0, deadline: float) -> list[bool]:
        """Return for each key True if it is there; it then counts as used now. ``lease`` has no further effect."""
        self._check_open()
        found: list[bool] = []
        for first in range(0, len(keys), AT_ONCE):
            if first:
                await anyio.lowlevel.checkpoint()
            found += self._store.touch_all(keys[first : first + AT_ONCE])
        return found

    async def remove_many(self, keys: Sequence[PoolKey], *, deadline: float) -> int:
        self._check_open()
        return sum(map(self._store.drop, keys))

    async def nodes(self, *, deadline: float) -> list[NodeInfo]:
        self._check_open()
        return [NodeInfo("memory", self.capacity, self._store.used)]

    async def healthy(self, *, deadline: float) -> bool:
        return not self._is_closed

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._store)

    @property
    def evicted(self) -> int:
        """Values that were evicted so far."""
        return self._store.evicted

    def _check_open(self) -> None:
        if self._is_closed:
            raise PoolUnreachable("this memory pool is closed")

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._line.call()
        await self._store.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
