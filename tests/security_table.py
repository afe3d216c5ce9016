"""The tables of attacks in SECURITY.md and SECURITY.zh.md: ``python -m tests.security_table --write`` brings them up to date.

The attack and what holds against it are written by hand, in the first two columns. The figures and the tests come from
``tests/hostile/rows.py``. Without ``--write`` the program prints what would change, and fails if there is anything.
"""

# ruff: noqa: RUF001 - Chinese punctuation
from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.hostile.rows import ROWS, Row

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Page:
    """A page with the table, English or Chinese.

    Attributes:
        head: the titles of the columns.
        colon: the sign behind the name of a threat.
        engines: the words in front of tests that need engines.
        between: the sign between two figures.
    """

    path: Path
    head: str
    colon: str
    engines: str
    between: str
    is_chinese: bool = False

    def figures(self, row: Row) -> str:
        return self.between.join(each.chinese if self.is_chinese else each.english for each in row.figures)

    def tests(self, row: Row) -> str:
        cell = f"`pytest {' '.join(row.tests)}`"
        return cell + (f"{self.engines}`{' '.join(row.with_engines)}`" if row.with_engines else "")


ENGLISH: Final = Page(ROOT / "SECURITY.md", "| attack | what holds | figure | test |", ": ", "; with engines ", "; ")
CHINESE: Final = Page(
    ROOT / "SECURITY.zh.md", "| 攻击 | 防御 | 数字 | 测试 |", "：", "；用引擎的是 ", "；", is_chinese=True
)
TABLE = re.compile(r"^\|[^\n]*\n\| --- \| --- \| --- (?:\| --- )?\|\n((?:\| T\d+[^\n]*\n)+)", re.MULTILINE)


def table(page: Page, text: str) -> str:
    """Return the page with its table up to date. Raises ValueError if a row's own columns are not written."""
    found = TABLE.search(text)
    if found is None:
        raise ValueError(f"{page.path.name} has no table of attacks")
    written: dict[str, tuple[str, str]] = {}
    for line in found[1].splitlines():
        attack, holds, *_ = line.removeprefix("| ").removesuffix(" |").split(" | ")
        written[attack.partition(page.colon)[0]] = attack, holds
    if missing := [row.name for row in ROWS if row.name not in written]:
        raise ValueError(f"{page.path.name} says nothing of {', '.join(missing)}: write the attack and what holds")
    if unknown := written.keys() - {row.name for row in ROWS}:
        raise ValueError(f"{page.path.name} has rows that tests/hostile/rows.py has not: {', '.join(sorted(unknown))}")
    lines = [page.head, "| --- | --- | --- | --- |"]
    lines += [f"| {' | '.join((*written[row.name], page.figures(row), page.tests(row)))} |" for row in ROWS]
    return text[: found.start()] + "\n".join(lines) + "\n" + text[found.end() :]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.security_table", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the pages")
    write = parser.parse_args().write
    is_stale = False
    for page in (ENGLISH, CHINESE):
        text = page.path.read_text(encoding="utf-8")
        current = table(page, text)
        if current == text:
            continue
        if write:
            page.path.write_text(current, encoding="utf-8")
        else:
            is_stale = True
            print(f"{page.path.name} is out of date: run python -m tests.security_table --write")
    sys.exit(is_stale)


if __name__ == "__main__":
    main()
