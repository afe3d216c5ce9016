"""The base of vLLM's connector classes: it hands calls to the half beside the scheduler or the worker."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from aiodatadist._adapters.vllm.results import Reports
from aiodatadist._adapters.vllm.stats import TransferMetrics, TransferStats


class Deciding(Protocol):
    """The half beside vLLM's scheduler."""

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded behind those that are computed; None if that is not known yet."""

    def allocated(self, request: Any, blocks: list[int], tokens: int) -> None:
        """Take note of the blocks of a request."""

    def take_orders(self, step: Any) -> Any:
        """Return the orders for the step."""


class Moving(Protocol):
    """The half beside a vLLM worker."""

    @property
    def reports(self) -> Reports:
        """The orders that ended."""

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Register the KV cache."""

    def close(self) -> None:
        """Close everything."""


DecidingT = TypeVar("DecidingT", bound=Deciding)
MovingT = TypeVar("MovingT", bound=Moving)


class ConnectorBase(KVConnectorBase_V1, SupportsHMA, Generic[DecidingT, MovingT]):  # type: ignore[misc]  # vLLM has no types here
    """A connector of two halves, of which vLLM uses one in each of its processes. Subclasses make them."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: DecidingT | None = None
        self._worker: MovingT | None = None

    @property
    def _deciding(self) -> DecidingT:
        assert self._scheduler is not None, "this is a worker's connector"
        return self._scheduler

    @property
    def _moving(self) -> MovingT:
        assert self._worker is not None, "this is a scheduler's connector"
        return self._worker

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._moving.register(kv_caches)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads have ended before their request is scheduled."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self._moving.reports.take_results()
        return results.sent or None, results.received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._moving.reports.take_results()
        return KVConnectorTransferResults(finished_sending=results.sent, finished_recving=results.received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._moving.reports.take_failed_blocks()

    # ---- scheduler ----

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._deciding.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._deciding.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self._deciding.take_orders(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @abstractmethod
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return True if the blocks must be kept for now, and what the request's answer tells the next engine."""

    # ---- figures ----

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> TransferMetrics:
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, cls.__name__)


def register(connector: type[Any], module: str) -> None:
    """Let vLLM find a connector class by its name alone, as the figures of a ``MultiConnector`` do."""
    with suppress(ValueError):  # it is registered
        KVConnectorFactory.register_connector(connector.__name__, module, connector.__name__)
