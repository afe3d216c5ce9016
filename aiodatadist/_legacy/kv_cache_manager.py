"""The KvCacheManager: v1's way to make, move and release caches of device memory."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import anyio

from aiodatadist._cache.pool import PoolUsage
from aiodatadist._cache.registry import CacheRegistry
from aiodatadist._cache.table import Entry
from aiodatadist._cache.task import CacheTask
from aiodatadist._cache_manager import CacheManager
from aiodatadist._legacy.kv_cache import KvCache, want_device
from aiodatadist._legacy.statuses import KvTask, v1_errors
from aiodatadist._legacy.tensor import Tensor, TensorDesc
from aiodatadist._legacy.v1_engine import V1Engine
from aiodatadist._values import checks
from aiodatadist._values.descriptors import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMRole,
    Placement,
)
from aiodatadist._values.grid import Grid
from aiodatadist._values.transfer_config import TransferConfig
from aiodatadist.errors import LLMException, ParamInvalid, TransferTimeout

if TYPE_CHECKING:
    from aiodatadist._cluster.engine import Engine

MAX_BLOCK: Final = 2**31
"""Limit of the bytes of a block that is pulled; it must be below."""


class KvCacheManager:
    """The caches and transfers of a v1 cluster, from ``LLMDataDist.kv_cache_manager``: device memory of one device.

    A contiguous cache is cut into batch slots, a blocks cache into blocks. PROMPT has keys and transfers, DECODER
    pulls; calls of the other role raise ``ParamInvalid``. Calls that move bytes return a
    :class:`~aiodatadist.CacheTask` that has started, with v1's statuses. ``sync_kv_timeout`` limits it, and
    deallocation, too: ``LLM_WAIT_PROCESS_TIMEOUT``. After a timeout the link stays usable.

    A link does one thing at a time: a pull, a transfer, ``check_link_status`` or ``unlink_clusters`` beside another of
    them, here or at the peer, raises ``LLM_LINK_BUSY``.
    """

    def __init__(self, llm_engine: Engine, role: LLMRole) -> None:
        self._engine = llm_engine
        self._v1_engine = V1Engine(llm_engine, role)
        self._manager = CacheManager(llm_engine, llm_engine.timeout)

    def is_initialized(self) -> bool:
        """Return False once its LLMDataDist is being finalized: then nothing else works."""
        try:
            self._engine.check_running()
        except LLMException:
            return False
        return True

    @property
    def _place(self) -> tuple[asyncio.AbstractEventLoop, CacheRegistry]:
        """The event loop and the registry that release caches."""
        return self._engine.resident.loop, self._v1_engine.registry

    # ---- making caches ----

    async def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> KvCache:
        """Allocate a contiguous cache from the pool. Contents are undefined; tensors begin at multiples of 512 bytes.

        Args:
            cache_keys: for PROMPT only. The i-th names batch slot i for peers; placeholders name nothing. A pull by a
                request's key consumes the key. The memory is released with the last of its keys and its id.

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument is wrong, a key is bound already, the role has no keys,
                or the cache is not on the device.
            FeatureNotEnabled: if there is no memory pool.
            OutOfMemory: with ``LLM_DEVICE_OUT_OF_MEMORY`` if the pool has no room. Nothing was allocated.
        """
        want_device(cache_desc)
        if checks.sequence(cache_keys, "cache_keys", CacheKey):
            self._v1_engine.want_role(LLMRole.PROMPT, "cache_keys")
        with v1_errors():
            return self._shown(await self._manager.allocate_cache(cache_desc, cache_keys))

    async def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None
    ) -> KvCache:
        """Allocate a cache of ``cache_desc.shape[0]`` blocks per tensor from the pool.

        Errors as in :meth:`allocate_cache`.

        Args:
            blocks_cache_key: not for DECODER. Without one peers cannot pull from the cache.
        """
        want_device(cache_desc)
        if blocks_cache_key is not None and self._v1_engine.role is LLMRole.DECODER:
            raise ParamInvalid(f"blocks_cache_key is {blocks_cache_key}: {self._v1_engine.role} has no keys")
        with v1_errors():
            return self._shown(await self._manager.allocate_blocks_cache(cache_desc, blocks_cache_key))

    def _shown(self, cache: Cache) -> KvCache:
        addresses = [cache.tensor_addrs]
        return KvCache(cache.cache_id, cache.cache_desc, addresses, self, is_blocks_cache=cache.is_blocks_cache)

    # ---- giving them up ----

    async def deallocate_cache(self, cache: KvCache) -> None:
        """Drop the id of a cache of either kind. While keys are bound to the cache, peers can pull by them.

        Waits until no transfer and no peer uses the memory. If that takes longer than ``sync_kv_timeout``, or this is
        cancelled, the memory is released later. A cache that is unknown or deallocated is ignored.

        Raises:
            ParamInvalid: if arrays over its memory are alive.
            TransferTimeout: with ``LLM_WAIT_PROCESS_TIMEOUT``.
        """
        checks.instance(cache, "cache", KvCache)
        if cache.cache_id == -1:
            return
        give_back = self._manager.deallocate_cache
        if cache.is_blocks_cache:
            give_back = self._manager.deallocate_blocks_cache
        async with self._in_time("deallocate_cache"):
            await give_back(cache)

    async def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key from its slot. For PROMPT. Unknown keys are ignored.

        Waits and raises like :meth:`deallocate_cache`.
        """
        self._v1_engine.want_role(LLMRole.PROMPT, "remove_cache_key")
        async with self._in_time("remove_cache_key"):
            await self._manager.remove_cache_key(cache_key)

    @asynccontextmanager
    async def _in_time(self, what: str) -> AsyncIterator[None]:
        self._v1_engine.check_here()
        with anyio.move_on_after(self._engine.timeout) as limit, v1_errors():
            yield
        if limit.cancelled_caught:
            with v1_errors():
                raise TransferTimeout(f"not done within {self._engine.timeout:g} s", operation=what)

    # ---- pulling ----

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        kv_cache: KvCache,
        batch_index: int = 0,
        size: int = -1,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_cache_offset: int | None = None,
        dst_cache_offset: int | None = None,
        tensor_num_per_layer: int = 2,
    ) -> CacheTask:
        """Have a peer write a batch slot of its contiguous cache into a local slot, in every tensor. For DECODER.

        A request's key is consumed once every tensor of its slot was pulled by it, unless an offset was given. A prefix
        is never consumed.

        Args:
            batch_index: the local slot.
            size: bytes of each tensor; -1 for all that the local slot has behind ``dst_cache_offset``.
            src_layer_range, dst_layer_range: half-open, step 1; all layers if omitted.
            src_cache_offset, dst_cache_offset: bytes to skip at the start of the peer's slot, and of the local one.
            tensor_num_per_layer: tensors in a layer, if a range is given.

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument or the role is wrong.
            CacheNotFound: if the local cache is unknown.
            NotLinked, PeerLost, LinkClosed: if the cluster is not linked, or no longer.
            LLMException: with ``LLM_LINK_BUSY`` if the link is in use.

        Awaiting the task raises CacheNotFound (the peer has no such key or slot), ParamInvalid (the caches do not fit
        together), ``LLM_LINK_BUSY``, ``LLM_WAIT_PROCESS_TIMEOUT``, PeerLost and the like. After a failure or a
        cancellation the contents of the destination slot are undefined, and the key is as before; but a pull that is
        cancelled once everything has arrived has consumed the key.
        """
        self._v1_engine.want_role(LLMRole.DECODER, "pull_cache")
        checks.instance(cache_key, "cache_key", (CacheKey, CacheKeyByIdAndIndex))
        checks.instance(kv_cache, "kv_cache", KvCache)
        return self._exclusive(
            "pull_cache",
            [cache_key.cluster_id],
            lambda: self._manager.pull_cache(
                cache_key,
                kv_cache,
                batch_index,
                size,
                src_layer_range=src_layer_range,
                dst_layer_range=dst_layer_range,
                src_cache_offset=src_cache_offset,
                dst_cache_offset=dst_cache_offset,
                tensor_num_per_layer=tensor_num_per_layer,
            ),
        )

    def pull_blocks(
        self,
        prompt_cache_key: BlocksCacheKey,
        decoder_kv_cache: KvCache,
        prompt_blocks: list[int],
        decoder_blocks: list[int],
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> CacheTask:
        """Have a peer write its block ``prompt_blocks[i]`` to ``decoder_blocks[i]``, in every tensor. For DECODER.

        Both are non-empty lists of the same length. A block has fewer than 2**31 bytes. Everything else is as in
        :meth:`pull_cache`.
        """
        self._v1_engine.want_role(LLMRole.DECODER, "pull_blocks")
        checks.instance(prompt_cache_key, "prompt_cache_key", BlocksCacheKey)
        checks.instance(decoder_kv_cache, "decoder_kv_cache", KvCache)
        for blocks, name in ((prompt_blocks, "prompt_blocks"), (decoder_blocks, "decoder_blocks")):
            if not checks.instance(blocks, name, list):
                raise ParamInvalid(f"{name} is empty: there is nothing to pull")
        if decoder_kv_cache.cache_desc.stride >= MAX_BLOCK:
            raise ParamInvalid(f"a block has {decoder_kv_cache.cache_desc.stride} bytes: must be below {MAX_BLOCK}")
        return self._exclusive(
            "pull_blocks",
            [prompt_cache_key.cluster_id],
            lambda: self._manager.pull_blocks(
                prompt_cache_key,
                decoder_kv_cache,
                prompt_blocks,
                decoder_blocks,
                src_layer_range=src_layer_range,
                dst_layer_range=dst_layer_range,
                tensor_num_per_layer=tensor_num_per_layer,
            ),
        )

    def _exclusive(self, what: str, cluster_ids: Sequence[int], start: Callable[[], CacheTask]) -> KvTask:
        """Start a transfer that has these links to itself until it ends."""
        self._v1_engine.check_here()
        self._v1_engine.link_locks.take(cluster_ids, what)
        try:
            with v1_errors():
                task = start()
        except BaseException:
            self._v1_engine.link_locks.give_back(cluster_ids)
            raise
        return self._begun(task, lambda: self._v1_engine.link_locks.give_back(cluster_ids))

    def _begun(self, task: CacheTask, ended: Callable[[], object] | None = None) -> KvTask:
        made = KvTask(task, ended)
        self._v1_engine.watch(made)
        return made

    # ---- layer by layer ----

    def transfer_cache_async(
        self,
        src_cache: KvCache,
        layer_synchronizer: Any,
        transfer_configs: Sequence[TransferConfig],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Write a cache to one or more peers, each layer as soon as it is ready. For PROMPT.

        Slots go to slots, and blocks to blocks. It works like :meth:`aiodatadist.CacheManager.transfer_cache_async` in
        request/response mode, and raises ``LLM_LINK_BUSY`` if one of the links is in use.
        """
        self._v1_engine.want_role(LLMRole.PROMPT, "transfer_cache_async")
        checks.instance(src_cache, "src_cache", KvCache)
        configs = checks.sequence(transfer_configs, "transfer_configs", TransferConfig)
        if dst_block_indices and not src_cache.is_blocks_cache:
            raise ParamInvalid("dst_block_indices with a contiguous source: slots go to slots, and blocks to blocks")
        return self._exclusive(
            "transfer_cache_async",
            sorted({config.dst_cluster_id for config in configs}),
            lambda: self._manager.transfer_cache_async(
                src_cache, layer_synchronizer, configs, src_block_indices, dst_block_indices, dst_block_memory_size
            ),
        )

    # ---- copying within this cluster ----

    def copy_cache(
        self,
        dst: KvCache,
        src: KvCache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> CacheTask:
        """Copy one batch slot to another, in every tensor, within this cluster.

        Args:
            offset: bytes to skip at the start of both slots.
            size: bytes of each tensor; -1 for all that the source has from ``offset`` on.
            req_id: for diagnosis only.

        Raises:
            CacheNotFound: if a cache is unknown, or no longer known.
            TypeError, ValueError, ParamInvalid: if an argument is wrong, or the bytes do not fit. Nothing was started.

        Awaiting the task raises ``LLM_WAIT_PROCESS_TIMEOUT`` after ``sync_kv_timeout``.
        """
        checks.instance(dst, "dst", KvCache)
        checks.instance(src, "src", KvCache)
        with v1_errors():
            return self._begun(
                self._manager.copy_cache(dst, src, dst_batch_index, src_batch_index, offset, size, req_id)
            )

    def copy_blocks(self, cache: KvCache, copy_block_info: Mapping[int, Sequence[int]]) -> CacheTask:
        """Copy block ``src`` to each of ``copy_block_info[src]`` in one blocks cache. Errors as in :meth:`copy_cache`."""
        checks.instance(cache, "cache", KvCache)
        with v1_errors():
            return self._begun(self._manager.copy_blocks(cache, copy_block_info))

    def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: Mapping[int, int]) -> CacheTask:
        """Copy blocks from host to device (swap in) or from device to host (swap out): ``src`` to ``src_to_dst[src]``.

        One of the two is a ``KvCache.create_cpu_cache(...)`` of one device, whose memory must stay until the task is
        done. Errors as in :meth:`copy_cache`.
        """
        for cache, name in ((src, "src"), (dst, "dst")):
            devices = len(checks.instance(cache, name, KvCache).per_device_tensor_addrs)
            if cache.cache_id == -1 and devices != 1:
                raise ParamInvalid(f"{name} has addresses for {devices} devices: this cluster has 1")
        with v1_errors():
            return self._begun(self._manager.swap_blocks(src, dst, src_to_dst))

    # ---- looking into them ----

    async def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """Return a copy of one tensor of a cache in host memory, as a list of one, because there is one device.

        Raises:
            TypeError, ValueError, ParamInvalid: if there is no such tensor.
            CacheNotFound: if the cache is unknown, or no longer known.
            TransferTimeout: with ``LLM_WAIT_PROCESS_TIMEOUT``.
        """
        checks.instance(cache, "cache", KvCache)
        checks.integer(tensor_index, "tensor_index", checks.INT32)
        self._v1_engine.check_here()
        entry = self._v1_engine.registry.local(cache, "cache")
        if not 0 <= tensor_index < len(entry.addresses):
            raise ParamInvalid(f"tensor_index is {tensor_index}: the cache has {len(entry.addresses)} tensors")
        desc = cache.cache_desc
        memory = self._engine.device.allocate(entry.nbytes, Placement.HOST)
        try:
            await self._copy_out(entry, tensor_index, memory.address)
            return [await Tensor.copied(memory, TensorDesc(desc.data_type, list(desc.shape)))]
        finally:
            with self._engine.device.current():
                memory.free()  # does nothing if the device did not release it

    async def _copy_out(self, entry: Entry, tensor_index: int, address: int) -> None:
        nbytes, first = entry.nbytes, array("Q", [0])
        flat = CacheDesc(1, [nbytes], DataType.DT_UINT8, Placement.HOST)
        host = Entry(Cache(-1, flat, [address], False), False, {}, None)
        source = array("Q", [entry.addresses[tensor_index]])
        grid = Grid(array("Q", [address]), source, first, first, nbytes, nbytes, nbytes, nbytes)
        transfer = self._engine.local_copies.start(entry, host, grid, self._engine.timeout)
        self._engine.totals.begun("get_cache_tensors", transfer)
        await KvTask(CacheTask("get_cache_tensors", self._engine.cluster_id, transfer, self._engine.check_here))

    def arrays(self, cache: KvCache) -> list[Any]:
        """Return a numpy array over each tensor, without a copy: see :meth:`aiodatadist.CacheManager.arrays`."""
        return self._manager.arrays(checks.instance(cache, "cache", KvCache))

    def tensors(self, cache: KvCache) -> list[Any]:
        """Return a torch tensor over each tensor, without a copy: see :meth:`aiodatadist.CacheManager.tensors`."""
        return self._manager.tensors(checks.instance(cache, "cache", KvCache))

    def pool_usage(self) -> PoolUsage | None:
        """Return total, free, largest and pinned bytes of the memory pool, or None without one."""
        return self._manager.pool_usage().get(Placement.DEVICE)

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """Raise ParamInvalid unless exactly one of ``req_id`` and ``prefix_id`` is valid."""
        CacheManager.check_cache_key(cache_key)
