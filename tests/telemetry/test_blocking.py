"""Telemetry of code that does not await: its transfers happen in another thread, and belong to its spans all the same."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from aiodatadist.telemetry.prometheus import MetricsCollector
from tests.blocking.pairs import DESC, KEY, linked_pair
from tests.telemetry.test_metrics import scraped, value
from tests.telemetry.test_spans import Traced, attributes, is_child


def test_a_cluster_without_await_is_shown() -> None:
    with linked_pair() as pair:
        prompt, decoder = pair.source, pair.target
        registry = CollectorRegistry()
        registry.register(MetricsCollector(decoder.datadist))
        decoder.manager.pull_blocks(KEY, decoder.cache, [1], [2])
        handle = decoder.manager.submit_pull_blocks(KEY, decoder.cache, [3], [4])
        assert handle.wait(20)
        while_linked = scraped(registry)
        decoder.datadist.unlink_clusters([prompt.info])
    pull = {"cluster": str(decoder.cluster_id), "operation": "pull_blocks"}
    for now in (while_linked, scraped(registry)):
        assert value(now, "aiodatadist_transfers_total", status="LLM_SUCCESS", **pull) == 2
        assert value(now, "aiodatadist_transfer_bytes_total", **pull) == 2 * DESC.num_tensors * (32 << 10)


def test_transfers_of_the_loops_thread_are_children_of_their_callers_span() -> None:
    traced = Traced()
    with linked_pair() as pair:
        prompt, decoder = pair.source, pair.target
        decoder.datadist.observer = traced.observer
        assert decoder.datadist.observer is traced.observer
        with traced.tracer.start_as_current_span("called"):
            decoder.manager.pull_blocks(KEY, decoder.cache, [1], [2])
        with traced.tracer.start_as_current_span("submitted"):
            handle = decoder.manager.submit_pull_blocks(KEY, decoder.cache, [3], [4])
        assert handle.wait(20)
        with traced.tracer.start_as_current_span("unlinked"):
            decoder.datadist.unlink_clusters([prompt.info])
    called, submitted = traced.ended("kv.transfer pull_blocks")
    assert is_child(called, traced.only("called"))
    assert is_child(submitted, traced.only("submitted"))
    assert attributes(submitted)["status"] == "LLM_SUCCESS"
    assert is_child(traced.only("kv.link unlink_clusters"), traced.only("unlinked"))
