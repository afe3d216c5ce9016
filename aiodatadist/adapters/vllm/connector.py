"""vLLM's connector class over the two halves."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from aiodatadist.adapters.block_service import Settings
from aiodatadist.adapters.vllm.identity import meaning_of, with_layers
from aiodatadist.adapters.vllm.model import Model, settings_of
from aiodatadist.adapters.vllm.orders import Address, Orders, address_of
from aiodatadist.adapters.vllm.scheduler_side import SchedulerSide
from aiodatadist.adapters.vllm.stats import TransferMetrics, TransferStats, stats_of
from aiodatadist.adapters.vllm.worker_side import WorkerSide


class AioDataDistConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM has no types here
    """A vLLM connector that moves KV blocks from prefill to decode engines.

    In pull mode the prefill engine keeps a finished request's blocks until a decode engine has pulled them. In push
    mode it sends each layer as it is computed.

    ``kv_connector_extra_config`` is a :class:`~aiodatadist.adapters.block_service.Settings`. Models must have one group
    of KV caches. Types and layouts must be equal, or the pull fails and names both values. Block sizes and
    tensor-parallel sizes may differ if blocks are pulled, but must be equal if they are pushed. vLLM's
    ``kv_load_failure_policy`` decides what a failed pull means for its request.

    Raises:
        ValueError: if a setting is wrong, or the model has several groups.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = settings_of(self._kv_transfer_config, Settings)
        model = Model.of(vllm_config, kv_cache_config, type(self).__name__)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(settings, model.block_size, model.blocks, model.ranks)
        else:
            said = with_layers(meaning_of(vllm_config, settings.model_id), vllm_config)
            self._worker = WorkerSide(settings, model, said)

    @property
    def _deciding(self) -> SchedulerSide:
        assert self._scheduler is not None, "this is a worker's connector"
        return self._scheduler

    @property
    def _moving(self) -> WorkerSide:
        assert self._worker is not None, "this is a scheduler's connector"
        return self._worker

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._moving.register(kv_caches)

    def get_handshake_metadata(self) -> Address | None:
        address = self._moving.address
        return None if address is None else Address(address.model_dump_json())

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Orders)
        self._moving.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        self._moving.carry_out(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads have ended before their request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._moving.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """Let all layers travel, without waiting: no later step writes to the blocks on their way."""
        self._moving.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self._moving.take_results()
        return results.sent or None, results.received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._moving.take_results()
        return KVConnectorTransferResults(finished_sending=results.sent, finished_recving=results.received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._moving.take_failed_blocks()

    def get_kv_connector_stats(self) -> TransferStats | None:
        """Return the figures of this half; vLLM adds both halves up."""
        return self._moving.take_stats() if self._worker is not None else stats_of(self._deciding.take_counters())

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # ---- scheduler ----

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._deciding.meet({rank: address_of(found) for rank, found in metadata.items()})

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._deciding.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._deciding.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        return self._deciding.take_orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._deciding.received(connector_output.finished_recving or ())
        self._deciding.sent(connector_output.finished_sending or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._deciding.finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._deciding.finished(request, block_ids[0])

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return True for pushes: otherwise the hooks of layers are not called."""
        return bool(extra_config.get("push"))

    # ---- figures ----

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> TransferMetrics:
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
