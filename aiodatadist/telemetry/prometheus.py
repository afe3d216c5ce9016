"""A collector for Prometheus: the figures of clusters and context caches, read at each scrape.

Needs the extra ``prometheus``::

    from prometheus_client import REGISTRY, start_http_server

    REGISTRY.register(MetricsCollector(datadist, cache))
    start_http_server(9400, addr="127.0.0.1")
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, Protocol

from aiodatadist._cache.pool import PoolUsage
from aiodatadist._context_caching.calls import CacheFigures
from aiodatadist._context_caching.pools.extras import how_to_install
from aiodatadist._counting import OF_POOLS, SECONDS, SUCCESS, Figures, FlowFigures, Incident
from aiodatadist._link import LeaseEnd
from aiodatadist._link.lifecycle import LINK_CAUSES, LinkState
from aiodatadist._link.transfers.checksums import FAILURE_CAUSES
from aiodatadist._values.digests import Refusal
from aiodatadist._values.peer_budget import REFUSALS, WAITS
from aiodatadist.telemetry._metrics import CACHE, CLUSTER, NIXL, Metric

try:
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import Collector
except ImportError as _error:
    raise ImportError(f"metrics for Prometheus need prometheus-client: {how_to_install('prometheus')}") from _error

_SIZES: Final = range(8, 41, 2)
"""Powers of two, from 256 B to 1 TiB: the bounds by which sizes of transfers are counted."""
_MOVED: Final = ("pull_", "push_", "transfer_cache_async")
"""The beginnings of operations that move bytes between clusters, as NIXL does."""
_OUTCOMES: Final = ("saved", "present", "rejected", "failed", "loaded", "missed")


_NONE: Final = (0,) * (len(SECONDS) + 1)


class Cluster(Protocol):
    """An :class:`aiodatadist.LLMDataDist`, or that of :mod:`aiodatadist.legacy` or :mod:`aiodatadist.blocking`."""

    def figures(self) -> Figures[PoolUsage]:
        """Return what was counted."""


class Cache(Protocol):
    """An :class:`aiodatadist.context_caching.ContextCache`."""

    def figures(self) -> CacheFigures:
        """Return what was counted."""


class MetricsCollector(Collector):
    """A collector that a Prometheus registry asks at each scrape. It counts nothing itself, and costs nothing in between.

    Scrapes can come from any thread, even while the event loop is busy, and while clusters are not initialised or
    finalized: counters then keep their values. Each source is kept until :meth:`remove`.

    Args:
        sources: clusters and context caches; add more with :meth:`add`.
        labels: labels for every metric, for instance ``{"model_name": "llama", "engine": "0"}``.
        nixl_names: True to add the names of vLLM's NixlConnector. Switch it off if the connector uses the same
            registry, because a registry can have each name only once.

    Raises:
        TypeError: if a source has no ``figures()``.
        ValueError: if a source is there already, or two have the same name.
    """

    def __init__(
        self, *sources: Cluster | Cache, labels: Mapping[str, str] | None = None, nixl_names: bool = True
    ) -> None:
        self._labels = dict(labels or {})
        self._nixl_names = nixl_names
        self._sources: dict[str, Cluster | Cache] = {}
        self._lock = threading.Lock()
        reserved = {"cluster", "cache", "pool"} | {
            label for each in [*CLUSTER.values(), *CACHE.values()] for label in each.labels
        }
        if taken := sorted(reserved & self._labels.keys()):
            raise ValueError(f"labels has {', '.join(taken)}: metrics have labels of that name already")
        for source in sources:
            self.add(source)

    def add(self, source: Cluster | Cache, name: str | None = None) -> None:
        """Collect this source, too.

        Args:
            name: the label ``cluster`` or ``cache``. By default the cluster's id, or ``"context"``.

        Raises:
            TypeError: if the source has no ``figures()``.
            ValueError: if another source has this name.
        """
        if not callable(getattr(source, "figures", None)):
            raise TypeError(f"source is {source!r}: must be an LLMDataDist or a ContextCache")
        figures = source.figures()
        if name is None:
            name = str(figures.cluster_id) if isinstance(figures, Figures) else "context"
        with self._lock:
            if name in self._sources:
                raise ValueError(
                    f"there is a source named {name!r} already: give this one another name, or remove() the other"
                )
            self._sources[name] = source

    def remove(self, source: Cluster | Cache) -> None:
        """Stop collecting this source. An unknown source is accepted."""
        with self._lock:
            self._sources = {name: each for name, each in self._sources.items() if each is not source}

    def describe(self) -> Iterable[Family]:
        """Return all metrics without samples, by which a registry finds duplicate names."""
        return self._sheet().families()

    def collect(self) -> Iterable[Family]:
        """Return the current figures of the sources."""
        sheet = self._sheet()
        with self._lock:
            sources = list(self._sources.items())
        for name, source in sources:
            figures = source.figures()
            if isinstance(figures, Figures):
                _write_cluster(sheet, (name,), figures)
                if self._nixl_names:
                    _write_nixl(sheet, (name,), figures)
            else:
                _write_cache(sheet, (name, figures.pool), figures)
        return sheet.families()

    def _sheet(self) -> _Sheet:
        return _Sheet(self._labels, self._nixl_names)


class _Sheet:
    """The families of one scrape."""

    def __init__(self, labels: Mapping[str, str], nixl_names: bool) -> None:
        self._values = tuple(labels.values())
        self._families: dict[str, Any] = {}
        groups: list[tuple[Mapping[str, Metric], tuple[str, ...]]] = [
            (CLUSTER, ("cluster",)),
            (CACHE, ("cache", "pool")),
        ]
        if nixl_names:
            groups.append((NIXL, ("cluster",)))
        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        for metrics, which in groups:
            for name, metric in metrics.items():
                names = [*labels, *which, *metric.labels]
                self._families[name] = kinds[metric.kind](name, metric.words, labels=names)

    def families(self) -> list[Family]:
        return list(self._families.values())

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add a sample of a counter or gauge."""
        self._families[name].add_metric([*self._values, *labels], value)

    def add_each(self, name: str, values: Mapping[str, float], known: Sequence[str], *labels: str) -> None:
        """Add a sample for each value of the last label. The known ones always get one, because rates need a first value."""
        for each in {**dict.fromkeys(known, 0), **values}:
            self.add(name, values.get(each, 0), *labels, each)

    def histogram(self, name: str, bounds: Sequence[float], cells: Sequence[int], total: float, *labels: str) -> None:
        """Add a histogram. ``cells`` has one more entry than ``bounds``, for values above the last bound."""
        buckets = [*map(str, map(float, bounds)), "+Inf"]
        counted = list(zip(buckets, accumulate(cells), strict=True))
        self._families[name].add_metric([*self._values, *labels], counted, total)


