"""The dashboard asks only for what the collector shows: metrics by their names, and labels that they have."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import aiodatadist
from aiodatadist._counting import SUCCESS
from aiodatadist.telemetry._metrics import CLUSTER, METRICS, NIXL, Metric

DASHBOARD = json.loads((Path(aiodatadist.__file__).parent / "telemetry" / "grafana.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel.get("targets", ())]
VARIABLES = {each["name"] for each in DASHBOARD["templating"]["list"]}

SAMPLES: dict[str, tuple[str, Metric]] = {
    sample: (name, metric) for name, metric in METRICS.items() for sample in metric.samples(name)
}
FUNCTIONS = {"sum", "by", "rate", "increase", "histogram_quantile"}


def labels_of(sample: str) -> set[str]:
    name, metric = SAMPLES[sample]
    which = {"cluster"} if name in CLUSTER or name in NIXL else {"cache", "pool"}
    return which | set(metric.labels) | ({"le"} if sample.endswith("_bucket") else set())


def selectors(query: str) -> list[tuple[str, dict[str, str]]]:
    """Return each metric of a query, and what its labels must be."""
    found = re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", query)
    return [(name, dict(re.findall(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"', inside))) for name, inside in found]


def words(query: str) -> set[str]:
    """Return the functions of a query: the names left without its selectors, durations and lists of labels."""
    rest = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)", "", query)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", rest)) - set(SAMPLES)


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_every_metric_of_a_query_is_shown_and_has_its_labels(title: str, query: str) -> None:
    assert selectors(query), title
    grouped = {label for labels in re.findall(r"\bby \(([^)]*)\)", query) for label in labels.split(", ")}
    for name, wanted in selectors(query):
        assert name in SAMPLES, f"{title}: there is no {name}"
        assert wanted.keys() | grouped <= labels_of(name), f"{title}: {name} has {sorted(labels_of(name))}"
        if "status" in wanted:
            assert wanted["status"] == SUCCESS
    assert words(query) <= FUNCTIONS, title
    assert query.count("(") == query.count(")")


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_counters_are_rated_and_gauges_are_not(title: str, query: str) -> None:
    for name, _ in selectors(query):
        is_rated = (
            re.search(rf"(?:rate|increase)\({re.escape(name)}\{{[^}}]*\}}\[\$__rate_interval\]\)", query) is not None
        )
        assert is_rated is (SAMPLES[name][1].kind != "gauge"), f"{title}: {name}"


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in PANELS:
        for target in panel.get("targets", ()):
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = {label for labels in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for label in labels.split(", ")}
            (first, _), *_ = selectors(target["expr"])
            assert named <= (kept or labels_of(first)), panel["title"]


def test_variables_are_there_and_ask_for_labels_that_are() -> None:
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(PANELS))) - {"__rate_interval"}
    assert used == VARIABLES
    asked = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    for query in asked:
        match = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
        assert match is not None
        assert match[2] in labels_of(match[1])


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for one, other in combinations([panel["gridPos"] for panel in PANELS], 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart |= one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PANELS)


def test_every_metric_has_a_panel() -> None:
    """Metrics under vLLM's names repeat others, and need none."""
    asked = {SAMPLES[name][0] for _, query in QUERIES for name, _ in selectors(query)}
    assert METRICS.keys() - asked == NIXL.keys()
