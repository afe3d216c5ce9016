"""vLLM's connector class over the two halves."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from aiodatadist._adapters.settings import Settings
from aiodatadist._adapters.vllm.connector_base import ConnectorBase
from aiodatadist._adapters.vllm.identity import meaning_of, with_layers
from aiodatadist._adapters.vllm.model import Model, settings_of
from aiodatadist._adapters.vllm.orders import Address, Orders, address_of
from aiodatadist._adapters.vllm.scheduler_side import SchedulerSide
from aiodatadist._adapters.vllm.stats import TransferStats, stats_of
from aiodatadist._adapters.vllm.worker_side import WorkerSide


class AioDataDistConnector(ConnectorBase[SchedulerSide, WorkerSide]):
    """A vLLM connector that moves KV blocks from prefill to decode engines.

    In pull mode the prefill engine keeps a finished request's blocks until a decode engine has pulled them. In push
    mode it sends each layer as it is computed.

    ``kv_connector_extra_config`` is a :class:`~aiodatadist._adapters.settings.Settings`. Element types and what the numbers
    mean must be equal, or the pull fails and names both values. Block sizes, tensor-parallel sizes and the pipeline of a
    prefill engine may differ if blocks are pulled, but must be equal if they are pushed. vLLM's ``kv_load_failure_policy``
    decides what a failed pull means for its request.

    Raises:
        ValueError: if a setting is wrong, or a layer's KV cache cannot be moved.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        model = self._model = Model.of(vllm_config, kv_cache_config, type(self).__name__)
        settings = settings_of(self._kv_transfer_config, Settings).moved(model.first, model.first_device)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(settings, model.block_size, model.blocks, model.ranks, model)
        else:
            said = with_layers(meaning_of(vllm_config, settings.model_id), vllm_config)
            compiled = getattr(vllm_config, "compilation_config", None)
            layers = getattr(compiled, "static_forward_context", None)
            self._worker = WorkerSide(settings, model, said, layers)

    # ---- worker ----

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

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._moving.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """Let all layers travel, without waiting: no later step writes to the blocks on their way."""
        self._moving.end_step()

    def get_kv_connector_stats(self) -> TransferStats | None:
        """Return the figures of this half; vLLM adds both halves up."""
        return (
            self._moving.reports.take_stats() if self._worker is not None else stats_of(self._deciding.take_counters())
        )

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # ---- scheduler ----

    def on_new_request(self, request: Any) -> None:
        self._deciding.arrived(request)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._deciding.meet({rank: address_of(found) for rank, found in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self.set_xfer_handshake_metadata({number: metadata[place] for number, place in enumerate(sorted(metadata))})

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        first, *others = self._model.of_groups(blocks.get_block_ids())
        self._deciding.allocated(request, first, num_external_tokens, others)

    def update_connector_output(self, connector_output: Any) -> None:
        self._deciding.received(connector_output.finished_recving or ())
        self._deciding.sent(connector_output.finished_sending or ())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        first, *others = self._model.of_groups(block_ids)
        return self._deciding.finished(request, first, others, self._model.not_moved(block_ids))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout in which workers with other heads can be given theirs in few pieces."""
        config = vllm_config.model_config
        return None if config is None or config.use_mla else "HND"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return True for pushes: otherwise the hooks of layers are not called."""
        return bool(extra_config.get("push"))
