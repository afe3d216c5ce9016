"""Samples of clusters and context caches in a registry of Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import anyio
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from aiodatadist import BlocksCacheKey, CacheDesc, CacheNotFound, DataType, LinkPhase, LLMConfig, LLMDataDist, LLMRole
from aiodatadist._testing.views import cut_link
from aiodatadist.context_caching import CcConfig_v1, ContextCache
from aiodatadist.telemetry._metrics import CACHE, CLUSTER, METRICS, NIXL
from aiodatadist.telemetry.prometheus import MetricsCollector
from aiodatadist.testing import cluster_info, inside, linked_pair
from tests.certificates import Authority, tls_folder, uri_of

DESC = CacheDesc(2, [4, 64], DataType.DT_UINT8)
BLOCK = 2 * 64
POOL = '{"memory_size": 1048576, "page_shift": 12}'
KEY = BlocksCacheKey(1)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(registry: CollectorRegistry) -> Samples:
    return parsed(generate_latest(registry).decode())


def parsed(text: str) -> Samples:
    """Parse the text as Prometheus does. No series may be there twice."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            which = sample.name, frozenset(sample.labels.items())
            assert which not in samples, f"{which} is there twice"
            samples[which] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def registered(collector: MetricsCollector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


async def test_transfers_links_and_pools_are_shown() -> None:
    async with linked_pair(DESC, mem_pool_cfg=POOL) as (prompt, decoder, source, cache):
        registry = registered(MetricsCollector(prompt.datadist, decoder.datadist))
        manager = decoder.datadist.cache_manager
        for _ in range(3):
            await manager.pull_blocks(KEY, cache, [1], [2])
        with pytest.raises(CacheNotFound):
            await manager.pull_blocks(BlocksCacheKey(1, 77), cache, [0], [0])
        prompt.datadist.cache_manager.lease_blocks(source, [0], 10)
        await prompt.datadist.cache_manager.lease_blocks(source, [1], 0.001).wait_ended()
        await manager.allocate_blocks_cache(DESC)
        now = scraped(registry)
        pull = {"cluster": "2", "operation": "pull_blocks"}
        assert value(now, "aiodatadist_transfers_total", status="LLM_SUCCESS", **pull) == 3
        assert value(now, "aiodatadist_transfers_total", status="LLM_KV_CACHE_NOT_EXIST", **pull) == 1
        assert value(now, "aiodatadist_transfer_bytes_total", **pull) == 3 * BLOCK
        assert value(now, "aiodatadist_transfers_running", **pull) == 0
        assert value(now, "aiodatadist_transfer_seconds_count", **pull) == 3
        assert value(now, "aiodatadist_transfer_seconds_bucket", le="+Inf", **pull) == 3
        assert 0 < value(now, "aiodatadist_transfer_seconds_sum", **pull) < 3
        assert value(now, "aiodatadist_transfer_queue_seconds_count", **pull) == 3
        assert value(now, "aiodatadist_transfer_size_bytes_bucket", le="256.0", **pull) == 3
        assert value(now, "aiodatadist_transfer_size_bytes_sum", **pull) == 3 * BLOCK
        assert value(now, "aiodatadist_links", cluster="2", state="ready") == 1
        assert value(now, "aiodatadist_links_by_key", cluster="2", key="user") == 1
        assert value(now, "aiodatadist_links", cluster="2", state="broken") == 0
        assert value(now, "aiodatadist_links_made_total", cluster="1") == 1
        assert value(now, "aiodatadist_link_attempts_total", cluster="2", status="LLM_SUCCESS") == 1
        assert value(now, "aiodatadist_link_seconds_count", cluster="2") == 1
        assert value(now, "aiodatadist_leases", cluster="1") == 1
        assert value(now, "aiodatadist_leases_ended_total", cluster="1", reason="expired") == 1
        assert value(now, "aiodatadist_leases_ended_total", cluster="1", reason="peer_lost") == 0
        used = value(now, "aiodatadist_pool_bytes", cluster="2", placement="device", state="used")
        free = value(now, "aiodatadist_pool_bytes", cluster="2", placement="device", state="free")
        assert 0 < used < used + free == 1 << 20
        assert value(now, "aiodatadist_caches", cluster="2") == 2

        assert value(now, "vllm:nixl_xfer_time_seconds_count", cluster="2") == 3
        assert value(now, "vllm:nixl_bytes_transferred_sum", cluster="2") == 3 * BLOCK
        assert value(now, "vllm:nixl_bytes_transferred_bucket", cluster="2", le="256.0") == 3
        assert value(now, "vllm:nixl_num_descriptors_count", cluster="2") == 3
        assert value(now, "vllm:nixl_num_failed_transfers_total", cluster="2") == 1
        assert value(now, "vllm:nixl_num_kv_expired_reqs_total", cluster="1") == 1


async def test_links_that_are_made_again_are_shown() -> None:
    async with linked_pair(DESC, relink={"first_delay": 0.2}) as (prompt, decoder, _, _):
        registry = registered(MetricsCollector(decoder.datadist))
        none = scraped(registry)
        assert value(none, "aiodatadist_relink_attempts_total", cluster="2", status="LLM_SUCCESS") == 0
        changes = decoder.datadist.link_changes()
        await cut_link(inside(prompt.datadist).links.find(2))
        async for change in changes:
            if change.state is LinkPhase.RELINKING:
                break
        assert value(scraped(registry), "aiodatadist_links_relinking", cluster="2") == 1
        async for change in changes:
            if change.state is LinkPhase.LINKED:
                break
        await anyio.wait_all_tasks_blocked()
        now = scraped(registry)
        assert value(now, "aiodatadist_links_relinking", cluster="2") == 0
        assert value(now, "aiodatadist_relink_attempts_total", cluster="2", status="LLM_SUCCESS") == 1
        assert value(now, "aiodatadist_relink_seconds_count", cluster="2") == 1
        assert value(now, "aiodatadist_relink_seconds_sum", cluster="2") > 0
        assert value(now, "aiodatadist_relinks_given_up_total", cluster="2") == 0
        assert value(now, "aiodatadist_link_changes_dropped_total", cluster="2") == 0


async def test_counters_stay_when_links_end_and_clusters_are_finalized() -> None:
    async with linked_pair(DESC, mem_pool_cfg=POOL) as (prompt, decoder, _, cache):
        registry = registered(MetricsCollector(decoder.datadist))
        await decoder.datadist.cache_manager.pull_blocks(KEY, cache, [1], [2])
        before = scraped(registry)
        await decoder.datadist.unlink_clusters([cluster_info(prompt)])
        unlinked = scraped(registry)
    after = scraped(registry)
    counters = [each for each in before if each[0].endswith(("_total", "_count", "_sum", "_bucket"))]
    assert len(counters) > 50
    for now in (unlinked, after):
        assert [each for each in counters if now.get(each, -1.0) < before[each]] == []
        assert value(now, "aiodatadist_links_ended_total", cluster="2", reason="unlinked") == 1
        assert value(now, "aiodatadist_links", cluster="2", state="ready") == 0


async def test_context_caches_are_shown() -> None:
    config = CcConfig_v1(rank_id=0, device_id=0, model_id="model")
    async with await ContextCache.open(config, "memory:?bytes=1MiB") as cache:
        await cache.register_kvcache([[np.zeros((4, 16, 8), np.float16)]])
        registry = registered(MetricsCollector(cache))
        chunks = [[(0, 16), (16, 16)]]
        await cache.save([1, 2], chunks=chunks)
        await cache.load([1, 3], chunks=chunks)
        now = scraped(registry)
        name = cache.figures().pool
        which = {"cache": "context", "pool": name}
        assert value(now, "aiodatadist_context_cache_calls_total", operation="save", status="LLM_SUCCESS", **which) == 1
        assert value(now, "aiodatadist_context_cache_call_seconds_count", operation="load", **which) == 1
        assert value(now, "aiodatadist_context_cache_values_total", outcome="saved", **which) == 2
        assert value(now, "aiodatadist_context_cache_values_total", outcome="loaded", **which) == 1
        assert value(now, "aiodatadist_context_cache_values_total", outcome="missed", **which) == 1
        assert value(now, "aiodatadist_context_cache_bytes_total", direction="saved", **which) == 2 * 16 * 8 * 2
        assert value(now, "aiodatadist_context_cache_pool_in_use", **which) == 1
    assert (
        scraped(registry)["aiodatadist_context_cache_values_total", frozenset({*which.items(), ("outcome", "saved")})]
        == 2
    )


@contextmanager
def served(registry: CollectorRegistry) -> Iterator[str]:
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def test_a_scrape_comes_from_another_thread_and_does_not_wait_for_the_loop() -> None:
    def fetch(url: str) -> Samples:
        with urlopen(url, timeout=20) as answer:
            return parsed(answer.read().decode())

    async with linked_pair(DESC, mem_pool_cfg=POOL) as (_, decoder, _, cache):
        await decoder.datadist.cache_manager.pull_blocks(KEY, cache, [1], [2])
        with served(registered(MetricsCollector(decoder.datadist))) as url:
            beside = await asyncio.to_thread(fetch, url)
            blocked = fetch(url)  # the loop stands still meanwhile
    pull = {"cluster": "2", "operation": "pull_blocks"}
    assert value(beside, "aiodatadist_transfer_bytes_total", **pull) == BLOCK
    assert value(blocked, "aiodatadist_transfer_bytes_total", **pull) == BLOCK


def never_initialised(cluster_id: int) -> LLMDataDist:
    return LLMDataDist(LLMRole.MIX, cluster_id, LLMConfig())


def test_labels_of_the_callers_are_on_every_sample() -> None:
    collector = MetricsCollector(never_initialised(3), labels={"model_name": "llama", "engine": "0"})
    samples = scraped(registered(collector))
    assert samples
    assert all({("model_name", "llama"), ("engine", "0")} <= labels for _, labels in samples)


def test_names_of_nixl_may_be_left_out_where_its_connector_has_them() -> None:
    registry = CollectorRegistry()
    registry.register(MetricsCollector(never_initialised(3)))
    with pytest.raises(ValueError, match="vllm:nixl_xfer_time_seconds"):
        registry.register(MetricsCollector(never_initialised(4)))
    other = registered(MetricsCollector(never_initialised(3), nixl_names=False))
    assert not any(name.startswith("vllm:") for name, _ in scraped(other))


def test_sources_come_and_go() -> None:
    collector, one = MetricsCollector(), never_initialised(3)
    registry = registered(collector)
    assert scraped(registry) == {}
    collector.add(one)
    with pytest.raises(ValueError, match="there is a source named '3' already"):
        collector.add(never_initialised(3))
    collector.add(never_initialised(3), "another")
    assert {dict(labels)["cluster"] for _, labels in scraped(registry)} == {"3", "another"}
    collector.remove(one)
    collector.remove(one)
    assert {dict(labels)["cluster"] for _, labels in scraped(registry)} == {"another"}


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="must be an LLMDataDist or a ContextCache"):
        MetricsCollector(object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="labels has cluster, status"):
        MetricsCollector(labels={"cluster": "x", "status": "y", "mine": "z"})