def _sizes(flows: Sequence[FlowFigures]) -> tuple[list[int], list[int], int]:
    """Return the sizes of all flows together: upper bounds, transfers by bound, and bytes.

    Transfers above one bound and at most the next count for the next; the last entry is of those above all bounds.
    """
    bounds = [1 << power for power in _SIZES]
    cells = [0] * (len(bounds) + 1)
    for flow in flows:
        for power, count in enumerate(flow.by_bytes):
            cells[bisect_left(bounds, 1 << power)] += count
    return bounds, cells, sum(flow.bytes for flow in flows)


def _write_cluster(sheet: _Sheet, which: tuple[str, ...], figures: Figures[PoolUsage]) -> None:
    for operation, flow in figures.transfers.items():
        sheet.add_each("aiodatadist_transfers", flow.statuses, [SUCCESS], *which, operation)
        sheet.add("aiodatadist_transfers_running", flow.running, *which, operation)
        sheet.add("aiodatadist_transfer_bytes", flow.bytes + flow.failed_bytes, *which, operation)
        sheet.add("aiodatadist_transfer_ranges", flow.ranges, *which, operation)
        sheet.histogram("aiodatadist_transfer_seconds", SECONDS, flow.by_seconds, flow.seconds, *which, operation)
        waits = flow.by_queue_seconds, flow.queue_seconds
        sheet.histogram("aiodatadist_transfer_queue_seconds", SECONDS, *waits, *which, operation)
        sizes = _sizes([flow])
        sheet.histogram("aiodatadist_transfer_size_bytes", *sizes, *which, operation)
    sheet.add_each("aiodatadist_transfer_failures", figures.failure_causes, FAILURE_CAUSES, *which)
    sheet.add_each("aiodatadist_links", figures.links, [state.value for state in LinkState], *which)
    sheet.add_each("aiodatadist_links_by_key", figures.credentials, [], *which)
    sheet.add_each("aiodatadist_certificate_seconds", figures.certificates, [], *which)
    if figures.own_certificate is not None:
        sheet.add("aiodatadist_own_certificate_seconds", figures.own_certificate, *which)
    sheet.add("aiodatadist_links_made", figures.links_made, *which)
    sheet.add_each("aiodatadist_links_ended", figures.links_ended, LINK_CAUSES, *which)
    linking = figures.linking
    sheet.add_each("aiodatadist_link_attempts", linking.statuses, [SUCCESS], *which)
    sheet.histogram("aiodatadist_link_seconds", SECONDS, linking.by_seconds, linking.seconds, *which)
    relinking = figures.relinking
    sheet.add("aiodatadist_links_relinking", relinking.running, *which)
    sheet.add_each("aiodatadist_relink_attempts", relinking.statuses, [SUCCESS], *which)
    sheet.histogram("aiodatadist_relink_seconds", SECONDS, relinking.by_seconds, relinking.seconds, *which)
    sheet.add("aiodatadist_relinks_given_up", figures.relinks_given_up, *which)
    sheet.add("aiodatadist_link_changes_dropped", figures.link_changes_dropped, *which)
    sheet.add("aiodatadist_messages_repeated", figures.messages_repeated, *which)
    sheet.add("aiodatadist_answers_late", figures.answers_late, *which)
    sheet.add("aiodatadist_leases", figures.leases, *which)
    sheet.add("aiodatadist_leases_opened", figures.leases_opened, *which)
    sheet.add_each("aiodatadist_leases_ended", figures.leases_ended, [end.value for end in LeaseEnd], *which)
    refusals = [why.name.lower() for why in Refusal]
    sheet.add_each("aiodatadist_claims_refused", figures.claims_refused, refusals, *which)
    sheet.add_each("aiodatadist_budget_refusals", figures.budget_refusals, [limit.value for limit in REFUSALS], *which)
    sheet.add_each("aiodatadist_budget_waits", figures.budget_waits, [limit.value for limit in WAITS], *which)
    for limit, value in figures.quotas.items():
        sheet.add("aiodatadist_quota", value, *which, limit)
    kinds = [kind.value for kind in Incident if kind not in OF_POOLS]
    sheet.add_each("aiodatadist_incidents", figures.incidents, kinds, *which)
    sheet.add("aiodatadist_caches", figures.caches, *which)
    for placement, usage in figures.pools.items():
        sheet.add("aiodatadist_pool_bytes", usage.total - usage.free, *which, placement, "used")
        sheet.add("aiodatadist_pool_bytes", usage.free, *which, placement, "free")
        sheet.add("aiodatadist_pool_pinned_bytes", usage.pinned, *which, placement)
        sheet.add("aiodatadist_pool_withheld_bytes", usage.withheld, *which, placement)
        sheet.add("aiodatadist_pool_largest_free_bytes", usage.largest, *which, placement)


