"""Pictures of ``docs/serving.md``: the metrics, by name and label, and the spans of one request are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serving import pictures
from tests.serving.processes import DIRECT, ROOT, Three, eventually, expected, three

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
TEXT = re.compile(r"<text[^>]*>([^<]*)</text>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spans")


@pytest.fixture(scope="module")
def services(folder: Path) -> Iterator[Three]:
    with three(**pictures.with_spans(folder)) as opened:
        yield opened


@pytest.fixture(scope="module")
def metrics(services: Three) -> dict[str, dict[str, float]]:
    """Return what the services count after one client has had its answer, one has left, and one was refused."""
    url = f"{services.router.url}/v1/completions"
    job = {**pictures.JOB, "stream": False}
    assert httpx.post(url, json=job, **DIRECT).json()["choices"][0]["text"] == expected(job)
    long = {"prompt": "a", "max_tokens": 1500, "stream": True}
    with httpx.stream("POST", url, json=long, **DIRECT) as response:
        next(response.iter_lines())
    eventually(lambda: services.router.metrics().get('serving_requests_total{outcome="disconnected"}'), 1.0)
    assert httpx.post(url, json={"prompt": ""}, **DIRECT).status_code == 400
    services.wait_nothing_kept()
    return {name: getattr(services, name).metrics() for name in pictures.COLOURS}


def test_metrics_of_the_picture_are_shown(metrics: dict[str, dict[str, float]]) -> None:
    for panel in pictures.PANELS:
        for line in panel.lines:
            assert line.metric in metrics[line.service], panel.title
    shown = TEXT.findall(pictures.METRICS.read_text(encoding="utf-8"))
    assert [words for words in shown if re.match("serving_|aiodatadist_", words)] == [
        panel.title for panel in pictures.PANELS
    ]


def test_metrics_of_the_page_are_shown(metrics: dict[str, dict[str, float]]) -> None:
    """Its excerpt, line by line, and the names of its table."""
    (excerpt,) = re.findall(r"curl -s http://127\.0\.0\.1:8002/metrics.*?\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in excerpt.strip().splitlines():
        name, _, value = line.rpartition(" ")
        assert name in metrics["decode"], name
        float(value)
    names = {re.sub(r"[{ ].*", "", name) for found in metrics.values() for name in found}
    table = set(re.findall(r"`((?:serving|process|aiodatadist)_\w+)(?:\{\w+\})?`", PAGE))
    assert table <= names


def test_a_request_is_one_trace_through_three_processes(services: Three, folder: Path) -> None:
    pictures.ask(services)
    trace = pictures.last_trace(folder)
    found = pictures.bars(trace)
    assert [(bar.service, bar.depth, bar.name) for bar in found] == [
        ("router", 0, "POST /v1/completions"),
        ("router", 1, "ask prefill"),
        ("prefill", 2, "POST /v1/completions"),
        ("prefill", 3, "wait for blocks"),
        ("prefill", 3, "compute"),
        ("prefill", 3, "kv.transfer swap_blocks"),
        ("prefill", 3, "lease"),
        ("router", 1, "ask decode"),
        ("decode", 2, "POST /v1/completions"),
        ("decode", 3, "wait for link"),
        ("decode", 3, "wait for blocks"),
        ("decode", 3, "kv.transfer pull_leased"),
        ("decode", 3, "kv.transfer swap_blocks"),
        ("decode", 3, "write tokens"),
    ]
    assert [span["attributes"]["serving.how"] for span in trace if span["name"] == "lease"] == ["taken"]
    shown = TEXT.findall(pictures.TRACE.read_text(encoding="utf-8"))
    assert [words for words in shown if words.replace("· ", "") in {bar.name for bar in found}] == [
        f"{'· ' * bar.depth}{bar.name}" for bar in found
    ]
