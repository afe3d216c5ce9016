"""Spans: of transfers, links and calls of context caches, each a child of its caller's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from time import time_ns

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    CacheDesc,
    CacheNotFound,
    DataType,
    TransferWithCacheKeyConfig,
)
from aiodatadist.context_caching import CcConfig_v1, ContextCache
from aiodatadist.telemetry import Call, Ended
from aiodatadist.telemetry.otel import SpanObserver
from aiodatadist.testing import cluster_info, linked_pair, open_cluster

DESC = CacheDesc(2, [4, 64], DataType.DT_UINT8)
BLOCK = 2 * 64
KEY = BlocksCacheKey(1)


class Traced:
    """A provider that keeps its spans, and an observer that makes them."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.tracer = self.provider.get_tracer("test")
        self.observer = SpanObserver(self.provider)

    def ended(self, name: str) -> Sequence[ReadableSpan]:
        return [span for span in self._spans.get_finished_spans() if span.name == name]

    def only(self, name: str) -> ReadableSpan:
        (span,) = self.ended(name)
        return span


def attributes(span: ReadableSpan) -> dict[str, object]:
    return {name.removeprefix("aiodatadist."): value for name, value in (span.attributes or {}).items()}


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return span.parent is not None and parent.context is not None and span.parent.span_id == parent.context.span_id


async def test_a_transfer_is_a_child_of_its_callers_span() -> None:
    traced = Traced()
    async with linked_pair(DESC) as (_, decoder, _, cache):
        decoder.datadist.observer = traced.observer
        manager = decoder.datadist.cache_manager
        before = time_ns()
        with traced.tracer.start_as_current_span("request"):
            report = await manager.pull_blocks(KEY, cache, [0, 1], [2, 3])  # the long way
        with traced.tracer.start_as_current_span("another request"):
            await manager.pull_blocks(KEY, cache, [0], [1])  # a shortcut
        after = time_ns()
    first, second = traced.ended("kv.transfer pull_blocks")
    assert is_child(first, traced.only("request"))
    assert is_child(second, traced.only("another request"))
    assert attributes(first) == {
        "operation": "pull_blocks",
        "cluster": "2",
        "peer": "1",
        "bytes": 2 * BLOCK,
        "ranges": report.ranges,
        "queue_seconds": report.queue_seconds,
        "transfer_seconds": report.transfer_seconds,
        "status": "LLM_SUCCESS",
    }
    assert attributes(second)["bytes"] == BLOCK
    for span in (first, second):
        assert span.status.status_code is StatusCode.UNSET
        assert span.start_time is not None
        assert span.end_time is not None
        assert before <= span.start_time <= span.end_time <= after


async def test_a_failure_is_on_its_span() -> None:
    traced = Traced()
    async with linked_pair(DESC) as (_, decoder, _, cache):
        decoder.datadist.observer = traced.observer
        with pytest.raises(CacheNotFound) as raised:
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1, 77), cache, [0], [0])
    span = traced.only("kv.transfer pull_blocks")
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == str(raised.value)
    assert attributes(span)["status"] == "LLM_KV_CACHE_NOT_EXIST"
    assert attributes(span)["error.type"] == "CacheNotFound"
    (event,) = span.events
    assert event.name == "exception"


async def test_a_cancelled_transfer_is_no_failure_and_its_span_ends_when_it_does() -> None:
    traced = Traced()
    async with linked_pair(DESC) as (_, decoder, _, cache):
        decoder.datadist.observer = traced.observer
        config = TransferWithCacheKeyConfig(KEY, range(1), range(1))
        ready = AwaitableLayerSynchronizer(1)
        task = decoder.datadist.cache_manager.transfer_cache_async(cache, ready, [config], [0], [0])
        assert traced.ended("kv.transfer transfer_cache_async") == []
        task.cancel()
        await task.get_results()
        span = traced.only("kv.transfer transfer_cache_async")
    assert attributes(span)["status"] == "CANCELLED"
    assert span.status.status_code is StatusCode.UNSET


