"""The alert rules ask only for what the collector shows, and say what to do in words whose labels are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import aiodatadist
from aiodatadist._counting import SUCCESS, Incident
from aiodatadist._link import LeaseEnd
from aiodatadist._link.transfers.checksums import FAILURE_CAUSES
from tests.telemetry.test_dashboard import SAMPLES, labels_of

FILE = Path(aiodatadist.__file__).parent / "telemetry" / "alerts.yaml"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(FILE.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]
]
VALUES: dict[str, set[str]] = {
    "kind": set(Incident),
    "reason": set(LeaseEnd),
    "cause": set(FAILURE_CAUSES),
    "state": {"used", "free"},
}
"""The values of labels that rules compare with, by label."""


def metrics_of(query: str) -> list[tuple[str, str]]:
    """Return each metric of a query, and what stands in its braces."""
    names = re.findall(r"(aiodatadist_\w+)(?:\{([^}]*)\})?", query)
    assert names, query
    return names


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_metric_of_a_rule_is_there_with_its_labels(rule: dict[str, Any]) -> None:
    for name, inside in metrics_of(rule["expr"]):
        assert name in SAMPLES, name
        wanted = dict(re.findall(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"', inside))
        assert wanted.keys() <= labels_of(name)
        for label, value in wanted.items():
            known = VALUES.get(label, {SUCCESS, "CANCELLED"})
            assert set(value.split("|")) <= known, f"{label} is never {value}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_counters_are_rated_and_gauges_are_not(rule: dict[str, Any]) -> None:
    for name, _ in metrics_of(rule["expr"]):
        is_rated = re.search(rf"(?:rate|increase)\({name}(?:\{{[^}}]*\}})?\[\d+m\]\)", rule["expr"]) is not None
        assert is_rated is (SAMPLES[name][1].kind == "counter"), name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"AioDataDist[A-Za-z]+", rule["alert"])
    assert re.fullmatch(r"\d+m", rule.get("for", "0m"))
    assert rule["labels"]["severity"] in {"warning", "critical"}
    grouped = re.search(r"\bby \(([^)]*)\)", rule["expr"])
    kept = set(grouped[1].split(", ")) if grouped else labels_of(metrics_of(rule["expr"])[0][0])
    words = rule["annotations"]
    assert set(re.findall(r"\$labels\.(\w+)", " ".join(words.values()))) <= kept
    assert words["description"].endswith(".")
    assert not words["summary"].endswith(".")


def test_the_page_has_each_rule_once() -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "telemetry.md"
    told = re.findall(r"`(AioDataDist\w+)`", page.read_text(encoding="utf-8"))
    assert sorted(told) == sorted(rule["alert"] for rule in RULES)
