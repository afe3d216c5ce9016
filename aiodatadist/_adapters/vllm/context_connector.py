"""vLLM's connector class over a context cache."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec

from aiodatadist._adapters.cache_service import CacheService, CacheSettings, check_pool
from aiodatadist._adapters.vllm.connector_base import ConnectorBase
from aiodatadist._adapters.vllm.context_orders import ContextOrders
from aiodatadist._adapters.vllm.context_scheduler import ContextScheduler
from aiodatadist._adapters.vllm.context_worker import ContextWorker, config_of
from aiodatadist._adapters.vllm.identity import meaning_of
from aiodatadist._adapters.vllm.model import Model, settings_of
from aiodatadist._adapters.vllm.stats import TransferStats

_STABLE = frozenset({"sha256", "sha256_cbor"})


class AioDataDistContextConnector(ConnectorBase[ContextScheduler, ContextWorker]):
    """A vLLM connector that saves computed blocks by the hash of their prefix, and loads them by it.

    ``kv_connector_extra_config`` is a :class:`~aiodatadist._adapters.cache_service.CacheSettings`. A pool that is slow
    or down causes misses: what is not loaded is computed. With ``kv_role`` ``kv_producer`` an engine does not load,
    with ``kv_consumer`` it does not save.

    Raises:
        TypeError: if the model has layers that do not attend to all of a prompt.
        ValueError: if a setting is wrong, or the model's blocks cannot be shared: several groups of KV caches, or
            hashes that differ from process to process.
    """

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = settings_of(self._kv_transfer_config, CacheSettings)
        model = Model.of(vllm_config, kv_cache_config, type(self).__name__, most_groups=1)
        self._check(vllm_config, kv_cache_config.kv_cache_groups[0].kv_cache_spec)
        check_pool(settings, model.ranks == 1)
        policy = self._kv_transfer_config.kv_load_failure_policy
        if self._kv_transfer_config.is_kv_consumer and policy != "recompute":
            raise ValueError(
                f"kv_load_failure_policy is {policy!r}: must be 'recompute', because a block that was found may be gone "
                "when it is loaded"
            )
        settings = settings.model_copy(update={"device_id": settings.device_id + model.first_device})
        config = config_of(settings, self._identity(vllm_config, settings, model), model.rank, model.ranks)
        if role is KVConnectorRole.SCHEDULER:
            service = CacheService(settings)
            try:
                service.open(config)
            except BaseException:
                service.close()
                raise
            given = self._kv_transfer_config
            self._scheduler = ContextScheduler(service, model.block_size, given.is_kv_consumer, given.is_kv_producer)
        else:
            self._worker = ContextWorker(settings, config, model.blocks, model.block_size)

    @staticmethod
    def _check(vllm_config: Any, spec: Any) -> None:
        """Raise TypeError or ValueError if the model's blocks cannot be shared."""
        if not isinstance(spec, FullAttentionSpec):
            raise TypeError(f"the KV cache is a {type(spec).__name__}: only blocks of full attention can be shared")
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        if algorithm not in _STABLE:
            raise ValueError(
                f"prefix_caching_hash_algo is {algorithm}: other processes must have the same hashes, "
                f"which {' and '.join(sorted(_STABLE))} give"
            )

    @staticmethod
    def _identity(vllm_config: Any, settings: CacheSettings, model: Model) -> str:
        """Return everything that decides the contents of a block beside its tokens."""
        said = meaning_of(vllm_config, settings.model_id)
        words = " ".join(f"{name}={said[name]}" for name in sorted(said))
        return f"{words} {model.block_size} {model.ranks} {vllm_config.cache_config.prefix_caching_hash_algo}"

    @property
    def _orders(self) -> ContextOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, ContextOrders)
        return orders

    # ---- worker ----

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._moving.let_go(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._moving.load(self._orders)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: a value of the cache has all layers of a block, so it is saved once the last one is computed."""

    def wait_for_save(self) -> None:
        """Start to save, without waiting: blocks wait for their saves when their request ends or is preempted."""
        self._moving.save(self._orders)

    def get_kv_connector_stats(self) -> TransferStats | None:
        return None if self._worker is None else self._worker.reports.take_stats()

    def shutdown(self) -> None:
        for half in (self._worker, self._scheduler):
            if half is not None:
                half.close()

    # ---- scheduler ----

    def update_connector_output(self, connector_output: Any) -> None:
        is_whole = not connector_output.invalid_block_ids
        self._deciding.received(connector_output.finished_recving or (), is_whole)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._deciding.finished(request), None
