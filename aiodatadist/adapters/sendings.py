"""How portions of a pushed request travel: layer by layer as they are computed, or as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio

from aiodatadist.cache_manager import CacheManager
from aiodatadist.errors import LLMException, ParamInvalid
from aiodatadist.layered.synchronizers import AwaitableLayerSynchronizer
from aiodatadist.values.descriptors import BlocksCacheKey, Cache
from aiodatadist.values.transfer_config import TransferWithCacheKeyConfig


@dataclass(frozen=True)
class Portion:
    """Blocks ``first``, ``first + 1``, ... of a request, which one step of the model completes.

    Attributes:
        synchronizer: says when each layer is there; None: all is.
    """

    first: int
    blocks: tuple[int, ...]
    synchronizer: AwaitableLayerSynchronizer | None = None


class Sending(Protocol):
    """What an engine's kind of cache needs. Both raise LLMException: it cannot be sent."""

    async def send(self, cluster: int, portion: Portion, sources: Sequence[int], targets: Sequence[int]) -> int:
        """Blocks into a peer's; how many bytes that were."""

    async def send_aux(self, cluster: int, source: int, target: int) -> None:
        """What goes with a request."""


class LayeredSending:
    """A cache of layers, each of ``tensors`` tensors."""

    def __init__(self, manager: CacheManager, cache: Cache, tensors: int) -> None:
        self._manager = manager
        self._cache = cache
        self._tensors = tensors
        self._layers = range(cache.cache_desc.num_tensors // tensors)

    async def send(self, cluster: int, portion: Portion, sources: Sequence[int], targets: Sequence[int]) -> int:
        config = TransferWithCacheKeyConfig(BlocksCacheKey(cluster), self._layers, self._layers)
        synchronizer = portion.synchronizer or self._all_there()
        await self._manager.transfer_cache_async(
            self._cache, synchronizer, [config], sources, targets, tensor_num_per_layer=self._tensors
        )
        return len(sources) * self._cache.cache_desc.num_tensors * self._cache.cache_desc.stride

    def _all_there(self) -> AwaitableLayerSynchronizer:
        synchronizer = AwaitableLayerSynchronizer(len(self._layers))
        for layer in self._layers:
            synchronizer.ready(layer)
        return synchronizer

    async def send_aux(self, cluster: int, source: int, target: int) -> None:
        raise ParamInvalid("a cache of layers has nothing that goes with a request")


class GroupedSending:
    """Tensors of different block sizes: a cache for each size, of blocks or of what goes with a request."""

    def __init__(self, manager: CacheManager, blocks: Sequence[Cache], aux: Sequence[Cache]) -> None:
        self._manager = manager
        self._blocks = list(enumerate(blocks))
        self._aux = list(enumerate(aux, len(blocks)))

    async def send(self, cluster: int, portion: Portion, sources: Sequence[int], targets: Sequence[int]) -> int:
        return await self._push(self._blocks, cluster, sources, targets)

    async def send_aux(self, cluster: int, source: int, target: int) -> None:
        await self._push(self._aux, cluster, [source], [target])

    async def _push(
        self, caches: Sequence[tuple[int, Cache]], cluster: int, sources: Sequence[int], targets: Sequence[int]
    ) -> int:
        failures: list[LLMException] = []

        async def push(number: int, cache: Cache) -> None:
            try:
                await self._manager.push_blocks(
                    BlocksCacheKey(cluster, number), cache, sources, targets, tensor_num_per_layer=1
                )
            except LLMException as error:
                failures.append(error)

        async with anyio.create_task_group() as group:
            for number, cache in caches:
                group.start_soon(push, number, cache)
        if failures:
            raise failures[0]
        return sum(len(sources) * cache.cache_desc.num_tensors * cache.cache_desc.stride for _, cache in caches)
