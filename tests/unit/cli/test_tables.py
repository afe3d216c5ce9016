"""A table is as wide as the terminal, and loses no cell by that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist._cli.kit.tables import aligned, folded

WIDE = [
    ["By", "Op", "Block Size (B)", "B/W (GB/Sec)", "Transfers/s", "P50"],
    ["ours", "pull", "16384", "3.25 (2.95..4.13)", "2782", "369.3"],
    ["ours", "push", "16384", "4.27 (4.11..4.46)", "2309", "415.6"],
]


def test_table_that_fits_stays_whole() -> None:
    assert folded(WIDE, 3, 80) == aligned(WIDE)
    assert len(aligned(WIDE)) == 3


def test_table_that_is_too_wide_goes_on_below_with_what_tells_its_lines_apart() -> None:
    assert folded(WIDE, 3, 40) == [
        "  By    Op  Block       B/W (GB/Sec)",
        "             Size",
        "              (B)",
        "ours  pull  16384  3.25 (2.95..4.13)",
        "ours  push  16384  4.27 (4.11..4.46)",
        "",
        "  Op  Transfers/s    P50",
        "pull         2782  369.3",
        "push         2309  415.6",
    ]


def test_without_rows_there_is_no_table() -> None:
    assert folded([], 3, 80) == []


@pytest.mark.parametrize("columns", [1, 20])
def test_one_cell_beside_the_keys_may_be_wider(columns: int) -> None:
    assert folded([["key", "value"], ["k" * 30, "v" * 30]], 1, columns)[1] == f"{'k' * 30}  {'v' * 30}"


@given(
    st.integers(1, 8).flatmap(
        lambda width: st.lists(
            st.lists(st.text("ab(/%1", min_size=1, max_size=9), min_size=width, max_size=width), min_size=2
        )
    ),
    st.integers(1, 3),
    st.integers(42, 80),
)
def test_no_cell_is_lost_and_no_line_is_longer(cells: list[list[str]], keys: int, columns: int) -> None:
    lines = folded(cells, keys, columns)
    assert max(map(len, lines)) <= columns
    words = " ".join(lines).split()
    assert all(words.count(cell) >= sum(line.count(cell) for line in cells) for line in cells for cell in line)
