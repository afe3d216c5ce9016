"""A report as a plot: bytes per second over block size, next to memcpy."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aiodatadist._cli.bench.figures import MEMCPY, OURS, Row
from aiodatadist._cli.bench.report import BenchReport
from aiodatadist._cli.bench.sizes import size_text
from aiodatadist._cli.kit.errors import wrong_input
from aiodatadist._context_caching.pools.extras import how_to_install

NEEDS_LATEX = {"pgf"}
"""The formats of matplotlib that need LaTeX."""


def check_plot(into: Path) -> None:
    """Check, before anything is measured, that a plot can be drawn.

    Raises:
        CommandError: if matplotlib is not installed, or does not know the format.
    """
    if find_spec("matplotlib") is None:
        raise wrong_input(f"--plot needs matplotlib: {how_to_install('plot')}; --json needs nothing")
    formats = set(import_module("matplotlib.backend_bases").FigureCanvasBase.get_supported_filetypes()) - NEEDS_LATEX
    if into.suffix[1:].lower() not in formats:
        raise wrong_input(f"--plot: the suffix of {into} is not a format of matplotlib: {', '.join(sorted(formats))}")


def draw(report: BenchReport, into: Path) -> None:
    """Draw medians with their quartiles: a colour for each library, a marker for each case.

    The file's suffix chooses the format.
    """
    figure = import_module("matplotlib.figure").Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    series: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        series.setdefault((row.by, f"{row.case.op.value}, {row.case.memory.value}"), []).append(row)
    libraries, cases = (list(dict.fromkeys(names)) for names in zip(*series, strict=True))
    for (library, case), rows in series.items():
        mark = MARKS[cases.index(case) % len(MARKS)]
        _add(axes, rows, f"{library}: {case}", f"C{libraries.index(library)}", mark, MEMCPY in libraries)
    sizes = sorted({row.case.block for row in report.rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_text(size) for size in sizes])
    axes.set(xlabel="block", ylabel="GB/s", title=f"{report.machine.cpu}, {report.ran.runtime}")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper")
    figure.savefig(into)


MARKS = "osD^v<>*"


def _add(axes: Any, rows: list[Row], name: str, colour: str, mark: str, is_memcpy_drawn: bool) -> None:
    speeds = [row.gigabytes_per_second for row in rows]
    spread = [[speed.median - speed.low for speed in speeds], [speed.high - speed.median for speed in speeds]]
    sizes = [row.case.block for row in rows]
    medians = [speed.median for speed in speeds]
    axes.errorbar(sizes, medians, yerr=spread, color=colour, marker=mark, capsize=3, label=name)
    limits = [
        (row.case.block, limit.median) for row in rows if (limit := row.memcpy_gigabytes_per_second) and row.by == OURS
    ]
    if limits and not is_memcpy_drawn:
        label = f"memcpy ({name})"
        axes.plot(*zip(*limits, strict=True), color="grey", linestyle="--", marker=mark, markersize=4, label=label)
