"""A pool that cannot be opened yet: its engine is not up, or not to be reached."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from aiodatadist.context_caching.pools.contract import (
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
from aiodatadist.context_caching.pools.open import open_pool

logger = logging.getLogger(__name__)


async def open_deferred(url: str) -> KVPool:
    """The pool that a URL names; or, if it does not answer, what will be that pool one day.

    Raises:
        PoolRefused: the pool answers, and does not let this caller in.
        EmsInvalidArgument, LLMException: see :func:`open_pool`.
    """
    try:
        return await open_pool(url)
    except PoolRefused:
        raise
    except (PoolTimeout, PoolUnreachable) as problem:
        logger.warning("the pool cannot be opened, and that is tried again with each health check: %s", problem)
        return DeferredPool(url, problem)


class DeferredPool(KVPool):
    """Until :meth:`arrive` has opened the pool, every call raises PoolUnreachable; then it is that pool."""

    def __init__(self, url: str, problem: PoolTimeout | PoolUnreachable) -> None:
        self.capabilities = Capabilities(url.partition(":")[0])
        self._url = url
        self._problem: Exception = problem
        self._pool: KVPool | None = None

    @property
    def _there(self) -> KVPool:
        if self._pool is None:
            raise PoolUnreachable(f"the pool is not open yet: {self._problem}")
        return self._pool

    async def arrive(self) -> None:
        """Try to open it, if it is not open. Takes as long as its engine does."""
        if self._pool is None:
            try:
                self._pool = await open_pool(self._url)
            except Exception as problem:
                if not isinstance(problem, (PoolTimeout, PoolUnreachable)) or isinstance(problem, PoolRefused):
                    logger.warning("the pool cannot be opened: %s", problem)  # that is no longer a matter of time
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

    async def exists_many(self, keys: Sequence[PoolKey], *, lease_ms: int = 0, deadline: float) -> list[bool]:
        return await self._there.exists_many(keys, lease_ms=lease_ms, deadline=deadline)

    async def remove_many(self, keys: Sequence[PoolKey], *, deadline: float) -> int:
        return await self._there.remove_many(keys, deadline=deadline)

    async def nodes(self, *, deadline: float) -> list[NodeInfo]:
        return await self._there.nodes(deadline=deadline)

    async def healthy(self, *, deadline: float) -> bool:
        return self._pool is not None and await self._pool.healthy(deadline=deadline)

    async def aclose(self) -> None:
        if self._pool is not None:
            await self._pool.aclose()
