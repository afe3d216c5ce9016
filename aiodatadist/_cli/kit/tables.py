"""Rows as columns that fit the terminal. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

GAP = 2
"""Blanks between two columns."""


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the cells right-aligned, in columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ([cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in cells)
    return [(" " * GAP).join(row) for row in rows]


def folded(cells: Sequence[Sequence[str]], keys: int, columns: int) -> list[str]:
    """Return aligned cells in lines of at most ``columns`` columns; the first line of ``cells`` is the head.

    If a table is too wide, its headers are broken at blanks. Columns that do not fit beside the first ``keys`` columns
    go to further tables below, which repeat the key columns, except those in which all lines are equal. A line is
    longer than ``columns`` only if its keys and one more cell are.
    """
    whole = aligned(cells)
    if not whole or len(whole[0]) <= columns:
        return whole
    head, *rows = cells
    widths = [max(map(len, (*head[i].split(), *column))) for i, column in _columns(rows)]
    telling = [i for i, column in _columns(rows) if i < keys and len(set(column)) > 1]
    lines: list[str] = []
    for number, table in enumerate(_tables(widths, list(range(keys)), telling, columns)):
        lines += [""] * (number > 0)
        heads = zip_longest(*(_broken(head[i], widths[i]) for i in table), fillvalue="")
        lines += (line.rstrip() for line in aligned([*heads, *([row[i] for i in table] for row in rows)]))
    return lines


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[tuple[int, tuple[str, ...]]]:
    return enumerate(zip(*rows, strict=True))


def _tables(widths: Sequence[int], first: list[int], later: list[int], columns: int) -> Iterator[list[int]]:
    """Yield the columns of each table: at least one besides the keys, and as many more as fit."""
    table, keys = list(first), first
    for i in range(len(first), len(widths)):
        if len(table) > len(keys) and sum(widths[j] + GAP for j in (*table, i)) - GAP > columns:
            yield table
            table, keys = list(later), later
        table.append(i)
    yield table


def _broken(head: str, width: int) -> list[str]:
    """Break text into lines of at most ``width`` columns, unless a word is longer."""
    lines: list[str] = []
    for word in head.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
