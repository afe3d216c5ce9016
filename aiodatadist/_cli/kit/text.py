"""Text for a screen of 80 columns. No I/O."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

COLUMNS = 80


def wrapped(text: str, indent: int, columns: int = COLUMNS) -> list[str]:
    """Break a line at 80 columns, with an indent after the first line. A longer word, such as a path, stays in one piece."""
    return textwrap.wrap(
        text,
        columns,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def wrapped_all(lines: Iterable[str], columns: int = COLUMNS) -> list[str]:
    """Break several lines, each with an indent of four."""
    return [row for line in lines for row in wrapped(line, 4, columns)]


def cut(text: str, before: str) -> list[str]:
    """Cut text, keeping all blanks, into lines of at most 80 columns; the first begins with ``before``."""
    room = COLUMNS - len(before)
    pieces = [text[start : start + room] for start in range(0, len(text), room)] or [""]
    return [f"{before if i == 0 else ' ' * len(before)}{piece}" for i, piece in enumerate(pieces)]
