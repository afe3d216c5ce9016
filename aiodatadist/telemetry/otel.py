"""Spans for OpenTelemetry: of transfers, of calls that make or end links, and of calls of a context cache.

Needs the extra ``otel``::

    datadist.observer = cache.observer = SpanObserver()
"""

from __future__ import annotations

from time import time_ns
from typing import Final

from aiodatadist._context_caching.pools.extras import how_to_install
from aiodatadist._counting import Call, Ended, Tell

try:
    from opentelemetry.trace import SpanKind, StatusCode, TracerProvider, get_tracer
    from opentelemetry.util.types import AttributeValue
except ImportError as _error:
    raise ImportError(f"spans need opentelemetry-api: {how_to_install('otel')}") from _error

_FIGURES: Final = ("bytes", "ranges", "queue_seconds", "transfer_seconds", "hits")


class SpanObserver:
    """An observer that makes a span of each call, for any number of clusters and context caches.

    A span is a child of the current span of the caller. It ends when the call has ended, even if no caller waits for
    it. Its name is, for instance, ``kv.transfer pull_blocks``. Its attributes begin with ``aiodatadist.``:
    ``operation``; ``cluster`` and ``peer``, as text, because ids may be larger than an attribute's integers; ``keys``
    and ``hits`` for a context cache; ``bytes``, ``ranges``, ``queue_seconds`` and ``transfer_seconds``; and ``status``.
    A failure sets the span's status, an exception event, and ``error.type``; a cancellation is not a failure.

    Args:
        tracer_provider: the global one if omitted. If it has no SDK behind it, nothing is recorded.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = get_tracer("aiodatadist", tracer_provider=tracer_provider)

    def began(self, call: Call) -> Tell | None:
        """Start the span of a call; see :class:`~aiodatadist.telemetry.Observer`."""
        attributes: dict[str, AttributeValue] = {"aiodatadist.operation": call.operation}
        if call.cluster_id is not None:
            attributes["aiodatadist.cluster"] = str(call.cluster_id)
        if call.peer is not None:
            attributes["aiodatadist.peer"] = str(call.peer)
        if call.keys is not None:
            attributes["aiodatadist.keys"] = call.keys
        span = self._tracer.start_span(
            f"kv.{call.kind} {call.operation}",
            kind=SpanKind.INTERNAL if call.peer == call.cluster_id else SpanKind.CLIENT,
            attributes=attributes,
            start_time=time_ns() - round(1e9 * call.age_seconds),
        )
        if not span.is_recording():
            span.end()
            return None

        def ended(what: Ended) -> None:
            span.set_attribute("aiodatadist.status", what.status)
            for name in _FIGURES:
                value = getattr(what, name)
                if value is not None:
                    span.set_attribute(f"aiodatadist.{name}", value)
            if what.error is not None:
                span.set_attribute("error.type", type(what.error).__qualname__)
                span.record_exception(what.error)
                span.set_status(StatusCode.ERROR, str(what.error))
            span.end()

        return ended
