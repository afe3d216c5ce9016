"""Incidents that others cause at an engine, from a pull that fails to a sample of vLLM's registry."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as PromCounter

from aiodatadist import new_lease_name
from aiodatadist._adapters.block_service import BlockService
from aiodatadist._adapters.ended import Ended
from aiodatadist._adapters.pull_orders import PullOrder, WorkerAddress
from aiodatadist._adapters.settings import Settings
from tests.adapters.kv_memory import opaque, opaque_memory
from tests.adapters.test_block_service import PROMPT
from tests.hostile.vllm_names import figures_of_vllm

LAYOUT: dict[str, str | int] = {"block_size": 16, "dtype": "uint8"}
NOWHERE = WorkerAddress(cluster_id=9, host="127.0.0.1", port=9, cache_ids=(1,), layout=LAYOUT, memory=opaque_memory())


@pytest.fixture
def stats() -> Iterator[Any]:
    with figures_of_vllm() as module:
        yield module


def failed_pulls(number: int) -> Iterator[Ended]:
    """Fail ``number`` requests, which name a port at which nothing listens, and yield what the engine reports."""
    array = np.zeros((8, 4096), np.uint8)
    with closing(BlockService(Settings(link_seconds=1))) as service:
        service.open(opaque([[array]], 8), LAYOUT)
        left = {f"r{each}" for each in range(number)}
        for name in left:
            service.pull(PullOrder(name, (NOWHERE,), new_lease_name(), (1,), (2,), PROMPT))
        while left:
            time.sleep(0)
            ended = service.take()
            left -= ended.received
            yield ended


def test_failed_pulls_are_counted_by_kind_and_no_outcome_is_counted_twice(stats: Any) -> None:
    told = stats.TransferStats()
    for ended in failed_pulls(20):
        told.add(ended)
    assert told.data["incidents"]["pull_failed"] == told.data["counters"]["pull_failed"] == 20
    assert told.reduce()["num_failed_transfers"] == 20


def test_a_registry_has_a_fixed_set_of_kinds(stats: Any) -> None:
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Gauge, PromCounter, Histogram)}
    made = SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"], 1: ["1"]}
    metrics, other = (stats.TransferMetrics(*made, name) for name in ("Pulls", "Prefixes"))  # in one process
    worker = stats.TransferStats({"counters": {}, "seconds": [], "incidents": {"link_failed": 40, "no kind": 1}})
    assert not worker.is_empty()
    metrics.observe(worker.aggregate(stats.stats_of(Counter(offer_elsewhere=3))).data, 1)

    other.observe({"counters": {}, "seconds": [], "incidents": {"link_failed": 2}}, 1)

    def figure(kind: str, engine: str, connector: str = "Pulls") -> float | None:
        labels = {"engine": engine, "kind": kind, "connector": connector}
        return registry.get_sample_value("vllm:aiodatadist_incidents_total", labels)

    assert figure("link_failed", "1") == 40
    assert figure("link_failed", "1", "Prefixes") == 2
    assert figure("offer_elsewhere", "1") == 3
    assert figure("link_failed", "0") == figure("pull_failed", "1") == 0
    assert figure("no kind", "1") is None
    labels = {"engine": "1", "connector": "Pulls"}
    assert registry.get_sample_value("vllm:aiodatadist_num_elsewhere_offers_total", labels) == 3
