"""A registered KV cache, as the demo's model sees it.

The model computes on the host. softnpu's devices have memory that the host can address, so it computes in the cache itself.
An NPU's is out of its reach, and out of a peer's reach is, over HCCS, the host's: there the model computes in pinned memory,
and each layer is copied to the cache in DEVICE memory, or from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio.to_thread
import numpy as np

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, CacheManager, DataType, LLMDataDist, Placement, empty
from aiodatadist.testing.small_model import Array, ModelConfig, blocks_for

PAGE = 2 << 20
"""The alignment of tensors in bytes: over HCCS every tensor must start at a page."""

CONFIG = ModelConfig()


@dataclass(frozen=True)
class LayerCopy:
    """Keys and values of one layer: the same blocks in memory of the host and of the device."""

    host: Cache
    device: Cache


@dataclass(frozen=True)
class Kv:
    """A blocks cache that the library knows, the same memory as the model sees it, and the blocks of one sequence.

    Attributes:
        copies: a copy of each layer if the model does not see the cache itself; otherwise empty.
    """

    manager: CacheManager
    cache: Cache
    tensors: list[Array]
    block_table: list[int]
    copies: list[LayerCopy] = field(default_factory=list)

    async def publish(self, layers: Sequence[int]) -> None:
        """Copy what the model wrote from pinned memory to the cache."""
        for copy in self._copies_of(layers):
            await self.manager.swap_blocks(copy.host, copy.device, self._same)

    async def fetch(self, layers: Sequence[int]) -> None:
        """Copy what arrived in the cache to the memory that the model sees."""
        for copy in self._copies_of(layers):
            await self.manager.swap_blocks(copy.device, copy.host, self._same)

    def _copies_of(self, layers: Sequence[int]) -> list[LayerCopy]:
        return [self.copies[layer] for layer in layers] if self.copies else []

    @property
    def _same(self) -> dict[int, int]:
        return {block: block for block in self.block_table}

    async def digest(self, blocks: Sequence[int]) -> str:
        """Return a hash over these blocks of all tensors, in this order."""
        return await anyio.to_thread.run_sync(self._digest, blocks)

    def _digest(self, blocks: Sequence[int]) -> str:
        state = hashlib.blake2b(digest_size=16)
        for tensor in self.tensors:
            state.update(np.take(tensor, blocks, axis=0).data)
        return state.hexdigest()


@asynccontextmanager
async def open_kv(datadist: LLMDataDist, cluster_id: int, tokens: int, seed: int) -> AsyncIterator[Kv]:
    """Open registered KV memory for ``tokens`` tokens. There are more blocks than needed, and a sequence lies scattered."""
    needed = blocks_for(tokens)
    num_blocks = needed + needed // 4 + 1
    manager, key = datadist.cache_manager, BlocksCacheKey(cluster_id)
    tensors = await anyio.to_thread.run_sync(allocate_tensors, datadist, num_blocks)
    table = np.random.default_rng((seed, cluster_id)).permutation(num_blocks)[:needed].tolist()
    if datadist.runtime.is_soft:
        cache = await manager.register_blocks_cache(_desc(num_blocks), tensors, key)
        yield Kv(manager, cache, tensors, table)
    else:
        on_device = await anyio.to_thread.run_sync(_allocate_on_device, datadist, num_blocks)
        cache = await manager.register_blocks_cache(_desc(num_blocks), on_device, key)
        yield Kv(manager, cache, tensors, table, await _copies(manager, num_blocks, tensors, on_device))


async def _copies(
    manager: CacheManager, num_blocks: int, host: Sequence[Array], device: Sequence[int]
) -> list[LayerCopy]:
    copies = []
    on_host, on_device = (_desc(num_blocks, place, 2) for place in (Placement.HOST, Placement.DEVICE))
    for i in range(0, CONFIG.num_tensors, 2):
        target = await manager.register_blocks_cache(on_device, list(device[i : i + 2]), remote_accessible=False)
        starts = [tensor.ctypes.data for tensor in host[i : i + 2]]
        copies.append(LayerCopy(Cache.create_cpu_cache(on_host, starts), target))
    return copies


def _desc(num_blocks: int, place: Placement = Placement.DEVICE, tensors: int = CONFIG.num_tensors) -> CacheDesc:
    return CacheDesc(tensors, CONFIG.cache_shape(num_blocks), DataType.DT_FLOAT, place)


def allocate_tensors(datadist: LLMDataDist, num_blocks: int) -> list[Array]:
    """Allocate a cache of zeros that the host can address: on softnpu its peers can, too; on an NPU it is pinned.

    Every page has been touched, so that no transfer pays for that.
    """
    place = Placement.DEVICE if datadist.runtime.is_soft else Placement.HOST
    shape, device_id = CONFIG.cache_shape(num_blocks), datadist.device.index
    tensors = [empty(shape, np.float32, placement=place, device_id=device_id) for _ in range(CONFIG.num_tensors)]
    for tensor in tensors:
        tensor.fill(0)
    return tensors


def _allocate_on_device(datadist: LLMDataDist, num_blocks: int) -> list[int]:
    """Allocate an NPU's memory for a cache, and return where its tensors start. The library frees it when it closes."""
    stride = -(-num_blocks * CONFIG.block_bytes // PAGE) * PAGE
    memory = datadist.device.allocate(CONFIG.num_tensors * stride)
    return [memory.address + index * stride for index in range(CONFIG.num_tensors)]
