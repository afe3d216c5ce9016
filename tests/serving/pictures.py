"""The pictures of ``docs/serving.md``, of a run of the three services: ``python -m tests.serving.pictures``.

``docs/serving-metrics.svg`` is what ``/metrics`` said while the clients of ``tests/serving/test_load.py`` came and left, and
prefill was killed and started again. ``docs/serving-trace.svg`` has the spans of one request.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx

from tests.serving.processes import DIRECT, ROOT, Job, Three, three
from tests.serving.test_load import CLIENTS, SMALL, Load, jobs_of

DOCS = ROOT / "docs"
METRICS, TRACE = DOCS / "serving-metrics.svg", DOCS / "serving-trace.svg"
SCRAPE_SECONDS = 0.1
WIDTH = 480
"""Of both pictures: a phone shows them with letters of ten pixels."""
JOB: Job = {"prompt": "Once upon a time, " * 6, "max_tokens": 8, "stream": True}
"""The request whose spans are shown."""

BLUE, ORANGE, GREEN, GREY = "#0b5cad", "#b3470b", "#1c7a3e", "#667077"

# ---- what is measured ----


@dataclass(frozen=True)
class Line:
    """A metric of a service over time. Values are divided by ``scale``."""

    service: str
    metric: str
    name: str
    colour: str
    scale: float = 1.0


@dataclass(frozen=True)
class Panel:
    title: str
    lines: tuple[Line, ...]


PANELS = (
    Panel(
        "serving_requests_total",
        (
            Line("router", 'serving_requests_total{outcome="answered"}', "answered", GREEN),
            Line("router", 'serving_requests_total{outcome="disconnected"}', "disconnected", ORANGE),
            Line("router", 'serving_requests_total{outcome="refused"}', "refused", GREY),
        ),
    ),
    Panel(
        "aiodatadist_transfer_bytes_total, MiB",
        (
            Line(
                "decode",
                'aiodatadist_transfer_bytes_total{cluster="2",operation="pull_leased"}',
                "pull_leased",
                BLUE,
                1 << 20,
            ),
        ),
    ),
    Panel("aiodatadist_leases, of prefill", (Line("prefill", 'aiodatadist_leases{cluster="1"}', "leases", BLUE),)),
    Panel(
        "serving_blocks_free",
        (
            Line("prefill", "serving_blocks_free", "prefill", ORANGE),
            Line("decode", "serving_blocks_free", "decode", BLUE),
        ),
    ),
    Panel(
        "serving_requests_waiting",
        (
            Line("prefill", "serving_requests_waiting", "prefill", ORANGE),
            Line("decode", "serving_requests_waiting", "decode", BLUE),
        ),
    ),
    Panel(
        "aiodatadist_links, of decode",
        (Line("decode", 'aiodatadist_links{cluster="2",state="ready"}', "ready", BLUE),),
    ),
)

Scrape = dict[str, dict[str, float]]
"""Of each service that answered."""


@dataclass
class Run:
    """Scrapes with the seconds at which they were made, and the seconds between which prefill did not answer."""

    scrapes: list[tuple[float, Scrape]]
    away: tuple[float, float]
    scraped: anyio.Event = field(default_factory=anyio.Event)

    async def more(self, count: int) -> None:
        """Wait for that many more scrapes."""
        for _ in range(count):
            await self.scraped.wait()

    def values(self, line: Line) -> list[tuple[float, float | None]]:
        """Return a line's values: None while the service was away, 0 for a counter that has not counted yet."""
        return [
            (at, found[line.service].get(line.metric, 0.0) / line.scale if line.service in found else None)
            for at, found in self.scrapes
        ]


async def watch(services: Three, run: Run, start: float) -> None:
    """Scrape the services until cancelled."""
    named = {"router": services.router, "prefill": services.prefill, "decode": services.decode}
    while True:
        found: Scrape = {}
        at = time.monotonic() - start
        for name, service in named.items():
            try:
                found[name] = await anyio.to_thread.run_sync(service.metrics)
            except httpx.TransportError:
                continue
        run.scrapes.append((at, found))
        run.scraped.set()
        run.scraped = anyio.Event()
        await anyio.sleep(SCRAPE_SECONDS)


