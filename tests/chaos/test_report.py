"""Summaries at the end of a run, for logs that show no more than its last lines."""

from __future__ import annotations

from aiodatadist._cli.chaos.report import summary
from aiodatadist._cli.chaos.run import Result


def test_the_last_lines_tell_what_was_wrong_and_of_which_profile() -> None:
    good, bad = Result("calm", 1), Result("roce", 1)
    for number in range(7):
        bad.violated("I7", f"operation {number}\nTraceback")
    lines = list(summary([good, bad]))
    assert lines == [*(f"roce: I7: operation {number}" for number in range(5)), "roce: and 2 more"]
