"""A pool that cannot be opened yet, because its engine is down or unreachable."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from aiodatadist._context_caching.pools.contract import (
    Capabilities,
    GetStatus,
    KVPool,
    NodeInfo,
    PoolKey,
    PoolRefused,
    PoolTimeout,
    PoolUnreachable,
    PutStatus,
    Stage,
    Value,
)
from aiodatadist._context_caching.pools.open import PoolPlace, place_of

logger = logging.getLogger(__name__)


async def open_deferred(url: str) -> KVPool:
    """Open the pool that a URL names; if it does not answer, return a pool that opens it later.

    Raises:
        PoolRefused: if the pool answers and refuses this caller.
        EmsInvalidArgument, LLMException: see :func:`open_pool`.
    """
    place = await place_of(url)
    try:
        return await place.open()
    except PoolRefused:
        raise
    except (PoolTimeout, PoolUnreachable) as problem:
        logger.warning("the pool cannot be opened now; each health check tries again: %s", problem)
        return DeferredPool(place, problem)


class DeferredPool(KVPool):
    """A pool that raises PoolUnreachable from every call until :meth:`arrive` has opened it."""

    def __init__(self, place: PoolPlace, problem: PoolTimeout | PoolUnreachable) -> None:
        self.capabilities = Capabilities(place.url.partition(":")[0], sealed=place.ring is not None)
        self._place = place
        self._problem: Exception = problem
        self._pool: KVPool | None = None

    @property
    def _there(self) -> KVPool:
        if self._pool is None:
            raise PoolUnreachable(f"the pool is not open yet: {self._problem}")
        return self._pool

    async def arrive(self) -> None:
        """Try to open the pool, if it is not open. There is no time limit but the engine's own."""
        if self._pool is None:
            try:
                self._pool = await self._place.open()
            except Exception as problem:
                if not isinstance(problem, (PoolTimeout, PoolUnreachable)) or isinstance(problem, PoolRefused):
                    logger.warning("the pool cannot be opened: %s", problem)  # waiting will not help here
                self._problem = problem
            else:
                self.capabilities = self._pool.capabilities

    async def stage(self, sizes: Sequence[int], *, deadline: float) -> list[Stage | None]:
        return await self._there.stage(sizes, deadline=deadline)

    def keeps(self, sizes: Sequence[int]) -> int:
        return len(sizes) if self._pool is None else self._pool.keeps(sizes)

    def why_no_room(self, nbytes: int) -> str:
        return self._there.why_no_room(nbytes)

    async def put_many(self, keys: Sequence[PoolKey], stages: Sequence[Stage], *, deadline: float) -> list[PutStatus]:
        return await self._there.put_many(keys, stages, deadline=deadline)

    async def get_many(
        self, keys: Sequence[PoolKey], sizes: Sequence[int], *, deadline: float
    ) -> list[Value | GetStatus]:
        return await self._there.get_many(keys, sizes, deadline=deadline)

    async def exists_many(self, keys: Sequence[PoolKey], *, lease: float = 0.0, deadline: float) -> list[bool]:
        return await self._there.exists_many(keys, lease=lease, deadline=deadline)

    async def remove_many(self, keys: Sequence[PoolKey], *, deadline: float) -> int:
        return await self._there.remove_many(keys, deadline=deadline)

    async def nodes(self, *, deadline: float) -> list[NodeInfo]:
        return await self._there.nodes(deadline=deadline)

    async def healthy(self, *, deadline: float) -> bool:
        return self._pool is not None and await self._pool.healthy(deadline=deadline)

    async def aclose(self) -> None:
        if self._pool is not None:
            await self._pool.aclose()
