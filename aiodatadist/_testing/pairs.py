"""Clusters with memory, and two of them linked, in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiodatadist._cache_manager import CacheManager
from aiodatadist._cluster.engine import Engine
from aiodatadist._config.llm_config import LLMConfig
from aiodatadist._datadist import LLMDataDist
from aiodatadist._device import Memory
from aiodatadist._testing.faults import transport_of_run
from aiodatadist._testing.patterns import stamp
from aiodatadist._transport.link_kind import may_use_hccs
from aiodatadist._values.cluster_info import LLMClusterInfo
from aiodatadist._values.descriptors import BlocksCacheKey, Cache, CacheDesc, CacheKey, LLMRole, Placement
from aiodatadist.errors import LLMStatusCode

PAGE, HUGE_PAGE = 4096, 2 << 20
"""Bytes of a page. If links may be over HCCS, each tensor starts at a page, or in larger memory at a huge page."""


@dataclass
class Cluster:
    """An initialised LLMDataDist and the caches that were made for it, each stamped with its own pattern."""

    datadist: LLMDataDist
    memories: dict[int, Memory] = field(default_factory=dict)

    async def blocks(self, desc: CacheDesc, model_id: int | None = 0, **audience: Any) -> Cache:
        """Allocate memory for a blocks cache, and register it under a model id, with ``readers`` and ``writers`` if given."""
        memory, addresses = self._allocate(desc)
        key = None if model_id is None else BlocksCacheKey(self.datadist.cluster_id, model_id)
        cache = await self.datadist.cache_manager.register_blocks_cache(desc, addresses, key, True, **audience)
        return self._keep(cache, memory)

    async def contiguous(self, desc: CacheDesc, keys: Sequence[CacheKey] = ()) -> Cache:
        """Allocate memory for a contiguous cache, and register it under keys."""
        memory, addresses = self._allocate(desc)
        cache = await self.datadist.cache_manager.register_cache(desc, addresses, keys, True)
        return self._keep(cache, memory)

    def _allocate(self, desc: CacheDesc) -> tuple[Memory, list[int]]:
        placement = Placement.DEVICE if desc.placement is Placement.DEVICE else Placement.HOST
        pages = may_use_hccs(self.datadist.device.runtime) and desc.num_tensors > 1
        page = PAGE if (desc.size + PAGE) * desc.num_tensors < HUGE_PAGE else HUGE_PAGE
        apart = -(-desc.size // page) * page if pages else desc.size
        memory = self.datadist.device.allocate(apart * desc.num_tensors, placement)
        return memory, [memory.address + i * apart for i in range(desc.num_tensors)]

    def _keep(self, cache: Cache, memory: Memory) -> Cache:
        self.memories[cache.cache_id] = memory
        stamp(memory, cache, self.datadist.cluster_id)
        return cache

    def memory(self, cache: Cache) -> Memory:
        """Return the memory of a cache."""
        return self.memories[cache.cache_id]


DEFAULTS: dict[str, Any] = {}
"""Options of ``LLMConfig`` that clusters of a whole run have, where a test says nothing else."""


@asynccontextmanager
async def open_cluster(cluster_id: int, role: LLMRole = LLMRole.MIX, **options: Any) -> AsyncIterator[Cluster]:
    """Open a cluster that listens on a free loopback port.

    If ``options`` has no transport, that of the whole run of tests is taken, if there is one.
    """
    chosen = DEFAULTS | ({"transport": transport} if (transport := transport_of_run()) else {})
    config = LLMConfig(**{"listen_ip_info": "127.0.0.1:0", **chosen, **options})
    async with LLMDataDist(role, cluster_id, config) as datadist:
        yield Cluster(datadist)


def cluster_info(cluster: Cluster) -> LLMClusterInfo:
    """Return the address at which peers can link to the cluster."""
    address = cluster.datadist.listen_address
    if address is None:
        raise AssertionError("this cluster does not listen")
    info = LLMClusterInfo(cluster.datadist.cluster_id)
    info.append_remote_ip_info(*address)
    return info


def inside(of: Any) -> Engine:
    """Return the parts of an initialised cluster: links, caches, the transport.

    For tests of the library itself, which look at what its callers cannot see. Nothing of it is promised to stay.

    Args:
        of: the cluster, one of ``aiodatadist.blocking``, a cache manager, or a service that has a cluster.

    Raises:
        LLMException: if it is not initialised, or finalized.
    """
    if isinstance(of, LLMDataDist):
        return of._running()
    if isinstance(of, CacheManager):
        return of._engine
    return inside(of._inner if hasattr(of, "_inner") else of._running()._datadist)


@asynccontextmanager
async def linked_pair(
    desc: CacheDesc, *, slots: bool = False, **options: Any
) -> AsyncIterator[tuple[Cluster, Cluster, Cache, Cache]]:
    """Open a prompt (id 1) and a decoder (id 2) with a cache each, and link them.

    If ``slots``, the caches are contiguous, and slot i has request i.
    """
    async with (
        open_cluster(1, LLMRole.PROMPT, device_id=0, **options) as prompt,
        open_cluster(2, LLMRole.DECODER, device_id=1, **options) as decoder,
    ):
        caches = []
        for cluster in (prompt, decoder):
            keys = [CacheKey(cluster.datadist.cluster_id, i) for i in range(desc.shape[0])]
            caches.append(await (cluster.contiguous(desc, keys) if slots else cluster.blocks(desc)))
        linked = await decoder.datadist.link_clusters([cluster_info(prompt)], 5000)
        if linked[0] is not LLMStatusCode.LLM_SUCCESS:
            raise AssertionError(f"the pair could not be linked: {linked.errors}")
        await prompt.datadist.wait_linked(2)
        yield prompt, decoder, caches[0], caches[1]
