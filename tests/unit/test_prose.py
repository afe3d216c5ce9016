"""Prose for people: plain words with the subject first, and paths of files that are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
THIS = Path(__file__).resolve()

FOLDERS = ("aiodatadist", "benchmarks", "docs", "examples", "native", "tests")
"""Where the words below are not used, as on the pages at the top."""

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = {".c", ".h", ".md", ".py", ".sh", ".toml", ".txt"}

UNCLEAR = re.compile(r"(?<![A-Za-z])(?:(?:any|every|no|some)_?body|whoever|of ours)(?![A-Za-z])", re.IGNORECASE)
"""A sentence with one of these does not say who acts: caller, peer, device, pool, link."""

PATH = re.compile(
    r"`((?:[\w.-]+/)+[\w.-]*\.(?:c|h|md|py|sh|toml|txt)|(?:aiodatadist|benchmarks|examples|native|tests)/(?:[\w.-]+/)*)`"
)


def texts() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in WRITTEN and path != THIS)
    yield from (page for page in sorted(ROOT.glob("*.md")) if page.name != "CHANGELOG.md")


def test_prose_says_who_acts() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if UNCLEAR.search(line)
    ]
    assert found == []


def test_unclear_words_are_found_in_names_and_at_the_beginning_of_a_sentence() -> None:
    for line in (
        "Nobody waits.",
        "ask anybody",
        "everybody is told",
        "def test_nobody_waits() -> None:",
        "memory of ours",
        "enum { RING_NOBODY }",
        "Whoever waits",
    ):
        assert UNCLEAR.search(line), line
    for line in ("bodies", "a copy of yours", "hours"):
        assert not UNCLEAR.search(line), line


def test_paths_on_pages_are_there() -> None:
    named = [(page, path) for page in PAGES for path in PATH.findall(page.read_text(encoding="utf-8"))]
    assert len(named) > 40
    gone = [f"{page.name}: {path}" for page, path in named if "NAME" not in path and not (ROOT / path).exists()]
    assert gone == []
