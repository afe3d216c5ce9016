"""Types and helpers that measure the rows of docs/reliability.md and put them on the page."""

from __future__ import annotations

import os
import re
import threading
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import percentile

MIB, KIB = 1 << 20, 1 << 10
DOCS = Path(__file__).parents[1] / "docs"
CELLS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("reliability.toml").read_text(encoding="utf-8")
)
_CELL = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Figure:
    """A measured figure of one row of the page.

    Attributes:
        row: for instance ``R3``.
        english, chinese: the cell on each page. Both have the same numbers.
        bar: the limit that it is measured against.
        holds: True if the limit is met.
    """

    row: str
    english: str
    chinese: str
    bar: str
    holds: bool

    def line(self) -> dict[str, Any]:
        """Return the figure as a row of the printed table."""
        return {"row": self.row, "holds": "yes" if self.holds else "NO", "figure": self.english, "bar": self.bar}


def figure(row: str, bar: str, holds: bool, *values: object) -> Figure:
    """Both sentences are made of the same values."""
    words = [millis(each) if isinstance(each, Seconds) else str(each) for each in values]
    cell = CELLS[row]
    return Figure(row, cell["english"].format(*words), cell["chinese"].format(*words), bar, holds)


class Seconds(float):
    """Told in milliseconds."""


def millis(seconds: float) -> str:
    """Format seconds as milliseconds, with as many digits as are known."""
    found = seconds * 1e3
    return f"{found:.2f}" if found < 10 else f"{found:.0f}"


def worst(seconds: Sequence[float]) -> Seconds:
    """Return the largest value."""
    return Seconds(max(seconds))


def usual(seconds: Sequence[float]) -> Seconds:
    """Return the median."""
    return Seconds(percentile(seconds, 50))


# ---- what a process has ----


def resident() -> int:
    """Return this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


def descriptors() -> int:
    """Count the open files."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def threads() -> int:
    """Count Python's threads, without those of anyio's pool, which stay."""
    return sum("AnyIO worker" not in thread.name for thread in threading.enumerate())


# ---- the page ----


def rows_of(page: Path) -> dict[str, str]:
    """Return the third cell of each row of the page, by the row's number."""
    found = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| (R\d+)\W", line):
            found[match[1]] = _CELL.split(line)[3].strip()
    return found


def write_page(figures: Sequence[Figure]) -> None:
    """Put them in their cells, in both languages."""
    for name, language in (("reliability.md", "english"), ("reliability.zh.md", "chinese")):
        page, cells = DOCS / name, {each.row: getattr(each, language) for each in figures}
        page.write_text(
            "".join(_written(line, cells) for line in page.read_text(encoding="utf-8").splitlines(True)), "utf-8"
        )


def _written(line: str, cells: dict[str, str]) -> str:
    match = re.match(r"\| (R\d+)\W", line)
    if match is None or match[1] not in cells:
        return line
    parts = _CELL.split(line)
    parts[3] = f" {cells[match[1]]} "
    return "|".join(parts)
