"""The owner of this cluster's caches: makes them, answers for them, and frees their memory once nothing touches it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import anyio

from aiodatadist._cache.consumption import Consumption
from aiodatadist._cache.deallocation import FREED_BYTE, Deallocation, fills_freed
from aiodatadist._cache.memory_pools import MemoryPool, MemoryPools
from aiodatadist._cache.names import Name
from aiodatadist._cache.pool import PagePool
from aiodatadist._cache.table import CacheTable, Entry, check_desc
from aiodatadist._cache.windows import call_when_gone, windows
from aiodatadist._cache.withheld import WithheldMemory
from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._concurrency.signal import Signal
from aiodatadist._counting import Incidents
from aiodatadist._device import Device
from aiodatadist._transport import Transport
from aiodatadist._values.audience import EVERY_CLUSTER, Audience
from aiodatadist._values.descriptors import Cache, CacheDesc, CacheHome, Placement, forget_addresses
from aiodatadist.errors import CacheNotFound, LLMException, LLMStatusCode, ParamInvalid

logger = logging.getLogger(__name__)

Naming = Callable[[], dict[Name, int]]
"""Returns the names of a new cache, or raises. It is called at the moment when the cache is made."""


class CacheRegistry:
    """The caches of one cluster.

    ``spawn`` starts a task in the group of the engine, so that a release that has started is finished even if its
    caller is cancelled.
    """

    def __init__(
        self,
        device: Device,
        transport: Transport,
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], bool],
        cluster_id: int = 0,
        incidents: Incidents | None = None,
    ) -> None:
        self.home: CacheHome = CacheHome(cluster_id)
        self.table: CacheTable = CacheTable(self.home)
        self._device = device
        self._transport = transport
        self._spawn = spawn
        self._fills_freed = fills_freed()
        self._registering = anyio.Lock()
        self._deallocations: dict[int, Deallocation] = {}
        self._removals: dict[Name, list[Deallocation | Signal]] = {}
        self.pools: MemoryPools = MemoryPools(device, transport, self.table, self._released)
        self.consumption: Consumption = Consumption(self.table, self._collect)
        self.withheld: WithheldMemory = WithheldMemory(device, incidents or Incidents(), spawn)

    # ---- making caches ----

    def allocate(self, desc: CacheDesc, blocks: bool, naming: Naming) -> Cache:
        """Return a cache with memory from a pool, now or never. Its contents are undefined.

        If this fails, nothing is taken.
        """
        pool = self._pool_to_allocate(desc, naming)
        return pool.room.at_once(desc.size, desc.num_tensors, lambda: self._make(pool, desc, blocks, naming))

    async def allocate_in_turn(self, desc: CacheDesc, blocks: bool, naming: Naming, seconds: float) -> Cache:
        """Return the same once earlier calls have theirs and there is room, within this many seconds."""
        pool = self._pool_to_allocate(desc, naming)
        make = partial(self._make, pool, desc, blocks, naming)
        return await pool.room.in_turn(desc.size, desc.num_tensors, make, seconds)

    def _pool_to_allocate(self, desc: CacheDesc, naming: Naming) -> MemoryPool:
        check_desc(desc)
        naming()
        return self.pools.of(desc.placement)

    def _make(self, pool: MemoryPool, desc: CacheDesc, blocks: bool, naming: Naming) -> Cache | None:
        """Return a new cache, or None if there is no room; then nothing was taken."""
        # again: a key may have been bound while this call waited for room
        names = naming()
        addresses = pool.pages.take_all(desc.size, desc.num_tensors)
        if addresses is None:
            return None
        entry = self.table.add(desc, addresses, blocks, names, True, pool.pages)
        entry.epoch = pool.epoch
        entry.is_live = True
        return entry.cache

    async def register(
        self,
        desc: CacheDesc,
        addresses: Sequence[int],
        keep: list[object],
        blocks: bool,
        naming: Naming,
        accessible: bool | None,
        audience: Audience = EVERY_CLUSTER,
    ) -> Cache:
        """Return a cache over the caller's memory, which ``keep`` keeps alive. If this fails, nothing is registered.

        ``accessible``: True if peers may reach it. With None they reach device memory; host memory they do not, and it
        is registered with the transport by the first pull into it.
        """
        check_desc(desc)
        async with self._registering:
            is_offered = desc.placement is Placement.DEVICE if accessible is None else accessible
            entry = self.table.add(desc, addresses, blocks, naming(), is_offered)
            entry.may_receive |= accessible is None
            entry.audience, entry.is_private = audience, any(map(self._transport.is_private, entry.regions()))
            try:
                await self._make_known(entry)
            except BaseException:
                self.table.remove(entry)
                raise
            entry.keep = keep
            entry.epoch = self._transport.epoch
            entry.is_live = True
        return entry.cache

    async def _make_known(self, entry: Entry) -> None:
        self._device.adopt([(r.address, r.nbytes, r.placement) for r in entry.regions()])
        try:
            if entry.remote_accessible:
                await self._transport.register(entry.regions())
                entry.is_known = True
        except BaseException:
            self._disown(entry)
            raise

    async def make_reachable(self, entry: Entry) -> None:
        """Register host memory that peers cannot reach, before the first pull into it. The caller has leased it.

        Raises:
            LLMException: if the transport refused the memory.
        """
        async with self._registering:
            if not entry.is_known:
                await self._transport.register(entry.regions())
                entry.is_known, entry.epoch = True, self._transport.epoch

    async def _make_unknown(self, entry: Entry) -> None:
        if entry.is_known:
            await self._transport.unregister(entry.regions())
        self._disown(entry)

    def _disown(self, entry: Entry) -> None:
        self._device.disown([(r.address, r.nbytes) for r in entry.regions()])

    # ---- finding them ----

    def local(self, cache: Cache, name: str) -> Entry:
        """Return the cache that the caller names as source or destination.

        Raises:
            ParamInvalid: if it belongs to another cluster, or to this one before it was finalized.
            CacheNotFound: if there is no cache of this id, or no longer.
        """
        entry = self._own(cache, name)
        if entry is None or not entry.has_id:
            raise CacheNotFound(f"{name} {cache.cache_id} is unknown here, or no longer known")
        if not entry.is_live:
            raise CacheNotFound(f"{name} {cache.cache_id} is being released, or not registered yet")
        if entry.is_poisoned:
            raise CacheNotFound(f"{name} {cache.cache_id} is lost: the device never released its memory")
        if entry.writers:
            raise CacheNotFound(
                f"{name} {cache.cache_id} is withheld: a lost peer was stopped while it wrote there, and may continue",
                hint="continue that process, or end it: then the cache can be used again",
            )
        return entry

    def _own(self, cache: Cache, name: str) -> Entry | None:
        """Return the entry of a cache object; None if there is no cache of its id, or no longer.

        Raises:
            ParamInvalid: if the object belongs to another cluster, or contradicts the entry.
        """
        home = cache.home
        if home is not None and home is not self.home:
            ours, theirs = self.home.cluster_id, home.cluster_id
            whose = f"cluster {theirs}" if theirs != ours else f"cluster {theirs} before it was finalized"
            raise ParamInvalid(
                f"{name} {cache.cache_id} is a cache of {whose}: this is cluster {ours}, which has other caches"
            )
        entry = self.table.find(cache.cache_id)
        if entry is not None and home is None and list(entry.addresses) != list(cache.tensor_addrs):
            raise ParamInvalid(
                f"{name} {cache.cache_id} was made by hand, with addresses that cache {cache.cache_id} of cluster "
                f"{self.home.cluster_id} does not have"
            )
        return entry

    def offered(self, name: Name) -> tuple[Entry, int] | None:
        """Return the cache and the batch slot that a peer names; None if there is none for peers."""
        entry, slot = self.table.resolve(name) or (None, 0)
        if entry is None or not entry.is_live or not entry.remote_accessible:
            return None
        if entry.is_poisoned or entry.writers:
            return None
        return entry, slot

    # ---- giving them up ----

    async def deallocate(self, cache: Cache, blocks: bool) -> None:
        """Drop the id; if that was the last reference, release the memory once nothing touches it.

        Memory that only a lost peer may touch, which was stopped while it wrote, is not waited for: its pages return to
        the pool when that peer continues or ends. If cancelled while it waits, the memory is released all the same.
        """
        self.pools.want()
        if cache.is_blocks_cache != blocks:
            other = "deallocate_blocks_cache" if cache.is_blocks_cache else "deallocate_cache"
            raise ParamInvalid(f"{cache!r}: use {other}")
        entry = self._own(cache, "cache")
        if entry is not None and entry.pool is None:
            return
        if entry is not None and entry.has_id:
            self._check_views(entry)
            entry.has_id = False
            forget_addresses(cache)
            forget_addresses(entry.cache)
            self._collect(entry)
        if (deallocation := self._deallocations.get(cache.cache_id)) is not None:
            await deallocation.wait()

    def drop(self, cache: Cache) -> None:
        """Deallocate a cache that has no name and no user any longer, without waiting.

        The cache stays alive as long as an array over its memory.
        """
        entry = self._own(cache, "cache")
        if entry is None or entry.pool is None or not entry.has_id:
            return
        token = entry.views()
        if token is None:
            entry.has_id = False
            forget_addresses(cache)
            forget_addresses(entry.cache)
            self._collect(entry)
            return
        loop = asyncio.get_running_loop()
        call_when_gone(token, loop, self.drop, entry.cache)

    async def wait_given_back(self, cache_id: int) -> None:
        """Wait until a cache without references has been released, or that has failed."""
        if (deallocation := self._deallocations.get(cache_id)) is not None:
            await deallocation.settled.wait()

    def bind(self, cache: Cache, naming: Naming) -> None:
        """Bind names to slots of an allocated cache. If ``naming`` raises, nothing was bound."""
        entry = self.local(cache, "cache")
        self.table.bind(entry, naming())

    def _check_views(self, entry: Entry) -> None:
        if entry.views() is not None:
            raise ParamInvalid(
                f"cache {entry.cache_id} has arrays or tensors over its memory that are still alive",
                hint="drop them first",
            )

    def _released(self) -> list[Entry]:
        """Return the caches whose memory is being released."""
        deallocations = list(self._deallocations.values())  # a copy, in one step, because other threads call this, too
        return [deallocation.entry for deallocation in deallocations]

    def _collect(self, entry: Entry) -> None:
        """Release a cache if it has no references any longer."""
        if not entry.references and entry.cache_id not in self._deallocations:
            self._start_deallocation(entry)

    async def remove_key(self, name: Name) -> None:
        """Unbind a key; on return peers have forgotten it. Unknown keys, and those of registered caches, are ignored.

        If cancelled while it waits, the key is removed all the same; another call waits for that.
        """
        self.pools.want()
        pending = {each: waits for each, waits in self._removals.items() if not all(wait.is_set() for wait in waits)}
        self._removals = pending
        entry, _ = self.table.resolve(name) or (None, 0)
        if entry is not None and entry.pool is not None:
            self.table.unbind(name)
            self._collect(entry)
            deallocation = self._deallocations.get(entry.cache_id)
            news = self._revoke(entry) if deallocation is None else [deallocation]
            pending[name] = [*pending.get(name, []), *news]
        for wait in pending.get(name, []):
            await wait.wait()

    async def unregister(self, cache_id: int, has_links: bool) -> None:
        """Forget a cache over the caller's memory. If cancelled while it waits, it is forgotten all the same."""
        entry = self.table.find(cache_id)
        if entry is not None and cache_id not in self._deallocations:
            if entry.pool is not None:
                raise ParamInvalid(f"cache {cache_id} was allocated: deallocate it")
            if entry.is_known and has_links:
                raise LLMException(
                    f"cache {cache_id} can be reached through links",
                    status_code=LLMStatusCode.LLM_EXIST_LINK,
                    hint="unlink_clusters() first",
                )
            if entry.is_known:  # a link that is made meanwhile does not include it
                self._transport.withdraw(entry.regions())
            self._start_deallocation(entry)
        if (deallocation := self._deallocations.get(cache_id)) is not None:
            await deallocation.wait()

    async def wait_usable(self, cache: Cache) -> None:
        """Wait until no lost peer can write into the cache any longer.

        Raises:
            ParamInvalid, CacheNotFound: as :meth:`local`.
            LLMException: if a peer may write for ever.
        """
        entry = self._own(cache, "cache")
        if entry is None:
            raise CacheNotFound(f"cache {cache.cache_id} is unknown here, or no longer known")
        while entry.is_left and not entry.is_poisoned:
            await entry.wait_change()
        if entry.is_poisoned:
            raise LLMException(f"cache {entry.cache_id}: the device never released its memory; never use it again")

    def end(self) -> None:
        """Wake callers that wait for a release, because the engine has ended.

        Callers' memory that the device never released is kept.
        """
        self.withheld.keep_stuck(self.table.entries())
        for deallocation in self._deallocations.values():
            deallocation.settled.set()

    def _start_deallocation(self, entry: Entry) -> None:
        entry.is_live = False
        deallocation = self._deallocations[entry.cache_id] = Deallocation(entry)
        # the outcome for callers if the engine ends before the task below does
        deallocation.error = LLMException(
            f"cache {entry.cache_id} was in use until the cluster was finalized",
            status_code=LLMStatusCode.LLM_ENGINE_FINALIZED,
        )

        async def leave() -> None:
            try:
                await self._give_back(entry, deallocation)
                deallocation.error = None
            except LLMException as error:
                deallocation.error = error
                self.withheld.lost("cache %d: %s", entry.cache_id, error)
            finally:
                if not entry.is_poisoned:
                    del self._deallocations[entry.cache_id]
                deallocation.settled.set()

        if not self._spawn(leave):
            deallocation.settled.set()

    @staticmethod
    def _revoke(entry: Entry) -> list[Signal]:
        return [holder.revoke(entry) for holder in list(entry.holders)]

    async def _give_back(self, entry: Entry, deallocation: Deallocation) -> None:
        """Wait until nothing touches a cache, then release its memory. A caller does not wait for withheld pages."""
        if entry.pool is not None:
            # A pool's cache is forgotten at once. A registered one stays known if the transport refuses to release it.
            self.table.remove(entry)
        while not entry.is_quiet and not entry.is_poisoned:
            self._revoke(entry)
            if entry.pool is not None and entry.is_released:
                deallocation.error = None
                deallocation.settled.set()
            await entry.wait_change()
        if entry.is_poisoned:
            raise LLMException(f"cache {entry.cache_id}: the device never released its memory; never use it again")
        if entry.pool is not None:
            await self._free(entry, entry.pool)
            return
        async with self._registering:
            try:
                await self._make_unknown(entry)
            except LLMException:
                entry.is_live, entry.epoch = True, self._transport.epoch
                raise
            self.table.remove(entry)
            entry.keep.clear()

    async def _free(self, entry: Entry, pages: PagePool) -> None:
        if self._fills_freed:
            await self._fill(entry)
        for address in entry.addresses:
            pages.free(address)
        self.pools.of(entry.placement).room.call()

    async def _fill(self, entry: Entry) -> None:
        """Fill freed memory, so that late reads show. It returns to the pool even if the device refuses."""
        try:
            await in_thread(self._device.fill, [(address, entry.nbytes) for address in entry.addresses], FREED_BYTE)
        except LLMException as error:
            logger.warning("cache %d: its freed memory keeps its contents: %s", entry.cache_id, error)

    # ---- looking into them ----

    def buffers(self, entry: Entry) -> list[Any]:
        """Return a writable buffer per tensor of an allocated cache, which cannot be deallocated while one is alive.

        Raises:
            ParamInvalid: if the memory is the caller's.
            FeatureNotEnabled: if the host cannot address it.
        """
        if entry.pool is None:
            raise ParamInvalid(f"cache {entry.cache_id} is in your own memory: read it there")
        return windows(entry, self.pools.of(entry.placement).memory)
