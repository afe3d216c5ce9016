"""Shows what a command has done so far: moving bars on a terminal if rich is installed, else a few plain lines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TextIO

from aiodatadist._cli.kit.text import wrapped

HALVES = 2
"""Plain lines for each phase: at its half and at its end."""
BAR = 20
"""Columns of a bar: the words beside it then have 45 of 80."""


class Screen:
    """Lines, and how far each phase has come. This screen prints plain lines only.

    Args:
        lines: the number of plain lines for each phase, the last one at its end.
    """

    def __init__(self, out: TextIO, lines: int = HALVES) -> None:
        self._out = out
        self._lines = lines
        self._printed: dict[str, int] = {}
        self._shares: dict[str, float] = {}

    def line(self, text: str = "") -> None:
        """Print a line that stays."""
        print(text, file=self._out, flush=True)

    def show(self, phase: str, done: float, total: float, words: str = "") -> None:
        """Show how far a phase has come, with words about the work. A command with one phase can leave it unnamed."""
        self._shares[phase] = done / total
        self._move(phase, done, total, words)

    def _move(self, phase: str, done: float, total: float, words: str) -> None:
        reached = int(self._lines * done / total)
        if reached > self._printed.get(phase, 0):
            self._printed[phase] = reached
            told = f"{done:.0f} of {total:.0f}: {words}" if words else f"{100 * done / total:.0f}%"
            for row in wrapped(f"{phase}: {told}" if phase else told, 4):
                self.line(row)

    def interrupted(self) -> str:
        """Return what had been done when Ctrl-C came, as one line."""
        shares = [f"{phase} {100 * share:.0f}%" for phase, share in self._shares.items()]
        return f"interrupted: {', '.join(shares)} done" if shares else "interrupted before anything was done"


class _Silent(Screen):
    """A screen that shows nothing."""

    def line(self, text: str = "") -> None: ...

    def _move(self, phase: str, done: float, total: float, words: str) -> None: ...


class _Bars(Screen):
    """A screen with one of rich's bars for each phase. Lines are printed above them."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._bars: Any = None  # opened when a phase begins: rich is imported after the first lines
        self._rows: dict[str, Any] = {}

    def line(self, text: str = "") -> None:
        if self._bars is None:
            super().line(text)
        else:
            self._bars.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _move(self, phase: str, done: float, total: float, words: str) -> None:
        told = f"{phase} {words}".strip()
        if self._bars is None:
            self._bars = _moving_bars(self._out)
        if phase in self._rows:
            self._bars.update(self._rows[phase], completed=done, description=told)
        else:
            self._rows[phase] = self._bars.add_task(told, total=total, completed=done)

    def erase(self) -> None:
        """Erase the bars. Lines can be printed later."""
        if self._bars is not None:
            self._bars.stop()


def _moving_bars(out: TextIO) -> Any:
    rich = import_module("rich.progress")
    columns = (rich.TextColumn("{task.description}", markup=False), rich.BarColumn(BAR), rich.TaskProgressColumn())
    console = import_module("rich.console").Console(file=out)
    bars = rich.Progress(*columns, rich.TimeElapsedColumn(), console=console, transient=True)
    bars.start()
    return bars


@contextmanager
def open_screen(out: TextIO, *, silent: bool = False, lines: int = HALVES) -> Iterator[Screen]:
    """Open the screen that fits ``out``. Bars are erased at the end of the ``with`` block; lines can be printed later."""
    if silent:
        yield _Silent(out)
    elif not out.isatty() or os.environ.get("TERM") == "dumb" or find_spec("rich") is None:
        yield Screen(out, lines)
    else:
        screen = _Bars(out)
        try:
            yield screen
        finally:
            screen.erase()