async def loaded() -> Run:
    """Run the load of the test and watch it."""
    with three(prefill=SMALL, decode=SMALL, router=("--retry-seconds", "30")) as services:
        load, run, start = Load(services), Run([], (0.0, 0.0)), time.monotonic()
        async with anyio.create_task_group() as group:
            group.start_soon(watch, services, run, start)
            await load.run(jobs_of(CLIENTS))
            await anyio.to_thread.run_sync(services.wait_nothing_kept)
            await run.more(3)  # of which the first may have begun before
            group.cancel_scope.cancel()
    there = [at for at, found in run.scrapes if "prefill" in found]
    lost = next(at for at, found in run.scrapes if "prefill" not in found)
    run.away = max(at for at in there if at < lost), min(at for at in there if at > lost)
    return run


@dataclass(frozen=True)
class Bar:
    """A span, as it is drawn: times are milliseconds since its trace began."""

    name: str
    service: str
    depth: int
    start: float
    end: float


def with_spans(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the options with which each service writes its spans."""
    return {name: ("--spans", str(folder / name)) for name in COLOURS}


def ask(services: Three) -> None:
    """Make the request whose spans are shown, and end the services, which then write the spans."""
    response = httpx.post(f"{services.router.url}/v1/completions", json=JOB, **DIRECT)
    assert response.text.endswith("data: [DONE]\n\n"), response.text
    services.wait_nothing_kept()
    for service in services.all:
        service.terminate()
        service.wait_ended()


def traced(folder: Path) -> list[Bar]:
    """Return the spans of one request, after others that found nothing warm."""
    with three(**with_spans(folder)) as services:
        for _ in range(5):
            httpx.post(f"{services.router.url}/v1/completions", json=JOB, **DIRECT)
        ask(services)
    return bars(last_trace(folder))


def last_trace(folder: Path) -> list[dict[str, Any]]:
    """Return all spans of the last request, from the files of the services."""
    lines = [line for path in folder.iterdir() for line in path.read_text(encoding="utf-8").splitlines()]
    spans = [json.loads(line) for line in lines]
    roots = [span for span in spans if span["parent_id"] is None and service_of(span) == "router"]
    root = max(roots, key=lambda span: str(span["start_time"]))
    return [span for span in spans if span["context"]["trace_id"] == root["context"]["trace_id"]]


def bars(trace: Sequence[dict[str, Any]]) -> list[Bar]:
    """Return the bars of a trace, from the outside in."""
    inside: dict[str | None, list[dict[str, Any]]] = {}
    for span in trace:
        inside.setdefault(span["parent_id"], []).append(span)
    (root,) = inside[None]
    begin = millis(root["start_time"])

    def below(span: dict[str, Any], depth: int) -> Iterator[Bar]:
        start, end = (millis(span[which]) - begin for which in ("start_time", "end_time"))
        yield Bar(span["name"], service_of(span), depth, start, end)
        for child in sorted(inside.get(span["context"]["span_id"], ()), key=lambda each: str(each["start_time"])):
            yield from below(child, depth + 1)

    return list(below(root, 0))


def service_of(span: dict[str, Any]) -> str:
    return str(span["resource"]["attributes"]["service.name"])


def millis(when: str) -> float:
    """Convert a time as the SDK writes it to milliseconds."""
    return 1e3 * datetime.fromisoformat(when).timestamp()


# ---- how it is drawn ----

HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    ' font-family="system-ui, sans-serif" font-size="13" role="img">\n<title>{title}</title>\n'
    '<rect width="{width}" height="{height}" fill="#fff"/>\n'
)


def text(x: float, y: float, words: str, colour: str = "#24292f", more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}"{more}>{escape(words)}</text>'


def svg(title: str, height: float, parts: Iterable[str]) -> str:
    return HEAD.format(width=WIDTH, height=round(height), title=escape(title)) + "\n".join(parts) + "\n</svg>\n"


LEFT, RIGHT, TOP, ROOM, PLOT = 44, 12, 46, 120, 74
"""Pixels: margins, a panel's height, and that of what is drawn in it."""


def draw_metrics(run: Run) -> str:
    """Draw the panels one above the other, over the same time."""
    last = run.scrapes[-1][0]
    scale = (WIDTH - LEFT - RIGHT) / last
    bottom = TOP + ROOM * len(PANELS)
    from_, to = (LEFT + scale * at for at in run.away)
    parts = [
        text(12, 20, f"{CLIENTS} clients, a quarter leaves", more=' font-weight="600"'),
        f'<rect x="{from_:.1f}" y="46" width="{to - from_:.1f}" height="{bottom - 46}" fill="#fbe3d6"/>',
        text(min(from_, WIDTH - 175), 40, "prefill killed, and started again", ORANGE, ' font-size="12"'),
    ]
    for number, panel in enumerate(PANELS):
        parts += draw_panel(run, panel, TOP + ROOM * number, scale)
    for second in range(0, int(last) + 1, 1 if last < 12 else 5):
        x = LEFT + scale * second
        parts.append(text(x, bottom + 14, f"{second} s", GREY, ' text-anchor="middle" font-size="12"'))
    return svg("/metrics of a router, a prefill and a decode service under load", bottom + 24, parts)


def draw_panel(run: Run, panel: Panel, top: float, scale: float) -> Iterator[str]:
    series = [(line, run.values(line)) for line in panel.lines]
    most = max([value for _, values in series for _, value in values if value is not None] + [1e-9])
    base = top + 28 + PLOT
    yield text(12, top + 18, panel.title)
    yield f'<path d="M{LEFT} {base - PLOT}H{WIDTH - RIGHT}M{LEFT} {base}H{WIDTH - RIGHT}" stroke="#d0d7de" fill="none"/>'
    end = ' text-anchor="end" font-size="12"'
    yield text(LEFT - 6, base - PLOT + 5, f"{most:.3g}", GREY, end)
    yield text(LEFT - 6, base + 4, "0", GREY, end)
    x = float(WIDTH - RIGHT)
    for line, values in reversed(series):
        for piece in pieces(values):
            points = " ".join(f"{LEFT + scale * at:.1f},{base - PLOT * value / most:.1f}" for at, value in piece)
            yield f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="2"/>'
        if len(series) > 1:
            yield text(x, top + 18, line.name, line.colour, ' text-anchor="end" font-size="12" font-weight="600"')
            x -= 7.2 * len(line.name) + 14


def pieces(values: Sequence[tuple[float, float | None]]) -> Iterator[list[tuple[float, float]]]:
    """Split a service's line into pieces: it has a gap while the service was away."""
    piece: list[tuple[float, float]] = []
    for at, value in values:
        if value is not None:
            piece.append((at, value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


ROW = 34
COLOURS = {"router": GREY, "prefill": ORANGE, "decode": BLUE}


def draw_trace(found: Sequence[Bar]) -> str:
    """Draw a row for each span: its name, its duration, and below them its time."""
    last = max(bar.end for bar in found)
    scale = (WIDTH - 24) / last
    bottom = 40 + ROW * len(found)
    parts = [text(12, 20, f"One request, {last:.0f} ms", more=' font-weight="600"')]
    x = 210.0
    for service, colour in COLOURS.items():
        parts += [f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}"/>', text(x + 17, 20, service)]
        x += 88
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if last / step < 8)
    for tick in range(0, int(last) + 1, step):
        at = 12 + scale * tick
        parts.append(f'<path d="M{at:.1f} 32V{bottom}" stroke="#d0d7de"/>')
        parts.append(
            text(at, bottom + 14, f"{tick} ms", GREY, f' text-anchor="{"middle" if tick else "start"}" font-size="12"')
        )
    for number, bar in enumerate(found):
        y = 36 + ROW * number
        start, width = 12 + scale * bar.start, max(scale * (bar.end - bar.start), 1.5)
        colour = COLOURS[bar.service]
        words = f"{'· ' * bar.depth}{bar.name}"
        parts.append(text(12, y + 14, words, colour))
        parts.append(
            text(WIDTH - 12, y + 14, f"{bar.end - bar.start:.1f} ms", GREY, ' text-anchor="end" font-size="12"')
        )
        parts.append(f'<rect x="{start:.1f}" y="{y + 19}" width="{width:.1f}" height="9" rx="2" fill="{colour}"/>')
    return svg("The spans of one request in three processes", bottom + 24, parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.serving.pictures", description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=DOCS, help="a folder")
    into = parser.parse_args().into
    with tempfile.TemporaryDirectory() as folder:
        (into / TRACE.name).write_text(draw_trace(traced(Path(folder))), encoding="utf-8")
    (into / METRICS.name).write_text(draw_metrics(anyio.run(loaded)), encoding="utf-8")


if __name__ == "__main__":
    main()
