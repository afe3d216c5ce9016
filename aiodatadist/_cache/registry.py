"""The owner of this cluster's caches: makes them, answers for them, and frees their memory once nothing touches it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio

from aiodatadist._cache.deallocation import FREED_BYTE, Deallocation, Writes, fills_freed
from aiodatadist._cache.names import Name
from aiodatadist._cache.pool import PagePool, PoolUsage
from aiodatadist._cache.room_queue import RoomQueue
from aiodatadist._cache.table import CacheTable, Entry, LeaseHolder, check_desc
from aiodatadist._cache.windows import call_when_gone, windows
from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._concurrency.signal import Signal
from aiodatadist._config.llm_config import PoolConfig
from aiodatadist._counting import Incident, Incidents
from aiodatadist._device import Device, Memory
from aiodatadist._transport import Region, Transport
from aiodatadist._values.audience import EVERY_CLUSTER, Audience
from aiodatadist._values.descriptors import Cache, CacheDesc, CacheHome, Placement, forget_addresses
from aiodatadist.errors import CacheNotFound, FeatureNotEnabled, LLMException, LLMStatusCode, OutOfMemory, ParamInvalid

logger = logging.getLogger(__name__)

_kept: list[list[object]] = []
"""Callers' memory that a stopped peer or the device may still touch after this cluster was finalized. Never freed."""

Naming = Callable[[], dict[Name, int]]
"""Returns the names of a new cache, or raises. It is called at the moment when the cache is made."""


SMALLER = "make the pool smaller, or raise the limit that is named"