async def test_copies_are_internal() -> None:
    traced = Traced()
    async with linked_pair(DESC) as (_, decoder, _, cache):
        decoder.datadist.observer = traced.observer
        await decoder.datadist.cache_manager.copy_blocks(cache, {0: [1]})
        await decoder.datadist.cache_manager.pull_blocks(KEY, cache, [0], [1])
    assert traced.only("kv.transfer copy_blocks").kind.name == "INTERNAL"
    assert traced.only("kv.transfer pull_blocks").kind.name == "CLIENT"


async def test_each_peer_of_a_call_that_links_has_a_span() -> None:
    traced = Traced()
    async with open_cluster(1, device_id=0) as prompt, open_cluster(2**64 - 1, device_id=1) as decoder:
        decoder.datadist.observer = traced.observer
        there = cluster_info(prompt)
        nowhere = type(there)(9)
        with traced.tracer.start_as_current_span("start-up"):
            await decoder.datadist.link_clusters([there, nowhere], 5000)
        await decoder.datadist.unlink_clusters([there])
    spans = {attributes(span)["peer"]: span for span in traced.ended("kv.link link_clusters")}
    assert spans.keys() == {"1", "9"}
    assert all(is_child(span, traced.only("start-up")) for span in spans.values())
    assert attributes(spans["1"])["cluster"] == str(2**64 - 1)  # more than an attribute's integers
    assert attributes(spans["1"])["status"] == "LLM_SUCCESS"
    assert attributes(spans["9"])["status"] == "LLM_PARAM_INVALID"
    assert "has 0 remote addresses" in str(spans["9"].status.description)
    assert attributes(traced.only("kv.link unlink_clusters"))["status"] == "LLM_SUCCESS"


async def test_calls_of_a_context_cache_have_spans() -> None:
    traced = Traced()
    config = CcConfig_v1(rank_id=0, device_id=0, model_id="model")
    async with await ContextCache.open(config, "memory:?bytes=1MiB") as cache:
        cache.observer = traced.observer
        assert cache.observer is traced.observer
        await cache.register_kvcache([[np.zeros((4, 16, 8), np.float16)]])
        chunks = [[(0, 16), (16, 16)]]
        with traced.tracer.start_as_current_span("request"):
            await cache.save([1, 2], chunks=chunks)
            await cache.load([1, 3], chunks=chunks)
            await cache.exists([1, 2, 3])
            await cache.remove([1])
        stopped = cache.start_load([2, 4], chunks=chunks)
        stopped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped
    request = traced.only("request")
    for operation, keys, hits in (("save", 2, 2), ("exists", 3, 2), ("remove", 1, None)):
        span = traced.only(f"kv.context_cache {operation}")
        assert is_child(span, request)
        assert attributes(span)["status"] == "LLM_SUCCESS"
        assert (attributes(span)["keys"], attributes(span).get("hits")) == (keys, hits)
    load, cancelled = traced.ended("kv.context_cache load")
    assert (attributes(load)["hits"], attributes(cancelled)["status"]) == (1, "CANCELLED")


async def test_nothing_is_recorded_without_an_observer_nor_where_spans_are_not_sampled() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with linked_pair(DESC) as (_, decoder, _, cache):
        assert decoder.datadist.observer is None
        for observer in (SpanObserver(provider), SpanObserver(), None):
            decoder.datadist.observer = observer
            await decoder.datadist.cache_manager.pull_blocks(KEY, cache, [0], [1])
    assert exporter.get_finished_spans() == ()
    assert SpanObserver(provider).began(Call("transfer", "pull_blocks")) is None


@pytest.mark.parametrize("when", ["beginning", "end"])
async def test_an_observer_that_fails_concerns_no_transfer(when: str, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def began(self, call: Call) -> object:
            if when == "beginning":
                raise ZeroDivisionError
            return self._ended

        def _ended(self, what: Ended) -> None:
            raise ZeroDivisionError

    async with linked_pair(DESC) as (prompt, decoder, _, cache):
        decoder.datadist.observer = Broken()  # type: ignore[assignment]
        report = await decoder.datadist.cache_manager.pull_blocks(KEY, cache, [0], [1])
        assert report.bytes == BLOCK
        await decoder.datadist.unlink_clusters([cluster_info(prompt)])
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 2
    assert all(f"failed at the {when} of" in line for line in told)
