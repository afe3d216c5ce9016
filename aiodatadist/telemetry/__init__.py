"""Observability: metrics for Prometheus, spans for OpenTelemetry, and a dashboard for Grafana.

``prometheus`` and ``otel`` need the extras of these names, and nothing else in the package imports them. The figures
and the :class:`Observer` protocol are here, so the caller's observer needs no extra. ``metrics`` lists every
metric, and ``grafana.json`` beside it is the dashboard.
"""

from aiodatadist._context_caching.calls import CacheFigures
from aiodatadist._counting import Call, Ended, Figures, FlowFigures, Observer

__all__ = ["CacheFigures", "Call", "Ended", "Figures", "FlowFigures", "Observer"]