def _write_nixl(sheet: _Sheet, which: tuple[str, ...], figures: Figures[PoolUsage]) -> None:
    flows = [flow for operation, flow in figures.transfers.items() if operation.startswith(_MOVED)]
    by_seconds = [sum(cells) for cells in zip(*(flow.by_seconds for flow in flows), strict=True)] or _NONE
    sheet.histogram("vllm:nixl_xfer_time_seconds", SECONDS, by_seconds, sum(flow.seconds for flow in flows), *which)
    sheet.histogram("vllm:nixl_bytes_transferred", *_sizes(flows), *which)
    succeeded = sum(flow.succeeded for flow in flows)
    sheet.histogram("vllm:nixl_num_descriptors", [], [succeeded], sum(flow.ranges for flow in flows), *which)
    failed = sum(flow.ended - flow.succeeded - flow.statuses.get("CANCELLED", 0) for flow in flows)
    sheet.add("vllm:nixl_num_failed_transfers", failed, *which)
    sheet.add("vllm:nixl_num_kv_expired_reqs", figures.leases_ended.get(LeaseEnd.EXPIRED.value, 0), *which)


def _write_cache(sheet: _Sheet, which: tuple[str, ...], figures: CacheFigures) -> None:
    for operation, flow in figures.calls.items():
        sheet.add_each("aiodatadist_context_cache_calls", flow.statuses, [SUCCESS], *which, operation)
        sheet.add("aiodatadist_context_cache_calls_running", flow.running, *which, operation)
        seconds = flow.by_seconds, flow.seconds
        sheet.histogram("aiodatadist_context_cache_call_seconds", SECONDS, *seconds, *which, operation)
    values = figures.statistics
    for outcome in _OUTCOMES:
        sheet.add("aiodatadist_context_cache_values", getattr(values, outcome), *which, outcome)
    sheet.add("aiodatadist_context_cache_bytes", values.saved_bytes, *which, "saved")
    sheet.add("aiodatadist_context_cache_bytes", values.loaded_bytes, *which, "loaded")
    sheet.add("aiodatadist_context_cache_local_hits", values.local, *which)
    sheet.add("aiodatadist_context_cache_damaged", values.damaged, *which)
    sheet.add("aiodatadist_context_cache_forged", values.forged, *which)
    kinds = [kind.value for kind in Incident if kind in OF_POOLS or kind is Incident.DEFECT]
    sheet.add_each("aiodatadist_context_cache_incidents", figures.incidents, kinds, *which)
    sheet.add("aiodatadist_context_cache_in_flight_bytes", values.bytes_in_flight, *which)
    sheet.add("aiodatadist_context_cache_pool_in_use", int(figures.is_used), *which)
