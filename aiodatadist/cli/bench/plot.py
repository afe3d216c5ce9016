"""A report as a picture: bytes per second by the size of a block, beside memcpy."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aiodatadist.cli.bench.figures import OURS, Row
from aiodatadist.cli.bench.report import BenchReport
from aiodatadist.cli.bench.sizes import size_text
from aiodatadist.cli.errors import wrong_input


def check_plot() -> None:
    """Raises CommandError: matplotlib is not installed. Asked before anything is measured."""
    if find_spec("matplotlib") is None:
        raise wrong_input("--plot needs matplotlib: pip install matplotlib; --json needs nothing")


def draw(report: BenchReport, into: Path) -> None:
    """Medians with their quartiles; the file's suffix says the format."""
    figure = import_module("matplotlib.figure").Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    series: dict[str, list[Row]] = {}
    for row in report.rows:
        series.setdefault(f"{row.by}: {row.case.op.value}, {row.case.memory.value}", []).append(row)
    for name, rows in series.items():
        _add(axes, rows, name)
    sizes = sorted({row.case.block for row in report.rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_text(size) for size in sizes])
    axes.set(xlabel="block", ylabel="GB/s", title=f"{report.machine.cpu}, {report.ran.runtime}")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(into)


def _add(axes: Any, rows: list[Row], name: str) -> None:
    speeds = [row.gigabytes_per_second for row in rows]
    spread = [[speed.median - speed.low for speed in speeds], [speed.high - speed.median for speed in speeds]]
    sizes = [row.case.block for row in rows]
    axes.errorbar(sizes, [speed.median for speed in speeds], yerr=spread, marker="o", capsize=3, label=name)
    limits = [
        (row.case.block, limit.median) for row in rows if (limit := row.memcpy_gigabytes_per_second) and row.by == OURS
    ]
    if limits:
        axes.plot(*zip(*limits, strict=True), linestyle="--", marker=".", label=f"memcpy ({name})")
