"""The context connector's half beside a worker: hands orders to a CacheService, and reports what ended."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from importlib import import_module
from typing import Any

from aiodatadist._adapters.cache_service import CacheService, CacheSettings
from aiodatadist._adapters.vllm.context_orders import ContextOrders
from aiodatadist._adapters.vllm.kv_tensors import layers_of
from aiodatadist._adapters.vllm.results import Reports
from aiodatadist.context_caching import CcConfig_v1


def config_of(settings: CacheSettings, identity: str, rank: int, ranks: int) -> CcConfig_v1:
    """Return the identity of a worker. ``identity`` is all that decides the contents of a block beside its tokens."""
    return CcConfig_v1(
        rank_id=rank,
        device_id=settings.device_id + rank,
        model_id=sha256(identity.encode()).hexdigest(),
        tp_world_size=ranks,
        rank_in_tp_group=rank,
    )


class ContextWorker:
    """The worker half of one worker.

    Args:
        blocks: blocks of the engine's KV cache, per layer.
        block_size: tokens of a block.

    Attributes:
        reports: the orders that ended.
    """

    def __init__(self, settings: CacheSettings, config: CcConfig_v1, blocks: int, block_size: int) -> None:
        self._service = CacheService(settings)
        self._config = config
        self._blocks, self._block_size = blocks, block_size
        self._device = "cpu"
        self.reports = Reports(self._service.take)

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Register the KV cache, layer by layer: one tensor, or two for keys and values.

        Raises:
            ParamInvalid: if its shape is unknown.
            EmsException: see :meth:`CacheService.open`.
        """
        layers = layers_of(kv_caches, self._blocks)
        self._device = str(getattr(layers[0][0], "device", "cpu"))
        self._service.open(self._config, [[self._by_token(tensor) for tensor in layer] for layer in layers])

    def _by_token(self, tensor: Any) -> Any:
        """Return its bytes, ``[blocks, tokens, bytes of a token]``.

        Only whole blocks travel, so a token need not be contiguous.
        """
        return tensor.view(import_module("torch").uint8).view(self._blocks, self._block_size, -1)

    # ---- each step ----

    def let_go(self, orders: ContextOrders) -> None:
        """Wait for saves of preempted requests, before the step overwrites their blocks."""
        self._service.let_go(orders.preempted)

    def load(self, orders: ContextOrders) -> None:
        """Start loads. Never waits."""
        for wanted in orders.loads:
            self._service.load(wanted.request_id, wanted.hashes, wanted.blocks)
        for request_id in orders.cancels:
            self._service.cancel(request_id)

    def save(self, orders: ContextOrders) -> None:
        """Start saves, after the computation of their blocks. On an NPU this waits for it: copies know no stream."""
        if orders.saves and self._device.startswith("npu"):
            import_module("torch").npu.current_stream().synchronize()
        for done in orders.saves:
            self._service.save(done.request_id, done.hashes, done.blocks)
        for request_id in orders.finished:
            self._service.finish(request_id)

    def close(self) -> None:
        """Close the service."""
        self._service.close()
