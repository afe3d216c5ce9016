"""docs/telemetry.md: its programs print what it says, and its table has every metric."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from aiodatadist._testing.ports import free_port
from aiodatadist.telemetry._metrics import METRICS
from tests import children
from tests.test_readme import found

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "telemetry.md"
TEXT = PAGE.read_text(encoding="utf-8")


def says(name: str) -> str:
    """Return the output that the page shows for a program."""
    match = re.search(r"```\n\nIt prints\n\n```text\n(.*?)```", TEXT[TEXT.index(f"# {name}:") :], flags=re.DOTALL)
    assert match is not None
    return match[1]


@pytest.mark.parametrize("name", ["metrics.py", "spans.py"])
def test_programs_print_what_the_page_says(name: str) -> None:
    text = found(PAGE, name).replace("9400", str(free_port()))
    done = children.run(
        [sys.executable, "-W", "error", "-c", text], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == says(name)


def test_the_table_has_every_metric() -> None:
    rows = re.findall(r"^\| `([\w:]+)` \| (counter|gauge|histogram) \| (.*?) \| (.*) \|$", TEXT, flags=re.MULTILINE)
    wanted = [
        (
            f"{name}_total" if metric.kind == "counter" else name,
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels),
            metric.words,
        )
        for name, metric in METRICS.items()
    ]
    assert rows == wanted
