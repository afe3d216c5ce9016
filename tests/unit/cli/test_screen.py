"""Check what commands show while they work: bars on a terminal, a few lines elsewhere."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest

from aiodatadist._cli.kit import screen as kit
from aiodatadist._cli.kit.screen import Screen, open_screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def rows_of(terminal: Terminal) -> list[str]:
    """Return all that was written, row by row, without colours and moves of the cursor."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    return [row for row in re.split(r"[\r\n]+", text) if row]


def test_without_a_terminal_each_phase_has_two_lines() -> None:
    out = io.StringIO()
    with open_screen(out) as screen:
        for done in range(101):
            screen.show("pull", done, 100)
    assert out.getvalue().splitlines() == ["pull: 50%", "pull: 100%"]


def test_without_a_terminal_words_are_shown_with_the_steps() -> None:
    out = io.StringIO()
    with open_screen(out, lines=2) as screen:
        for done in range(2):
            screen.show("", done, 2, "begins")
            screen.show("", done + 1, 2, f"8.0{done} GB/s")
        screen.show("one-sided", 30.0, 60.0, "no violations")
    assert out.getvalue().splitlines() == [
        "1 of 2: 8.00 GB/s", "2 of 2: 8.01 GB/s", "one-sided: 30 of 60: no violations",
    ]  # fmt: skip


def test_a_terminal_gets_bars_that_fit_and_are_erased(terminal: Terminal) -> None:
    with open_screen(terminal) as screen:
        screen.line("prompt: [bold] :smile:")
        screen.show("prefill", 1, 2)
        screen.show("pull", 1, 4, "of [all] blocks, which are many, in 2 ranges")
        screen.line("beside them")
    screen.line("at the end")
    rows = rows_of(terminal)
    assert rows[0] == "prompt: [bold] :smile:", "neither markup nor emoji"
    assert "beside them" in rows
    assert rows[-1] == "at the end"
    assert any(re.match(r"prefill .* 50% \d:\d\d:\d\d", row) for row in rows)
    assert any(re.match(r"pull of \[all\] blocks.* 25%", row) for row in rows)
    assert max(map(len, rows)) <= 80
    erased = terminal.getvalue().rpartition("at the end")[0].rpartition("beside them")[2]
    assert erased.count("\x1b[2K") >= 2, "a row for each bar"


def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "find_spec", lambda _: None)


def with_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")


@pytest.mark.parametrize("lacking", [without_rich, with_a_dumb_terminal])
def test_a_terminal_without_rich_or_moves_gets_plain_lines(
    lacking: Callable[[pytest.MonkeyPatch], None], terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking(monkeypatch)
    with open_screen(terminal) as screen:
        screen.show("pull", 1, 1)
    assert terminal.getvalue() == "pull: 100%\n"


@pytest.mark.parametrize("silent", [True, False])
def test_every_screen_knows_what_was_done_before_an_interrupt(silent: bool) -> None:
    out = io.StringIO()
    with open_screen(out, silent=silent, lines=0) as screen:
        assert screen.interrupted() == "interrupted before anything was done"
        screen.show("prefill", 4, 4)
        screen.show("pull", 1, 3)
        screen.line()
    assert screen.interrupted() == "interrupted: prefill 100%, pull 33% done"
    assert out.getvalue() == ("" if silent else "\n")
    assert isinstance(screen, Screen)
