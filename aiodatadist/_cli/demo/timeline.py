"""The timeline of a layered transfer: as lines for a terminal, as a trace for Perfetto, as a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aiodatadist._cli.demo.messages import LayerTimes
from aiodatadist._cli.kit.errors import wrong_input
from aiodatadist._cli.kit.numbers import duration
from aiodatadist._cli.kit.options import write_report
from aiodatadist._context_caching.pools.extras import how_to_install

WIDTH = 38


def span(layers: Sequence[LayerTimes]) -> tuple[float, float]:
    """Return the start of the first layer and the arrival of the last."""
    return layers[0].began, max(layer.landed for layer in layers)


def lines(layers: Sequence[LayerTimes], width: int = WIDTH) -> list[str]:
    """Return a bar per layer: ``#`` while it is computed, ``>`` from then on until it has landed in decode's cache."""
    begin, end = span(layers)
    scale = width / (end - begin)

    def column(seconds: float) -> int:
        return min(width, round((seconds - begin) * scale))

    drawn = []
    for layer in layers:
        began, ready, landed = column(layer.began), column(layer.ready), column(layer.landed)
        sending = ">" * max(1, landed - ready)
        bar = (" " * began + "#" * max(1, ready - began) + sending).ljust(width)
        after, later = duration(layer.ready - begin), duration(layer.landed - layer.ready)
        drawn.append(f"layer {layer.layer:>3} |{bar[: width + 1]}| {after:>9}, {later} later")
    computed = layers[-1].ready - begin
    drawn.append(
        f"compute {duration(computed)}, all layers in decode {duration(end - begin - computed)} after the last was ready"
    )
    return drawn


def trace(layers: Sequence[LayerTimes]) -> dict[str, Any]:
    """Return trace events as Perfetto and chrome://tracing read them, in microseconds."""
    begin, _ = span(layers)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
        for tid, name in ((1, "prefill computes"), (2, "layers travel"))
    ]
    for layer in layers:
        for tid, first, last in ((1, layer.began, layer.ready), (2, layer.ready, layer.landed)):
            events.append(
                {
                    "ph": "X",
                    "name": f"layer {layer.layer}",
                    "pid": 1,
                    "tid": tid,
                    "ts": (first - begin) * 1e6,
                    "dur": (last - first) * 1e6,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(layers: Sequence[LayerTimes], path: Path) -> None:
    """Write the trace to a file. Raises CommandError if it cannot be written."""
    write_report("--trace", path, json.dumps(trace(layers)))


def check_plot() -> None:
    """Check that a plot can be drawn. Raises CommandError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise wrong_input(f"--plot needs matplotlib: {how_to_install('plot')}; --trace needs nothing")


def write_plot(layers: Sequence[LayerTimes], path: Path) -> None:
    """Draw the same bars as a plot. Raises CommandError if the file cannot be written."""
    check_plot()
    begin, _ = span(layers)
    figure = import_module("matplotlib.figure").Figure(figsize=(8, 0.3 * len(layers) + 1.2))
    axes = figure.add_subplot()
    for layer in layers:
        axes.barh(layer.layer, (layer.ready - layer.began) * 1e3, left=(layer.began - begin) * 1e3, color="tab:blue")
        axes.barh(layer.layer, (layer.landed - layer.ready) * 1e3, left=(layer.ready - begin) * 1e3, color="tab:orange")
    axes.invert_yaxis()
    axes.set_xlabel("ms since prefill began; blue: computed, orange: on its way")
    axes.set_ylabel("layer")
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise wrong_input(f"{path} cannot be written: {error}") from error
