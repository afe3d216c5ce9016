"""Every metric by name: its kind, its labels, and what it is. The page, the collector and the dashboard are held to this."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple


class Metric(NamedTuple):
    """``labels``: behind those that say which cluster, or which cache, it is of."""

    kind: Literal["counter", "gauge", "histogram"]
    words: str
    labels: tuple[str, ...] = ()

    def samples(self, name: str) -> list[str]:
        """The names that a query may use."""
        match self.kind:
            case "counter":
                return [f"{name}_total"]
            case "histogram":
                return [f"{name}_bucket", f"{name}_count", f"{name}_sum"]
        return [name]


CLUSTER: Final = {
    "aiodatadist_transfers": Metric("counter", "Transfers that ended.", ("operation", "status")),
    "aiodatadist_transfers_running": Metric("gauge", "Transfers under way.", ("operation",)),
    "aiodatadist_transfer_bytes": Metric("counter", "Bytes that landed, also of those that failed.", ("operation",)),
    "aiodatadist_transfer_ranges": Metric(
        "counter", "Of transfers that succeeded: pieces that the device was asked for.", ("operation",)
    ),
    "aiodatadist_transfer_seconds": Metric(
        "histogram", "Of transfers that succeeded: from the first piece to the last byte.", ("operation",)
    ),
    "aiodatadist_transfer_queue_seconds": Metric(
        "histogram", "Of transfers that succeeded: waiting for earlier ones of the same link.", ("operation",)
    ),
    "aiodatadist_transfer_size_bytes": Metric("histogram", "Bytes of transfers that succeeded.", ("operation",)),
    "aiodatadist_transfer_failures": Metric(
        "counter", "Of transfers that failed: what their status does not tell.", ("cause",)
    ),
    "aiodatadist_links": Metric("gauge", "Links that there are now.", ("state",)),
    "aiodatadist_links_made": Metric("counter", "Links that were made, whichever end asked."),
    "aiodatadist_links_ended": Metric("counter", "Links that ended, and why.", ("reason",)),
    "aiodatadist_link_attempts": Metric("counter", "Links that this cluster asked for.", ("status",)),
    "aiodatadist_link_seconds": Metric("histogram", "Of those that were made: from asking to ready."),
    "aiodatadist_links_relinking": Metric("gauge", "Links that broke and are being made again now."),
    "aiodatadist_relink_attempts": Metric("counter", "Attempts to make a link again that broke.", ("status",)),
    "aiodatadist_relink_seconds": Metric("histogram", "Of links that were made again: from the loss to ready."),
    "aiodatadist_relinks_given_up": Metric("counter", "Links that broke and were not made again in time."),
    "aiodatadist_link_changes_dropped": Metric("counter", "Changes of links that readers were too slow for."),
    "aiodatadist_messages_repeated": Metric("counter", "Messages said again, as no answer had come."),
    "aiodatadist_answers_late": Metric("counter", "Answers for which nothing waited any more."),
    "aiodatadist_leases": Metric("gauge", "Leases of blocks that are kept for peers now."),
    "aiodatadist_leases_opened": Metric("counter", "Leases of blocks."),
    "aiodatadist_leases_ended": Metric("counter", "Leases that ended, and why.", ("reason",)),
    "aiodatadist_claims_refused": Metric(
        "counter", "Pulls of leases that named other blocks or another prompt.", ("reason",)
    ),
    "aiodatadist_budget_refusals": Metric(
        "counter", "Requests that were refused because their peer had too much under way.", ("limit",)
    ),
    "aiodatadist_incidents": Metric(
        "counter", "What others caused: of each kind the log has one line a second at most.", ("kind",)
    ),
    "aiodatadist_caches": Metric("gauge", "Caches that are registered or allocated."),
    "aiodatadist_pool_bytes": Metric("gauge", "Memory pools: used and free add up to all.", ("placement", "state")),
    "aiodatadist_pool_pinned_bytes": Metric("gauge", "Used bytes that transfers or peers may touch.", ("placement",)),
    "aiodatadist_pool_withheld_bytes": Metric(
        "gauge", "Pinned bytes into which a peer that was stopped may still write.", ("placement",)
    ),
    "aiodatadist_pool_largest_free_bytes": Metric("gauge", "The largest piece to be had.", ("placement",)),
}
"""Of each cluster, with the label ``cluster``."""

CACHE: Final = {
    "aiodatadist_context_cache_calls": Metric("counter", "Calls that ended.", ("operation", "status")),
    "aiodatadist_context_cache_calls_running": Metric("gauge", "Calls under way.", ("operation",)),
    "aiodatadist_context_cache_call_seconds": Metric(
        "histogram", "Of calls that succeeded: from the call to its end.", ("operation",)
    ),
    "aiodatadist_context_cache_values": Metric("counter", "Values, and what became of them.", ("outcome",)),
    "aiodatadist_context_cache_bytes": Metric("counter", "Payloads that were saved or loaded.", ("direction",)),
    "aiodatadist_context_cache_local_hits": Metric("counter", "Loaded values from the local read cache."),
    "aiodatadist_context_cache_damaged": Metric("counter", "Missed values that were there, and not whole."),
    "aiodatadist_context_cache_incidents": Metric(
        "counter", "What pools and calls caused: of each kind the log has one line a second at most.", ("kind",)
    ),
    "aiodatadist_context_cache_in_flight_bytes": Metric("gauge", "Host memory that calls hold."),
    "aiodatadist_context_cache_pool_in_use": Metric("gauge", "1 while the pool is used, 0 while its gate is closed."),
}
"""Of each context cache, with the labels ``cache`` and ``pool``."""

NIXL: Final = {
    "vllm:nixl_xfer_time_seconds": Metric("histogram", "As aiodatadist_transfer_seconds, of pulls and pushes."),
    "vllm:nixl_bytes_transferred": Metric("histogram", "As aiodatadist_transfer_size_bytes, of pulls and pushes."),
    "vllm:nixl_num_descriptors": Metric("histogram", "Ranges of pulls and pushes: how many transfers, and the sum."),
    "vllm:nixl_num_failed_transfers": Metric("counter", "Pulls and pushes that failed."),
    "vllm:nixl_num_kv_expired_reqs": Metric("counter", "Leases that no peer claimed in time."),
}
"""The names of vLLM's NixlConnector, with the label ``cluster``: dashboards made for it show these transfers, too."""

METRICS: Final = {**CLUSTER, **CACHE, **NIXL}
