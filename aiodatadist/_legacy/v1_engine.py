"""The engine of a v1 cluster: what its KvCacheManager, its models and its links share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import anyio

from aiodatadist._cache.registry import CacheRegistry
from aiodatadist._cache.task import CacheTask
from aiodatadist._legacy.kv_cache import KvCache
from aiodatadist._legacy.link_locks import LinkLocks
from aiodatadist._values.descriptors import LLMRole, Placement
from aiodatadist.errors import ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._cluster.engine import Engine

GIVE_BACK: Final = 10.0
"""Seconds that :meth:`V1Engine.give_up` waits for peers. After that the memory is released later."""


class V1Engine:
    """An engine in the KvCacheManager mode.

    Attributes:
        role: the current role.
        link_locks: the links that are in use.
        watch: called with each transfer that starts here, whichever end asked for it.
    """

    def __init__(self, engine: Engine, role: LLMRole) -> None:
        self.engine = engine
        self.role = role
        self.link_locks: LinkLocks = LinkLocks()
        self.watch: Callable[[CacheTask], object] = lambda _: None
        self.check_here: Callable[[], None] = engine.check_here

    @property
    def registry(self) -> CacheRegistry:
        """The caches of the running engine. Raises LLMException if it does not run."""
        self.engine.check_running()
        return self.engine.registry

    def want_role(self, role: LLMRole, what: str) -> None:
        """Raise ParamInvalid unless this cluster has the role."""
        if self.role is not role:
            raise ParamInvalid(f"{what} is for {role}: this cluster is {self.role}")

    def room_for(self, nbytes: int) -> int:
        """Return how many tensors of this size the pool has room for now."""
        return self.registry.pools.room_for(Placement.DEVICE, nbytes)

    async def give_up(self, cache: KvCache) -> None:
        """Deallocate a cache without raising, also if arrays over it are alive.

        While an array is alive, or if a peer uses the memory for more than ``GIVE_BACK`` seconds, it is released later.
        """
        self.registry.drop(cache)
        # shielded: this cleans up after cancelled calls, too
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + GIVE_BACK):
            await self.registry.wait_given_back(cache.cache_id)
