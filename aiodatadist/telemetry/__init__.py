"""To be seen: metrics for Prometheus, spans for OpenTelemetry, and a dashboard for Grafana.

``prometheus`` and ``otel`` need the extras of these names, and nothing else of the package imports them. What is counted, and
who may be told of calls, is here: an :class:`Observer` of a caller's own needs no extra. ``metrics`` has every metric's name,
and ``grafana.json`` beside it is the dashboard.
"""

from aiodatadist.context_caching.calls import CacheFigures
from aiodatadist.counting import Call, Ended, Figures, FlowFigures, Observer

__all__ = ["CacheFigures", "Call", "Ended", "Figures", "FlowFigures", "Observer"]
