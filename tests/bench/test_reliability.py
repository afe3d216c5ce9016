"""The page of reliability: each row has a figure or says where it is from, and its benchmark does what it says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import reliability_rows
from benchmarks.reliability import MEASURES, ORDER
from benchmarks.reliability_rows import CELLS, DOCS, Seconds, figure, rows_of, write_page
from tests import children
from tests.profiles import at_night

ELSEWHERE = {"R1", "R9", "R27", "R29"}
"""Rows whose figures are of other benchmarks, or of tests."""
QUICK = ["R5,R6,R7", "R8,R10,R11,R12", "R13,R14,R15,R18", "R17,R20,R23,R24,R25", "R26,R28"]
SLOW = ["R2,R3,R22", "R4,R16", "R19,R21"]
LATE = {"R2", "R3", "R4", "R5", "R8", "R10", "R16", "R17", "R19", "R24", "R26"}
"""Whose bars are of time: a machine that has neighbours does not meet them always."""


def test_each_row_of_the_page_has_a_figure() -> None:
    english, chinese = rows_of(DOCS / "reliability.md"), rows_of(DOCS / "reliability.zh.md")
    assert list(english) == list(chinese)
    assert set(english) == set(MEASURES) | ELSEWHERE
    assert set(MEASURES) == set(CELLS)
    assert [row for row, cell in (*english.items(), *chinese.items()) if not cell] == []


@pytest.mark.parametrize("language", ["english", "chinese"])
def test_what_is_on_the_page_is_what_the_benchmark_says(language: str) -> None:
    page = rows_of(DOCS / ("reliability.md" if language == "english" else "reliability.zh.md"))
    for row, cell in CELLS.items():
        pattern = re.sub(r"\\\{\d\\\}", r".+?", re.escape(cell[language]))
        assert re.fullmatch(pattern, page[row]), (row, page[row], cell[language])


def test_both_sentences_have_the_same_values() -> None:
    for row, cell in CELLS.items():
        values = [sorted(set(re.findall(r"\{\d\}", cell[language]))) for language in ("english", "chinese")]
        assert values[0] == values[1], row


def test_figures_are_put_into_their_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reliability.md", "reliability.zh.md"):
        (tmp_path / name).write_text((DOCS / name).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(reliability_rows, "DOCS", tmp_path)
    before = (tmp_path / "reliability.md").read_text(encoding="utf-8").splitlines()
    write_page([figure("R17", "100 ms", True, Seconds(0.0012345), Seconds(0.0299), 77)])
    after = (tmp_path / "reliability.md").read_text(encoding="utf-8").splitlines()
    assert rows_of(tmp_path / "reliability.md")["R17"] == "refused after 1.23 ms, at most 30 ms, of 77"
    assert "77" in rows_of(tmp_path / "reliability.zh.md")["R17"]
    assert [new for old, new in zip(before, after, strict=True) if old != new] == [
        line for line in after if "of 77" in line
    ]


def test_each_row_is_in_one_of_the_runs() -> None:
    assert sorted(",".join(QUICK + SLOW).split(","), key=ORDER.index) == ORDER


@pytest.mark.timeout(180)
@pytest.mark.parametrize("rows", [*QUICK, *map(at_night, SLOW)])
def test_what_is_promised_holds_in_a_short_run(rows: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.reliability", "--short", "--rows", rows, "--json", str(file)]
    done = children.run(command, capture_output=True, text=True, check=False, timeout=170, cwd=DOCS.parent)
    assert file.exists(), done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["row"] for row in found] == rows.split(",")
    broken = [row for row in found if row["holds"] != "yes" and row["row"] not in LATE]
    assert broken == [], done.stderr


def test_a_row_that_is_not_measured_and_a_short_run_for_the_page_are_refused() -> None:
    for arguments, words in ((["--rows", "R99"], "'R99' is none of"), (["--short", "--write"], "not for the page")):
        command = [sys.executable, "-m", "benchmarks.reliability", *arguments]
        done = children.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=DOCS.parent)
        assert done.returncode == 2
        assert words in done.stderr
