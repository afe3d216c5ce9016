"""Progress of a run on stderr: a bar if rich is installed and stderr is a terminal, else one line per row."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from aiodatadist._cli.bench.figures import Row
from aiodatadist._cli.bench.sizes import size_text
from aiodatadist._cli.bench.workload import Case
from aiodatadist._cli.kit.text import wrapped


class Progress(Protocol):
    """A display that is notified of each row."""

    def begin(self, case: Case) -> None:
        """Show that a case is being measured."""

    def end(self, rows: list[Row]) -> None:
        """Show that a case has been measured."""


class _Lines:
    def __init__(self, rows: int) -> None:
        self._done, self._rows = 0, rows

    def begin(self, case: Case) -> None:
        """Show nothing yet."""

    def end(self, rows: list[Row]) -> None:
        self._done += 1
        told = f"{self._done} of {self._rows}: {_told(rows[0].case)} {_speeds(rows)}"
        print("\n".join(wrapped(told, 4)), file=sys.stderr, flush=True)


@contextmanager
def open_progress(rows: int) -> Iterator[Progress]:
    """Show how many of ``rows`` rows are done, until the end of the ``with`` block."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield _Lines(rows)
        return
    rich = import_module("rich.progress")
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn())
    console = import_module("rich.console").Console(stderr=True)
    with rich.Progress(*columns, rich.TimeElapsedColumn(), console=console, transient=True) as bars:
        yield _Bar(bars, rows)


class _Bar:
    def __init__(self, bars: Any, rows: int) -> None:
        self._bars = bars
        self._task = bars.add_task("", total=rows)

    def begin(self, case: Case) -> None:
        self._bars.update(self._task, description=_told(case))

    def end(self, rows: list[Row]) -> None:
        self._bars.update(self._task, advance=1, description=f"{_told(rows[0].case)} {_speeds(rows)}")


def _told(case: Case) -> str:
    return f"{case.op.value} {case.memory.value} {size_text(case.block)}"


def _speeds(rows: list[Row]) -> str:
    first, *others = [f"{row.gigabytes_per_second.median:.2f} GB/s" for row in rows]
    return ", ".join([first, *(f"{row.by} {speed}" for row, speed in zip(rows[1:], others, strict=True))])
