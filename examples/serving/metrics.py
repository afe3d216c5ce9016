"""Metrics of a service, as plain text for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest

TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Metrics of one service. Each has its own registry, so that several services can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # open descriptors, memory, processor time
        self.requests = self.counter("serving_requests", "Requests, by how they ended", "outcome")
        self.gauge("serving_tasks", "Tasks of the event loop", lambda: len(asyncio.all_tasks()))

    def counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, labels, registry=self.registry)

    def gauge(self, name: str, what: str, look: Callable[[], float]) -> None:
        """Add a gauge. ``look`` is called when the metrics are asked for."""
        Gauge(name, what, registry=self.registry).set_function(look)

    def ended(self, outcome: str) -> None:
        self.requests.labels(outcome).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