def test_every_metric_is_described_with_its_kind_and_no_other() -> None:
    described = {family.name: family.type for family in MetricsCollector().describe()}
    assert described == {name: metric.kind for name, metric in METRICS.items()}
    assert len(METRICS) == len(CLUSTER) + len(CACHE) + len(NIXL)


def test_names_are_as_prometheus_wants_them() -> None:
    for name, metric in METRICS.items():
        assert name.startswith("vllm:nixl_" if name in NIXL else "aiodatadist_")
        assert not name.endswith(("_total", "_count", "_sum", "_bucket", "_ms", "_us"))
        assert metric.words.endswith(".")


async def test_every_metric_has_samples_and_each_sample_its_labels(tmp_path: Path) -> None:
    authority = Authority()
    folder = tls_folder(tmp_path / "trust", authority.issue([uri_of(1), uri_of(2)]), authority)
    config = CcConfig_v1(rank_id=0, device_id=0, model_id="model")
    async with (
        linked_pair(DESC, mem_pool_cfg=POOL, trust=folder) as (_, decoder, _, cache),
        await ContextCache.open(config, "memory:?bytes=1MiB") as context,
    ):
        await decoder.datadist.cache_manager.pull_blocks(KEY, cache, [1], [2])
        await context.exists_values(["a"])
        now = scraped(registered(MetricsCollector(decoder.datadist, context)))
    seen: dict[str, set[str]] = {}
    for name, labels in now:
        seen.setdefault(name, set()).update(label for label, _ in labels)
    wanted = {
        sample: set(metric.labels)
        | ({"cache", "pool"} if name in CACHE else {"cluster"})
        | ({"le"} if sample.endswith("_bucket") else set())
        for name, metric in METRICS.items()
        for sample in metric.samples(name)
    }
    assert seen == wanted
