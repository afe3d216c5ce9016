"""docs/npu.md, and its translation: every prediction has a row, a test that is there, and the probe step that decides it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aiodatadist._cli.probe.steps import STEPS

ROOT = Path(__file__).resolve().parents[2]
PREDICTIONS = [f"B{number}" for number in range(1, 22)]


def rows(page: str) -> dict[str, list[str]]:
    """Return the cells of each row that begins with a prediction's name."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = re.findall(r"^\| (B\d+) \|(.*)\|$", text, flags=re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split(" | ")] for name, rest in lines}


@pytest.mark.parametrize("page", ["npu.md", "npu.zh.md"])
def test_every_prediction_has_a_row(page: str) -> None:
    found = rows(page)
    assert list(found) == PREDICTIONS
    assert {len(row) for row in found.values()} == {4}


def test_every_row_names_a_test_that_is_there() -> None:
    for name, row in rows("npu.md").items():
        files = re.findall(r"`((?:native/)?tests/[^`]*)`", row[2])
        assert files, name
        assert [file for file in files if not (ROOT / file).is_file()] == [], name


@pytest.mark.parametrize(("page", "decides"), [("npu.md", "decided by probe step"), ("npu.zh.md", "步判定")])
def test_rows_name_the_probe_steps_that_decide_them(page: str, decides: str) -> None:
    found = rows(page)
    by_step = {step.number: step.decides for step in STEPS if step.decides}
    named = {name: re.findall(r"(?<![\w.])\d+b?(?!\w)", row[-1].rpartition("probe")[2]) for name, row in found.items()}
    for name, row in found.items():
        if decides in row[-1]:
            assert {by_step[number] for number in named[name]} == {name}
    assert {number for name, row in found.items() if decides in row[-1] for number in named[name]} == set(by_step)
