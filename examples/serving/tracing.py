"""Spans of a request in all three processes, one trace: the header ``traceparent`` carries it from one to the next.

They go where the process's OpenTelemetry SDK sends them, nowhere where none was set up: ``--spans FILE`` sets one up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
from opentelemetry import propagate, trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from opentelemetry.trace import Span, SpanKind

tracer = trace.get_tracer("examples.serving")
OWN_SPANS: Any = {"tracing": False}
"""Settings that turn off the spans of newer FastAPI versions: requests would have two, and scrapes of ``/metrics`` one."""


@contextmanager
def request_span(headers: Mapping[str, str]) -> Iterator[Span]:
    """Open a span for this service's part of a request: a child of the caller's span, if ``headers`` name one."""
    context = propagate.extract(headers)
    with tracer.start_as_current_span("POST /v1/completions", context, SpanKind.SERVER) as span:
        yield span


@contextmanager
def asking(service: str) -> Iterator[dict[str, str]]:
    """Open a span for a request to another service. Yield JSON headers that make that service's span its child."""
    headers = {"Content-Type": "application/json"}
    with tracer.start_as_current_span(f"ask {service}", kind=SpanKind.CLIENT):
        propagate.inject(headers)
        yield headers


@asynccontextmanager
async def spans_to(path: Path | None, service: str) -> AsyncIterator[None]:
    """Append spans to a file until the end of the block, one per line. If it is None, leave them to the SDK, if any."""
    if path is None:
        yield
        return
    with path.open("a", encoding="utf-8") as file:
        provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service}))
        exporter = ConsoleSpanExporter(out=file, formatter=_line)
        provider.add_span_processor(BatchSpanProcessor(exporter))  # in a thread of its own
        trace.set_tracer_provider(provider)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(provider.shutdown)  # writes what is left


def _line(span: ReadableSpan) -> str:
    return f"{span.to_json(indent=None)}\n"
