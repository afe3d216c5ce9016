"""CacheManager: register caches, move them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio

from aiodatadist import checks
from aiodatadist.cache.plan import Layers, blocks_to_blocks, slot_to_blocks, slot_to_slot
from aiodatadist.cache.table import CacheTable, Entry
from aiodatadist.cache.task import CacheTask
from aiodatadist.descriptors import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    Placement,
    check_cache_key,
)
from aiodatadist.errors import CacheNotFound, LLMException, LLMStatusCode, ParamInvalid

if TYPE_CHECKING:
    from aiodatadist.cache.catalogue import RemoteCache
    from aiodatadist.engine import Engine
    from aiodatadist.layout import Grid
    from aiodatadist.link import Link
    from aiodatadist.wire.messages import CacheEntry

Key = BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex


class CacheManager:
    """Obtained from ``LLMDataDist.cache_manager``.

    Memory that peers shall reach is registered before the link is made. Registered memory stays the caller's: it has to
    stay where it is until :meth:`unregister_cache` returned.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._table = CacheTable()
        self._registering = anyio.Lock()

    # ---- registration ----

    async def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: Sequence[int],
        cache_keys: Sequence[CacheKey] = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Make a contiguous cache of memory that the caller owns.

        Args:
            addrs: start of each tensor, ``cache_desc.size`` bytes each.
            cache_keys: the i-th names batch slot i for peers; placeholders name nothing.
            remote_accessible: whether it takes part in transfers with peers, as source or destination. By default device
                memory does, host memory does not.

        Raises:
            TypeError, ValueError, ParamInvalid: an argument is wrong. Nothing was registered.
            LLMException: the transport refused the memory. Nothing was registered.
        """
        keys = checks.sequence(cache_keys, "cache_keys", CacheKey)
        accessible = self._check_registration(cache_desc, addrs, remote_accessible)
        async with self._registering:
            entry = self._table.add_contiguous(cache_desc, addrs, keys, accessible)
            return await self._register(entry)

    async def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: Sequence[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Make a blocks cache of memory that the caller owns: ``cache_desc.shape[0]`` blocks in each tensor.

        Args and errors as :meth:`register_cache`. Without a key it can be a destination, but peers cannot name it.
        """
        if blocks_cache_key is not None:
            checks.instance(blocks_cache_key, "blocks_cache_key", BlocksCacheKey)
        model_id = None if blocks_cache_key is None else blocks_cache_key.model_id
        accessible = self._check_registration(cache_desc, addrs, remote_accessible)
        async with self._registering:
            entry = self._table.add_blocks(cache_desc, addrs, model_id, accessible)
            return await self._register(entry)

    def _check_registration(self, desc: CacheDesc, addrs: Sequence[int], remote_accessible: bool | None) -> bool:
        checks.instance(desc, "cache_desc", CacheDesc)
        checks.sequence(addrs, "addrs", int)
        if not addrs or len(addrs) != desc.num_tensors:
            raise ParamInvalid(f"{len(addrs)} addrs for {desc.num_tensors} tensors: they have to be as many, and some")
        for i, address in enumerate(addrs):
            if checks.integer(address, f"addrs[{i}]", checks.UINT64) == 0:
                raise ParamInvalid(f"addrs[{i}] is 0: no tensor starts there")
            if address + desc.size > 2**64:
                raise ParamInvalid(f"addrs[{i}] is {address:#x}: {desc.size} bytes from there leave the address space")
        if remote_accessible is None:
            return desc.placement is Placement.DEVICE
        return checks.instance(remote_accessible, "remote_accessible", bool)

    async def _register(self, entry: Entry) -> Cache:
        """Register a new entry's memory, all of it or nothing; the lock is held."""
        try:
            await self._engine.transport.register(list(entry.regions()))
        except BaseException:
            self._table.remove(entry.cache.cache_id)
            raise
        entry.is_registered = True
        return entry.cache

    async def unregister_cache(self, cache_id: int) -> None:
        """Forget a registered cache; afterwards its memory is the caller's again. An unknown id is fine.

        Waits for transfers of this cluster that use it; no new one starts meanwhile. If cancelled while it waits, the cache
        is as it was.

        Raises:
            LLMException: ``LLM_EXIST_LINK``: peers may reach it through a link, or one that is being made; unlink first.
                ``LLM_FAILED``: the device never let go of it, its memory must not be used again.
        """
        checks.integer(cache_id, "cache_id", checks.INT64)
        async with self._registering:
            entry = self._table.find(cache_id)
            if entry is None:
                return
            if entry.remote_accessible and self._engine.has_links:
                raise LLMException(
                    f"cache {cache_id} can be reached through links",
                    status_code=LLMStatusCode.LLM_EXIST_LINK,
                    hint="unlink_clusters() first",
                )
            entry.is_registered = False  # from here on no peer is told of it, and no transfer starts
            try:
                await entry.wait_idle()
                if entry.is_poisoned:
                    raise LLMException(f"cache {cache_id}: the device never let go of its memory; never use it again")
                await self._engine.transport.unregister(list(entry.regions()))
            except LLMException:
                entry.is_registered = True
                raise
            except asyncio.CancelledError:
                entry.is_registered = entry.leases > 0  # cancelled while waiting for them; else it was completed
                if not entry.is_registered:
                    self._table.remove(cache_id)
                raise
            self._table.remove(cache_id)

    def published(self) -> list[CacheEntry]:
        """What a new peer is told."""
        return self._table.published()

    # ---- pulling ----

    def pull_blocks(
        self,
        src_cache_key: Key,
        dst_cache: Cache,
        src_blocks: Sequence[int] = (),
        dst_blocks: Sequence[int] = (),
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> CacheTask:
        """Read a peer's blocks into local ones: ``src_blocks[i]`` goes to ``dst_blocks[i]``, in every tensor.

        One-sided: the peer's CPU takes no part. With a :class:`CacheKey` or :class:`CacheKeyByIdAndIndex` the source is a
        batch slot of a contiguous cache, cut into as many chunks as ``dst_blocks``; ``src_blocks`` is empty then. Blocks
        can be pulled any number of times.

        Args:
            src_layer_range, dst_layer_range: half-open, step 1; all layers if omitted.
            tensor_num_per_layer: tensors in a layer, where a range is given.

        Returns:
            The transfer, already started. It has ``sync_kv_timeout`` from when it begins to run.

        Raises:
            TypeError, ValueError, ParamInvalid: an argument is wrong, or the two caches do not fit together.
            CacheNotFound: the local cache or the peer's is not known.
            NotLinked, PeerLost, LinkClosed: there is no link to that cluster (any more).

        In all these cases nothing was started. While it runs and after it failed or was cancelled, what the destination
        blocks hold is undefined; all other blocks are untouched.
        """
        checks.instance(src_cache_key, "src_cache_key", (BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex))
        entry = self._local(dst_cache, "dst_cache")
        if not dst_cache.is_blocks_cache:
            raise ParamInvalid("dst_cache is a contiguous cache: pull_blocks fills blocks, use pull_cache")
        if not len(dst_blocks):
            raise ParamInvalid("dst_blocks is empty: there is nothing to pull into")
        layers = _layers(src_layer_range, dst_layer_range, tensor_num_per_layer)
        link, remote = self._remote(src_cache_key)
        if isinstance(src_cache_key, BlocksCacheKey):
            if not len(src_blocks):
                raise ParamInvalid("src_blocks is empty: with a BlocksCacheKey it says which blocks to pull")
            grid = blocks_to_blocks(entry, remote, src_blocks, dst_blocks, layers)
        else:
            if len(src_blocks):
                raise ParamInvalid(f"src_blocks has {len(src_blocks)} numbers: a contiguous source has no blocks")
            grid = slot_to_blocks(entry, remote, dst_blocks, layers)
        return self._pull("pull_blocks", link, grid, entry)

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> CacheTask:
        """Read a batch slot of a peer's contiguous cache into a slot of a local one, in every tensor.

        One-sided: the peer's CPU takes no part, and the key is not consumed.

        Args:
            batch_index: the local slot.
            size: bytes of each tensor, from the start of the slot; -1 is the whole local slot.

        Layers, return value, errors, failure and cancellation as :meth:`pull_blocks`.
        """
        checks.instance(cache_key, "cache_key", (CacheKey, CacheKeyByIdAndIndex))
        entry = self._local(cache, "cache")
        checks.integer(batch_index, "batch_index", checks.UINT32)
        if checks.integer(size, "size", checks.INT64) != -1 and size <= 0:
            raise ParamInvalid(f"size is {size}: it has to be -1 or above 0")
        if cache.is_blocks_cache:
            raise ParamInvalid("cache is a blocks cache: pull_cache fills a batch slot, use pull_blocks")
        layers = _layers(src_layer_range, dst_layer_range, tensor_num_per_layer)
        link, remote = self._remote(cache_key)
        return self._pull("pull_cache", link, slot_to_slot(entry, remote, batch_index, size, layers), entry)

    def _local(self, cache: Cache, name: str) -> Entry:
        checks.instance(cache, name, Cache)
        entry = self._table.find(cache.cache_id)
        if entry is None:
            raise CacheNotFound(f"{name} {cache.cache_id} is not registered here (any more)")
        if not entry.is_registered:
            raise CacheNotFound(f"{name} {cache.cache_id} is being unregistered")
        if entry.is_poisoned:
            raise CacheNotFound(f"{name} {cache.cache_id} is lost: the device never let go of its memory")
        if not entry.remote_accessible:
            raise ParamInvalid(
                f"{name} {cache.cache_id} is not remote accessible: register it with remote_accessible=True"
            )
        return entry

    def _remote(self, key: Key) -> tuple[Link, RemoteCache]:
        if key.cluster_id == self._engine.cluster_id:
            raise ParamInvalid(f"{key} names this cluster itself: pull from a peer, or copy")
        if isinstance(key, CacheKey):
            check_cache_key(key)
        link = self._engine.find_link(key.cluster_id)
        link.check_ready()
        return link, link.catalogue.find(key)

    def _pull(self, operation: str, link: Link, grid: Grid, entry: Entry) -> CacheTask:
        return CacheTask(operation, link.cluster_id, link.get(grid, entry, self._engine.timeout))


def _layers(src: range | None, dst: range | None, tensors_per_layer: int) -> Layers:
    for value, name in ((src, "src_layer_range"), (dst, "dst_layer_range")):
        if value is not None:
            checks.instance(value, name, range)
    if checks.integer(tensors_per_layer, "tensor_num_per_layer", checks.UINT32) == 0:
        raise ParamInvalid("tensor_num_per_layer is 0: a layer has at least one tensor")
    return Layers(src, dst, tensors_per_layer)
