"""``python -m benchmarks.facade`` in a short form, as a user tries it first."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import children


@pytest.mark.measures
def test_few_calls_of_each_kind_are_enough_for_every_row(tmp_path: Path) -> None:
    figures = tmp_path / "facade.json"
    command = [sys.executable, "-m", "benchmarks.facade", "--count", "10", "--rounds", "2", "--json", str(figures)]
    done = children.run(command, capture_output=True, text=True, timeout=300, forks=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(figures.read_text(encoding="utf-8"))
    names = [row["what"] for row in told["rows"]]
    assert {"submit a pull of 1 blocks, burst", "drain(), for each of 100", "close(), 100 submitted"} <= set(names)
    assert all(isinstance(row[figure]["median"], float) for row in told["rows"] for figure in ("median us", "p99 us"))
