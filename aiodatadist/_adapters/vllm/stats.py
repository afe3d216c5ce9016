"""Figures of transfers, as vLLM collects them from workers, logs them, and exposes them to Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from aiodatadist._adapters.ended import Ended
from aiodatadist._counting import Incident

COUNTERS = {
    "pull_done": ("num_successful_transfers", "Pulls of a request's blocks that succeeded."),
    "pull_failed": ("num_failed_transfers", "Pulls of a request's blocks that failed."),
    "pull_refused": (
        "num_refused_transfers",
        "Pulls that the prefill engine refused: the offer named other blocks, or another prompt.",
    ),
    "pull_cancelled": ("num_cancelled_transfers", "Pulls of a request's blocks that were cancelled."),
    "pulled_bytes": ("bytes_transferred", "Bytes that were pulled."),
    "pulled_blocks": ("blocks_transferred", "Blocks that were pulled."),
    "push_arrived": ("num_received_transfers", "Requests that a prefill engine has pushed here."),
    "push_missed": ("num_missed_transfers", "Requests that a prefill engine should have pushed here, and did not."),
    "push_done": ("num_pushed_reqs", "Requests whose blocks this engine has pushed."),
    "push_failed": ("num_failed_pushes", "Requests whose blocks this engine could not push."),
    "push_stopped": ("num_stopped_pushes", "Requests that ended at either end before all was pushed."),
    "push_expired": ("num_expired_pushes", "Computed requests for whose blocks no decode engine asked in time."),
    "pushed_bytes": ("bytes_pushed", "Bytes that were pushed."),
    "load_done": ("num_successful_loads", "Requests whose prefix was loaded from the context cache."),
    "load_missed": (
        "num_failed_loads",
        "Requests for which the context cache had less of the prefix than it had reported.",
    ),
    "loaded_blocks": ("blocks_loaded", "Blocks that were loaded from the context cache."),
    "saved_blocks": ("blocks_saved", "Blocks that are in the context cache, as far as this engine computed them."),
    "unsaved_blocks": ("blocks_not_saved", "Blocks for which the context cache had no room, or that it did not take."),
    "lease_taken": ("num_kv_taken_reqs", "Finished requests whose blocks a decode engine has."),
    "lease_released": ("num_kv_released_reqs", "Finished requests whose blocks a decode engine did not want."),
    "lease_peer_lost": ("num_kv_lost_reqs", "Finished requests whose decode engine was lost while it pulled."),
    "lease_expired": ("num_kv_expired_reqs", "Finished requests whose blocks no decode engine came for in time."),
    "lease_no_room": ("num_kv_unkept_reqs", "Finished requests whose blocks were not kept: too many others' are."),
    "offer_unreadable": (
        "num_unreadable_offers",
        "Requests whose kv_transfer_params this engine refused: too large, or no offer.",
    ),
    "offer_elsewhere": (
        "num_elsewhere_offers",
        "Requests that named an engine which is not among this engine's peers.",
    ),
    "offer_incomplete": (
        "num_incomplete_offers",
        "Requests whose offer this engine declined: it was without tokens to which a later one attends.",
    ),
    "offer_no_room": (
        "num_declined_offers",
        "Requests whose offer this engine declined: too many blocks wait for other engines.",
    ),
    "claims_refused": (
        "num_refused_claims",
        "Pulls of kept blocks that this engine refused: they named other blocks, or another prompt.",
    ),
}
"""Counters of :class:`Ended`: the name in Prometheus behind ``vllm:aiodatadist_``, and its description."""
SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]


class TransferStats(KVConnectorStats):  # type: ignore[misc]  # vLLM has no types here
    """Figures of a worker or scheduler.

    ``data`` has counters, kinds of incidents, and the ``seconds`` of successful pulls.
    """

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__({**_nothing(), **(data or {})})

    def add(self, ended: Ended) -> None:
        """Add what ended at a worker."""
        self._add(ended.counters, ended.pull_seconds, ended.incidents)

    def _add(self, counters: dict[str, int], seconds: list[float], incidents: dict[str, int]) -> None:
        for name, more in (("counters", counters), ("incidents", incidents)):
            self.data[name] = dict(Counter(self.data[name]) + Counter(more))
        self.data["seconds"] += seconds

    def reset(self) -> None:
        self.data = _nothing()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self._add(other.data["counters"], other.data["seconds"], other.data["incidents"])
        return self

    def reduce(self) -> dict[str, int | float]:
        counters, seconds = self.data["counters"], self.data["seconds"]
        summary: dict[str, int | float] = {
            name: counters[key] for key, (name, _) in COUNTERS.items() if key in counters
        }
        if seconds:
            summary["avg_transfer_ms"] = round(1000 * fmean(seconds), 3)
            summary["max_transfer_ms"] = round(1000 * max(seconds), 3)
        return summary

    def is_empty(self) -> bool:
        return not self.data["counters"] and not self.data["incidents"]


def _nothing() -> dict[str, Any]:
    return {"counters": {}, "seconds": [], "incidents": {}}


def stats_of(counters: Counter[str]) -> TransferStats | None:
    """Return the scheduler's figures; None if it counted nothing."""
    if not counters:
        return None
    incidents = {kind.value: counters[kind.value] for kind in Incident if kind.value in counters}
    return TransferStats({**_nothing(), "counters": dict(counters), "incidents": incidents})


_MADE: dict[str, Any] = {}
"""The metrics of this process, by name: Prometheus refuses a second one, and an engine may have several connectors."""


def _made_once(kind: Any, name: str, **options: Any) -> Any:
    """Return this process's metric of a name. It is made if there is none, or if vLLM has taken it out of its registry.

    Raises ValueError if other code has made a metric of this name.
    """
    try:
        _MADE[name] = kind(name=name, **options)
    except ValueError:
        if name not in _MADE:
            raise
    return _MADE[name]


class TransferMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics ``vllm:aiodatadist_*`` of one connector, whose name is their label ``connector``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        labelvalues: dict[int, list[object]],
        connector: str,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._connector = connector
        seconds = self._metric(
            self._histogram_cls,
            "xfer_time_seconds",
            documentation="Seconds from the order to pull a request's blocks until they were there.",
            buckets=SECONDS,
        )
        self._seconds = self._each(seconds)
        incidents = self._metric(
            self._counter_cls,
            "incidents",
            documentation="Incidents that others caused. The log has at most one line a second for each kind.",
            more=["kind"],
        )
        self._incidents = {kind.value: self._each(incidents, kind.value) for kind in Incident}
        self._counters = {
            key: self._each(self._metric(self._counter_cls, name, documentation=words))
            for key, (name, words) in COUNTERS.items()
        }

    def _metric(self, kind: Any, name: str, more: Sequence[str] = (), **options: Any) -> Any:
        labelnames = [*self._labelnames, "connector", *more]
        return _made_once(kind, f"vllm:aiodatadist_{name}", labelnames=labelnames, **options)

    def _each(self, metric: Any, *more: str) -> dict[int, Any]:
        """Return the metric with the labels of each engine and of this connector."""
        engines = self.per_engine_labelvalues.items()
        return {index: metric.labels(*values, self._connector, *more) for index, values in engines}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, number in transfer_stats_data["counters"].items():
            if key in self._counters:
                self._counters[key][engine_idx].inc(number)
        for kind, number in transfer_stats_data.get("incidents", {}).items():
            if kind in self._incidents:
                self._incidents[kind][engine_idx].inc(number)
        for seconds in transfer_stats_data["seconds"]:
            self._seconds[engine_idx].observe(seconds)
