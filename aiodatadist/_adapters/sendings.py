"""The ways in which portions of a pushed request travel: layer by layer as they are computed, or all at once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio

from aiodatadist._cache_manager import CacheManager
from aiodatadist._layered.synchronizers import AwaitableLayerSynchronizer, LayerSynchronizer
from aiodatadist._values.descriptors import BlocksCacheKey, Cache
from aiodatadist._values.transfer_config import TransferWithCacheKeyConfig
from aiodatadist.errors import LLMException, ParamInvalid

Check = Callable[[], object]


@dataclass(frozen=True)
class Portion:
    """Blocks ``first``, ``first + 1``, ... of a request, which one step of the model completes.

    Attributes:
        synchronizer: tells when each layer is ready; None if all are.
    """

    first: int
    blocks: tuple[int, ...]
    synchronizer: AwaitableLayerSynchronizer | None = None


class Sending(Protocol):
    """The sending of an engine's kind of cache. Both methods raise LLMException if it cannot be sent.

    ``caches`` is the name of the peer's first cache; the others' follow. It is new for each start of the peer, so
    nothing lands in the memory of a peer that was started again under the same cluster id. ``check`` is called in the
    turn of the event loop in which a transfer starts; if it raises, the transfer does not start.
    """

    async def send(
        self, caches: BlocksCacheKey, portion: Portion, sources: Sequence[int], targets: Sequence[int], check: Check
    ) -> int:
        """Send blocks into a peer's; return the number of bytes."""

    async def send_aux(self, caches: BlocksCacheKey, source: int, target: int, check: Check) -> None:
        """Send what goes with a request."""


class _OfTensors(LayerSynchronizer):
    """A synchronizer of tensors, over one of layers: a tensor is final when the last layer in it is.

    Args:
        steps: by tensor: the number of that layer.
    """

    def __init__(self, synchronizer: AwaitableLayerSynchronizer, steps: Sequence[int]) -> None:
        self._synchronizer = synchronizer
        self._steps = steps
        event = getattr(synchronizer, "device_event", None)
        if event is not None:
            self.device_event = lambda tensor: event(steps[tensor])

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return await self._synchronizer.synchronize_layer(self._steps[layer_index], timeout_in_millis)


class LayeredSending:
    """The sending of a KV cache layer by layer: a cache for each plane.

    Args:
        layers: number of layers, in the order in which they are computed.
        steps: by cache and tensor: the number of the last layer in it.
    """

    def __init__(
        self, manager: CacheManager, caches: Sequence[Cache], layers: int, steps: Sequence[Sequence[int]]
    ) -> None:
        self._manager = manager
        self._caches = list(enumerate(caches))
        self._layers = range(layers)
        self._steps = steps

    async def send(
        self, caches: BlocksCacheKey, portion: Portion, sources: Sequence[int], targets: Sequence[int], check: Check
    ) -> int:
        synchronizer = portion.synchronizer or self._all_there()

        async def send(number: int, cache: Cache) -> None:
            check()
            steps = self._steps[number]
            each = len(steps) // len(self._layers)
            is_even = each > 0 and list(steps) == [layer for layer in self._layers for _ in range(each)]
            layers = self._layers if is_even else range(len(steps))
            config = TransferWithCacheKeyConfig(_name(caches, number), layers, layers)
            await self._manager.transfer_cache_async(
                cache,
                synchronizer if is_even else _OfTensors(synchronizer, steps),
                [config],
                sources,
                targets,
                tensor_num_per_layer=each if is_even else 1,
            )

        await _for_each(self._caches, send)
        return len(sources) * _bytes_per_block(self._caches)

    def _all_there(self) -> AwaitableLayerSynchronizer:
        synchronizer = AwaitableLayerSynchronizer(len(self._layers))
        for layer in self._layers:
            synchronizer.ready(layer)
        return synchronizer

    async def send_aux(self, caches: BlocksCacheKey, source: int, target: int, check: Check) -> None:
        raise ParamInvalid("a cache of layers has no auxiliary items to send with a request")


class GroupedSending:
    """The sending of tensors with different block sizes: a cache for each size, of blocks or of auxiliary items."""

    def __init__(self, manager: CacheManager, blocks: Sequence[Cache], aux: Sequence[Cache]) -> None:
        self._manager = manager
        self._blocks = list(enumerate(blocks))
        self._aux = list(enumerate(aux, len(blocks)))

    async def send(
        self, caches: BlocksCacheKey, portion: Portion, sources: Sequence[int], targets: Sequence[int], check: Check
    ) -> int:
        return await self._push(self._blocks, caches, sources, targets, check)

    async def send_aux(self, caches: BlocksCacheKey, source: int, target: int, check: Check) -> None:
        await self._push(self._aux, caches, [source], [target], check)

    async def _push(
        self,
        mine: Sequence[tuple[int, Cache]],
        theirs: BlocksCacheKey,
        sources: Sequence[int],
        targets: Sequence[int],
        check: Check,
    ) -> int:
        async def push(number: int, cache: Cache) -> None:
            check()
            await self._manager.push_blocks(_name(theirs, number), cache, sources, targets, tensor_num_per_layer=1)

        await _for_each(mine, push)
        return len(sources) * _bytes_per_block(mine)


def _name(first: BlocksCacheKey, number: int) -> BlocksCacheKey:
    return BlocksCacheKey(first.cluster_id, first.model_id + number)


def _bytes_per_block(caches: Sequence[tuple[int, Cache]]) -> int:
    return sum(cache.cache_desc.num_tensors * cache.cache_desc.stride for _, cache in caches)


async def _for_each(
    caches: Sequence[tuple[int, Cache]], send: Callable[[int, Cache], Coroutine[None, None, None]]
) -> None:
    """Send for all caches concurrently, and wait until all have ended. Raises the first LLMException."""
    failures: list[LLMException] = []

    async def one(number: int, cache: Cache) -> None:
        try:
            await send(number, cache)
        except LLMException as error:
            failures.append(error)

    async with anyio.create_task_group() as group:
        for number, cache in caches:
            group.start_soon(one, number, cache)
    if failures:
        raise failures[0]
