"""A process's own memory, which its cluster uses as a cache for a while. After that it is the caller's again, and watched."""

from __future__ import annotations

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, CacheKey, CacheManager, LLMException, LLMStatusCode, Placement
from aiodatadist._cli.chaos.doors import Door
from aiodatadist._cli.chaos.side import Side
from aiodatadist._cli.chaos.tally import GOOD
from aiodatadist.testing import BlockLedger

PAGE = 2 << 20
"""The alignment of tensors: each has its own pages, as links over HCCS require."""


class UserMemory:
    """A cache that is registered, and unregistered.

    While it is not registered all of it is reclaimed: written over, and from then on no byte may change (I2).

    Args:
        desc: description of the memory that is registered.
        key: key of a blocks cache; or a key for each slot of a contiguous cache.
    """

    def __init__(
        self,
        side: Side,
        door: Door,
        name: str,
        desc: CacheDesc,
        key: BlocksCacheKey | list[CacheKey] | None = None,
    ) -> None:
        self._side = side
        self._manager: CacheManager = door.manager
        self._key, self._desc = key, desc
        apart = -(-desc.size // PAGE) * PAGE
        placement = Placement.HOST if desc.placement is Placement.HOST else Placement.DEVICE
        self._memory = door.datadist.device.allocate(apart * desc.num_tensors, placement)
        self._addresses = [self._memory.address + i * apart for i in range(desc.num_tensors)]
        self._cluster_id, self._name = door.cluster_id, name
        self._cache: Cache | None = None
        self.ledger = self._new_ledger(0)
        self.ledger.reclaim(self.ledger.blocks)

    def _new_ledger(self, generation: int) -> BlockLedger:
        memory = Cache(-1, self._desc, self._addresses, True)
        ledger = self._side.ledgers[self._name] = BlockLedger(memory, self._cluster_id, generation)
        return ledger

    @property
    def cache(self) -> Cache | None:
        """The registered cache, or None if the memory is not registered."""
        return self._cache

    async def lend(self, generation: int = 0) -> Cache | None:
        """Register the memory, with each block stamped for this generation.

        Return None if that failed; nothing may have been written.
        """
        if self._cache is not None:
            return self._cache
        self.check()
        self.ledger = self._new_ledger(generation)
        self.ledger.write(self.ledger.blocks)
        try:
            self._cache = await self._register()
        except LLMException as error:
            self._side.ended(self._operation, error)
            self.ledger.reclaim(self.ledger.blocks)
        else:
            self._side.tally.ended(self._operation, GOOD)
        return self._cache

    @property
    def _operation(self) -> str:
        return "register_cache" if isinstance(self._key, list) else "register_blocks_cache"

    async def _register(self) -> Cache:
        if isinstance(self._key, list):
            return await self._manager.register_cache(self._desc, self._addresses, self._key)
        return await self._manager.register_blocks_cache(self._desc, self._addresses, self._key)

    async def take_back(self) -> bool:
        """Return True if the memory is the caller's again; otherwise peers may still reach it through a link."""
        if self._cache is None:
            return True
        try:
            await self._manager.unregister_cache(self._cache.cache_id)
        except LLMException as error:
            self._side.ended("unregister", error, error.status_code is LLMStatusCode.LLM_EXIST_LINK)
            return False
        self._cache = None
        self._side.tally.ended("unregister", GOOD)
        self.ledger.reclaim(self.ledger.blocks)
        return True

    def check(self) -> None:
        """Check that nothing was written since the memory was released."""
        for words in self.ledger.strays():
            self._side.violated("I2", f"{self._name} of the {self._side.settings.name}: {words}")
