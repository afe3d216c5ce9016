"""The table of threats: every threat has tests or is known to lack them, every file belongs to a threat, pages agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.hostile.rows import ALL, NOT_YET, ROWS, WITHOUT_A_ROW, Row, files
from tests.security_table import CHINESE, ENGLISH, Page, table

ROOT = Path(__file__).resolve().parent.parent.parent


def test_every_threat_has_a_row_or_is_known_to_lack_one() -> None:
    names = [row.name for row in ROWS]
    assert names == [name for name in ALL if name not in NOT_YET], "in the order of their names, each once"


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_row_has_tests_and_figures(row: Row) -> None:
    assert row.tests
    for file in (*row.tests, *row.with_engines):
        assert re.search(r"^(?:async )?def test_", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE), file
    assert row.figures
    for figure in row.figures:
        numbers = re.findall(r"\d+(?:\.\d+)?", figure.english)
        assert numbers
        assert sorted(numbers) == sorted(re.findall(r"\d+(?:\.\d+)?", figure.chinese))


def test_every_file_of_this_folder_belongs_to_a_row() -> None:
    here = {file.relative_to(ROOT).as_posix() for file in Path(__file__).parent.glob("test_*.py")}
    in_rows = {file for row in ROWS for file in row.tests}
    assert here - in_rows == WITHOUT_A_ROW.keys()
    assert here <= set(files()), "so make hostile runs it"


@pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=["english", "chinese"])
def test_the_table_of_a_page_is_current(page: Page) -> None:
    text = page.path.read_text(encoding="utf-8")
    assert table(page, text) == text, "run python -m tests.security_table --write"


def test_a_row_whose_words_are_missing_is_named() -> None:
    text = ENGLISH.path.read_text(encoding="utf-8")
    without = re.sub(r"^\| T3: .*\n", "", text, flags=re.MULTILINE)
    with pytest.raises(ValueError, match="says nothing of T3: write the attack"):
        table(ENGLISH, without)
    with pytest.raises(ValueError, match=r"has rows that tests/hostile/rows\.py has not: T99"):
        table(ENGLISH, text.replace("| T3: ", "| T99: x | y | z | z |\n| T3: "))