class _Pool:
    """A memory pool: one allocation, registered with the transport as a whole."""

    def __init__(self, pages: PagePool, memory: Memory, epoch: int) -> None:
        self.pages = pages
        self.room = RoomQueue(pages)
        self.memory = memory
        self.epoch = epoch


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
        self._incidents = incidents or Incidents()
        self.home: CacheHome = CacheHome(cluster_id)
        self.table: CacheTable = CacheTable(self.home)
        self._device = device
        self._transport = transport
        self._spawn = spawn
        self._fills_freed = fills_freed()
        self._registering = anyio.Lock()
        self._pools: dict[Placement, _Pool] = {}
        self._deallocations: dict[int, Deallocation] = {}
        self._removals: dict[Name, list[Deallocation | Signal]] = {}
        self._claims: dict[tuple[int, int], tuple[anyio.Lock, int]] = {}

    # ---- pools ----

    async def open_pool(self, placement: Placement, config: PoolConfig) -> None:
        """Allocate a pool's memory and register it with the transport.

        Raises:
            OutOfMemory: if the device, or the host, has less memory.
            FeatureNotEnabled: if this process may not allocate such memory.
        """
        try:
            memory = self._device.allocate(config.memory_size, placement)
        except FeatureNotEnabled as error:
            text = f"the {placement.name.lower()} pool: {error.args[0]}"
            raise FeatureNotEnabled(text, operation="init", hint="allow the call that is named") from error
        except LLMException as error:
            raise OutOfMemory(
                f"the {placement.name.lower()} pool: {error.args[0]}", operation="init", hint=SMALLER
            ) from error
        pages = PagePool(
            f"the {placement.name.lower()} pool",
            memory.address,
            config,
            lambda: self._pinned(placement),
            lambda: self._oldest_pin(placement),
        )
        await self._transport.register([Region(memory.address, memory.nbytes, placement)])
        self._pools[placement] = _Pool(pages, memory, self._transport.epoch)

    def _pinned(self, placement: Placement) -> tuple[int, int]:
        """Return the bytes of a pool that are in use, and how many of them are withheld."""
        pinned = self._pinned_entries(placement)
        withheld = [entry for entry in pinned if entry.is_withheld]
        return _bytes_of(pinned), _bytes_of(withheld)

    def _pinned_entries(self, placement: Placement) -> list[Entry]:
        deallocations = list(self._deallocations.values())  # a copy, in one step, because other threads call this, too
        entries = {*self.table.entries(), *(deallocation.entry for deallocation in deallocations)}
        return [
            entry for entry in entries if entry.placement is placement and entry.pool is not None and not entry.is_quiet
        ]

    def _oldest_pin(self, placement: Placement) -> str:
        entries = self._pinned_entries(placement)
        if not entries:
            return ""
        return f" (since the longest: {min(entries, key=lambda entry: entry.pinned_at).told_pins()})"

    def keep_pools(self) -> None:
        """Keep the pools' memory when the device is closed, because it may be touched for ever."""
        for pool in self._pools.values():
            self._device.mark_stuck(pool.memory.address, pool.memory.nbytes)

    def pool_usage(self) -> dict[Placement, PoolUsage]:
        """Return the usage of each pool."""
        return {placement: pool.pages.usage() for placement, pool in dict(self._pools).items()}

    def _pool_for(self, desc: CacheDesc) -> _Pool:
        pool = self._pools.get(desc.placement)
        if pool is not None:
            return pool
        self.want_pools()
        raise ParamInvalid(
            f"there is no memory pool for {desc.placement}",
            hint="set LLMConfig.mem_pool_cfg for device memory, host_mem_pool_cfg for host memory",
        )

    def want_pools(self) -> None:
        """Raise FeatureNotEnabled if there is no pool at all."""
        if not self._pools:
            raise FeatureNotEnabled("there is no memory pool", hint="set LLMConfig.mem_pool_cfg or host_mem_pool_cfg")

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

    def _pool_to_allocate(self, desc: CacheDesc, naming: Naming) -> _Pool:
        check_desc(desc)
        naming()
        return self._pool_for(desc)

    def _make(self, pool: _Pool, desc: CacheDesc, blocks: bool, naming: Naming) -> Cache | None:
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

    def end_allocating(self) -> None:
        """Let calls that wait for room try again, each in its turn: their naming refuses new caches now."""
        for pool in self._pools.values():
            pool.room.call()

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
        self.want_pools()
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

    def room_for(self, placement: Placement, nbytes: int) -> int:
        """Return how many allocations of ``nbytes`` each the pool has room for; 0 without a pool."""
        pool = self._pools.get(placement)
        return 0 if pool is None else pool.pages.room_for(nbytes)

    def _check_views(self, entry: Entry) -> None:
        if entry.views() is not None:
            raise ParamInvalid(
                f"cache {entry.cache_id} has arrays or tensors over its memory that are still alive",
                hint="drop them first",
            )

    def _collect(self, entry: Entry) -> None:
        """Release a cache if it has no references any longer."""
        if not entry.references and entry.cache_id not in self._deallocations:
            self._start_deallocation(entry)

    @staticmethod
    def has_keys(entry: Entry) -> bool:
        """Return True if its slots may have keys that pulls consume, now or later."""
        return not entry.blocks and entry.pool is not None

    def is_consumable(self, entry: Entry, name: Name, slot: int) -> bool:
        """Return True if a pull by this name may be the last one of a key."""
        return bool(self._bound(entry, name, slot))

    @staticmethod
    def _bound(entry: Entry, name: Name, slot: int) -> list[Name]:
        """Return the requests' keys for which a pull by this name counts."""
        if not CacheRegistry.has_keys(entry):
            return []
        if name.kind == "id":
            return [each for each, bound in entry.names.items() if bound == slot and each.kind == "request"]
        return [name] if name in entry.names and name.kind == "request" else []

    @asynccontextmanager
    async def claim(self, entry: Entry, slot: int) -> AsyncIterator[None]:
        """Let one pull at a time use a slot whose key it may consume, so that each key is consumed by one pull."""
        place = (entry.cache_id, slot)
        lock, users = self._claims.get(place, (anyio.Lock(), 0))
        self._claims[place] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._claims.pop(place)
            if users > 1:
                self._claims[place] = (lock, users - 1)

    def consumed(self, entry: Entry, name: Name, slot: int, tensors: range) -> None:
        """Note that a peer pulled these tensors of a slot: with the last of them a request's key is removed."""
        for each in self._bound(entry, name, slot):
            if entry.cover(each, tensors):
                self.table.unbind(each)
                self._collect(entry)

    async def remove_key(self, name: Name) -> None:
        """Unbind a key; on return peers have forgotten it. Unknown keys, and those of registered caches, are ignored.

        If cancelled while it waits, the key is removed all the same; another call waits for that.
        """
        self.want_pools()
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

    # ---- peers that are lost, and may still write ----

    def withhold(self, entries: Sequence[Entry], peer: LeaseHolder, writes: Writes) -> None:
        """Withhold caches into which a peer without a link may still write, because it was stopped while it wrote.

        They are not used, and their memory is not reused, until the peer has let go.
        """
        for entry in entries:
            entry.withhold(peer)
        if not self._spawn(partial(self._free_when_let_go, list(entries), peer, writes)):
            self._hold_on_to(entries, writes)

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

    async def _free_when_let_go(self, entries: list[Entry], peer: LeaseHolder, writes: Writes) -> None:
        try:
            await writes.wait_let_go()
        except LLMException as error:
            self._lost("%r may write for ever: %s", peer, error)
            for entry in entries:
                entry.poison()
        except BaseException:
            self._hold_on_to(entries, writes)
            raise
        else:
            told = "%r has let go of %d caches", peer, len(entries)
            self._incidents.add(Incident.MEMORY_RETURNED, logger, *told, level=logging.INFO)
            for entry in entries:
                entry.drop_holder(peer)

    def _hold_on_to(self, entries: Sequence[Entry], writes: Writes) -> None:
        """Keep the memory, because the cluster is finalized before the peer let go.

        A pool's pages go with the pool, and no other memory is in their place while the peer copies there. The caller's
        memory is kept alive: until the peer has let go of the device, or as long as the process lives if it does not hold it.
        """
        writes.abandon()
        for entry in entries:
            if entry.pool is None:
                if not self._device.keep(entry.keep):
                    _kept.append(entry.keep)
                words = "cache %d: a peer that was stopped while it wrote there may continue; do not use its memory"
                self._lost(words, entry.cache_id)

    def _lost(self, words: str, *args: object) -> None:
        self._incidents.add(Incident.MEMORY_LOST, logger, words, *args, level=logging.ERROR)

    def end(self) -> None:
        """Wake callers that wait for a release, because the engine has ended.

        Callers' memory that the device never released is kept.
        """
        for entry in self.table.entries():
            if entry.pool is None and any(self._device.is_stuck(r.address, r.nbytes) for r in entry.regions()):
                _kept.append(entry.keep)
                self._lost("cache %d: the device never released its memory; do not use it", entry.cache_id)
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
                self._lost("cache %d: %s", entry.cache_id, error)
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
        self._pools[entry.placement].room.call()

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
        return windows(entry, self._pools[entry.placement].memory)


def _bytes_of(entries: Sequence[Entry]) -> int:
    return sum(entry.nbytes * len(entry.addresses) for entry in entries)
