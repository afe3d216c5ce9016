"""Progress of the demo: a moving line on a terminal, a few plain lines elsewhere, nothing for --json."""

from __future__ import annotations

import shutil
from typing import Protocol, TextIO

from aiodatadist._cli.demo.messages import Phase, Progress

PHASES: tuple[Phase, ...] = ("prefill", "reference", "pull", "decode")


class Screen(Protocol):
    """A display of lines and progress. Moving lines are erased before a line is printed."""

    def line(self, text: str = "") -> None:
        """Print a permanent line."""

    def progress(self, progress: Progress) -> None:
        """Show how far a phase has come."""

    def close(self) -> None:
        """Leave the cursor at the start of a line. May be called at any time, and twice."""


class TerminalScreen:
    """A screen with a line of progress bars, rewritten in place."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._done: dict[Phase, float] = {}
        self._drawn = False

    def line(self, text: str = "") -> None:
        self.close()
        print(text, file=self._out, flush=True)

    def progress(self, progress: Progress) -> None:
        self._done[progress.phase] = progress.done / progress.total
        columns = shutil.get_terminal_size().columns - 1
        self._out.write("\r" + self._bars(columns).ljust(columns)[:columns])
        self._out.flush()
        self._drawn = True

    def close(self) -> None:
        if self._drawn:
            self._drawn = False
            print(file=self._out, flush=True)

    def _bars(self, columns: int) -> str:
        taken = sum(len(f"{phase} []  ") for phase in PHASES)
        width = max(4, min(20, (columns - taken) // len(PHASES)))
        return "  ".join(f"{phase} {_bar(self._done.get(phase, 0.0), width)}" for phase in PHASES)


class PlainScreen:
    """A screen with lines only: each phase is reported at its half and at its end."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._halves: dict[Phase, int] = {}

    def line(self, text: str = "") -> None:
        print(text, file=self._out, flush=True)

    def progress(self, progress: Progress) -> None:
        halves = 2 * progress.done // progress.total
        if halves > self._halves.get(progress.phase, 0):
            self._halves[progress.phase] = halves
            self.line(f"{progress.phase}: {100 * progress.done // progress.total}%")

    def close(self) -> None:
        """Do nothing: nothing moves here."""


class SilentScreen:
    """A screen that shows nothing."""

    def line(self, text: str = "") -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def close(self) -> None: ...


def open_screen(out: TextIO, *, silent: bool = False) -> Screen:
    """Return the screen that fits ``out``."""
    if silent:
        return SilentScreen()
    return TerminalScreen(out) if out.isatty() else PlainScreen(out)


def _bar(share: float, width: int) -> str:
    full = round(share * width)
    return "[" + "#" * full + "." * (width - full) + "]"
