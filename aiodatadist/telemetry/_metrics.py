"""Every metric by name, with its kind, labels and meaning. Metrics page, collector and dashboard must match it."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple


class Metric(NamedTuple):
    """A metric. ``labels`` come after those that name the cluster or cache."""

    kind: Literal["counter", "gauge", "histogram"]
    words: str
    labels: tuple[str, ...] = ()

    def samples(self, name: str) -> list[str]:
        """Return the names of its samples, as queries use them."""
        match self.kind:
            case "counter":
                return [f"{name}_total"]
            case "histogram":
                return [f"{name}_bucket", f"{name}_count", f"{name}_sum"]
        return [name]


CLUSTER: Final = {
    "aiodatadist_transfers": Metric("counter", "Transfers that ended.", ("operation", "status")),
    "aiodatadist_transfers_running": Metric("gauge", "Transfers under way.", ("operation",)),
    "aiodatadist_transfer_bytes": Metric(
        "counter", "Bytes that landed, including those of failed transfers.", ("operation",)
    ),
    "aiodatadist_transfer_ranges": Metric(
        "counter", "Pieces that the device was asked for, in transfers that succeeded.", ("operation",)
    ),
    "aiodatadist_transfer_seconds": Metric(
        "histogram", "Time from the first piece to the last byte, of transfers that succeeded.", ("operation",)
    ),
    "aiodatadist_transfer_queue_seconds": Metric(
        "histogram", "Time waiting for earlier transfers of the link, of transfers that succeeded.", ("operation",)
    ),
    "aiodatadist_transfer_size_bytes": Metric("histogram", "Bytes of transfers that succeeded.", ("operation",)),
    "aiodatadist_transfer_failures": Metric(
        "counter", "Transfers that failed for a cause that their status does not name.", ("cause",)
    ),
    "aiodatadist_links": Metric("gauge", "Links that exist now.", ("state",)),
    "aiodatadist_links_by_key": Metric(
        "gauge",
        "Links that exist now, by the name of the key that both ends proved, or in the peer's certificate.",
        ("key",),
    ),
    "aiodatadist_certificate_seconds": Metric(
        "gauge", "Seconds until the certificate of a linked peer expires.", ("key",)
    ),
    "aiodatadist_own_certificate_seconds": Metric("gauge", "Seconds until the cluster's own certificate expires."),
    "aiodatadist_links_made": Metric("counter", "Links that were made, by either end."),
    "aiodatadist_links_ended": Metric("counter", "Links that ended, by reason.", ("reason",)),
    "aiodatadist_link_attempts": Metric("counter", "Links that this cluster asked for.", ("status",)),
    "aiodatadist_link_seconds": Metric("histogram", "Time from asking for a link to its being ready."),
    "aiodatadist_links_relinking": Metric("gauge", "Broken links that are being re-established now."),
    "aiodatadist_relink_attempts": Metric("counter", "Attempts to make a broken link again.", ("status",)),
    "aiodatadist_relink_seconds": Metric("histogram", "Time from the loss of a link until it is ready again."),
    "aiodatadist_relinks_given_up": Metric("counter", "Broken links that were not re-established in time."),
    "aiodatadist_link_changes_dropped": Metric(
        "counter", "Link changes that were dropped because readers were too slow."
    ),
    "aiodatadist_messages_repeated": Metric("counter", "Messages repeated because no answer had come."),
    "aiodatadist_answers_late": Metric("counter", "Answers that came after their request had ended."),
    "aiodatadist_leases": Metric("gauge", "Leases of blocks that are kept for peers now."),
    "aiodatadist_leases_opened": Metric("counter", "Leases of blocks."),
    "aiodatadist_leases_ended": Metric("counter", "Leases that ended, by reason.", ("reason",)),
    "aiodatadist_claims_refused": Metric(
        "counter", "Pulls of leases that named other blocks or another prompt.", ("reason",)
    ),
    "aiodatadist_budget_refusals": Metric(
        "counter", "Requests that were refused because their peer had too much under way.", ("limit",)
    ),
    "aiodatadist_budget_waits": Metric(
        "counter", "Times that a peer waited because it had reached a limit.", ("limit",)
    ),
    "aiodatadist_quota": Metric("gauge", "Limits for one peer, or one stranger: the option quotas.", ("limit",)),
    "aiodatadist_incidents": Metric(
        "counter", "Incidents that others caused. The log has at most one line a second of each kind.", ("kind",)
    ),
    "aiodatadist_caches": Metric("gauge", "Caches that are registered or allocated."),
    "aiodatadist_pool_bytes": Metric(
        "gauge", "Memory pools: used and free bytes, which add up to all.", ("placement", "state")
    ),
    "aiodatadist_pool_pinned_bytes": Metric("gauge", "Used bytes that transfers or peers may touch.", ("placement",)),
    "aiodatadist_pool_withheld_bytes": Metric(
        "gauge", "Pinned bytes into which a peer that was stopped may still write.", ("placement",)
    ),
    "aiodatadist_pool_largest_free_bytes": Metric("gauge", "The largest free piece.", ("placement",)),
}
"""The metrics of each cluster, with the label ``cluster``."""

CACHE: Final = {
    "aiodatadist_context_cache_calls": Metric("counter", "Calls that ended.", ("operation", "status")),
    "aiodatadist_context_cache_calls_running": Metric("gauge", "Calls under way.", ("operation",)),
    "aiodatadist_context_cache_call_seconds": Metric(
        "histogram", "Time from the call to its end, of calls that succeeded.", ("operation",)
    ),
    "aiodatadist_context_cache_values": Metric("counter", "Values, by outcome.", ("outcome",)),
    "aiodatadist_context_cache_bytes": Metric("counter", "Payloads that were saved or loaded.", ("direction",)),
    "aiodatadist_context_cache_local_hits": Metric("counter", "Loaded values from the local read cache."),
    "aiodatadist_context_cache_damaged": Metric("counter", "Values that were missed because they were damaged."),
    "aiodatadist_context_cache_forged": Metric(
        "counter", "Values of a sealed pool that were missed because they were not as a member had sealed them."
    ),
    "aiodatadist_context_cache_incidents": Metric(
        "counter", "Incidents of pools and calls. The log has at most one line a second of each kind.", ("kind",)
    ),
    "aiodatadist_context_cache_in_flight_bytes": Metric("gauge", "Host memory that calls hold."),
    "aiodatadist_context_cache_pool_in_use": Metric("gauge", "1 while the pool is used, 0 while its gate is closed."),
}
"""The metrics of each context cache, with the labels ``cache`` and ``pool``."""

NIXL: Final = {
    "vllm:nixl_xfer_time_seconds": Metric("histogram", "As aiodatadist_transfer_seconds, of pulls and pushes."),
    "vllm:nixl_bytes_transferred": Metric("histogram", "As aiodatadist_transfer_size_bytes, of pulls and pushes."),
    "vllm:nixl_num_descriptors": Metric(
        "histogram", "Ranges of pulls and pushes: the number of transfers, and the sum."
    ),
    "vllm:nixl_num_failed_transfers": Metric("counter", "Pulls and pushes that failed."),
    "vllm:nixl_num_kv_expired_reqs": Metric("counter", "Leases that no peer claimed in time."),
}
"""The names of vLLM's NixlConnector, with the label ``cluster``: dashboards made for it show these transfers, too."""

METRICS: Final = {**CLUSTER, **CACHE, **NIXL}
