"""The context connector's half beside a worker: hands orders to a CacheService, and tells what ended."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from importlib import import_module
from typing import Any

from aiodatadist.adapters.cache_service import CacheService, CacheSettings
from aiodatadist.adapters.vllm.context_orders import ContextOrders
from aiodatadist.adapters.vllm.kv_tensors import layers_of
from aiodatadist.adapters.vllm.results import FailedBlocks, Results
from aiodatadist.adapters.vllm.stats import TransferStats
from aiodatadist.context_caching import CcConfig_v1


def config_of(settings: CacheSettings, identity: str, rank: int, ranks: int) -> CcConfig_v1:
    """Who a worker is. ``identity``: all that decides the contents of a block beside its tokens."""
    return CcConfig_v1(
        rank_id=rank,
        device_id=settings.device_id + rank,
        model_id=sha256(identity.encode()).hexdigest(),
        tp_world_size=ranks,
        rank_in_tp_group=rank,
    )


class ContextWorker:
    """One worker's.

    Args:
        blocks: of the engine's KV cache, per layer.
        block_size: tokens of one.
    """

    def __init__(self, settings: CacheSettings, config: CcConfig_v1, blocks: int, block_size: int) -> None:
        self._service = CacheService(settings)
        self._config = config
        self._blocks, self._block_size = blocks, block_size
        self._device = "cpu"
        self._failed = FailedBlocks()
        self._stats = TransferStats()

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """The KV cache, layer by layer: one tensor, or two for keys and values.

        Raises:
            ParamInvalid: it has a shape that is not known here. EmsException: see :meth:`CacheService.open`.
        """
        layers = layers_of(kv_caches, self._blocks)
        self._device = str(getattr(layers[0][0], "device", "cpu"))
        self._service.open(self._config, [[self._by_token(tensor) for tensor in layer] for layer in layers])

    def _by_token(self, tensor: Any) -> Any:
        """Its bytes, ``[blocks, tokens, bytes of one]``: only whole blocks travel, so a token need not be in one piece."""
        uint8 = import_module("torch").uint8
        return tensor.view(self._blocks, -1).view(uint8).view(self._blocks, self._block_size, -1)

    # ---- each step ----

    def let_go(self, orders: ContextOrders) -> None:
        """Before the step overwrites blocks of preempted requests."""
        self._service.let_go(orders.preempted)

    def load(self, orders: ContextOrders) -> None:
        """Begin. Never waits."""
        for wanted in orders.loads:
            self._service.load(wanted.request_id, wanted.hashes, wanted.blocks)
        for request_id in orders.cancels:
            self._service.cancel(request_id)

    def save(self, orders: ContextOrders) -> None:
        """Begin, behind what computes the blocks. On an NPU it waits for that, since the copies know no stream."""
        if orders.saves and self._device.startswith("npu"):
            import_module("torch").npu.current_stream().synchronize()
        for done in orders.saves:
            self._service.save(done.request_id, done.hashes, done.blocks)
        for request_id in orders.finished:
            self._service.finish(request_id)

    def take_results(self) -> Results:
        """What ended since the last step."""
        ended = self._service.take()
        self._stats.add(ended)
        return self._failed.results(ended)

    def take_failed_blocks(self) -> set[int]:
        """Blocks of loads that failed, of those that were told as received."""
        return self._failed.take()

    def take_stats(self) -> TransferStats | None:
        """Figures of the last interval; None: nothing happened."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, TransferStats()
        return stats

    def close(self) -> None:
        self._service.close()
