"""Docstrings are sentences: none continues the name of what it describes, whether above it or in front of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.syntax import parsed, walk

ROOT = Path(__file__).resolve().parent.parent.parent

FOLDERS = ("aiodatadist", "benchmarks", "docs/site", "examples", "native", "tests")
FRAGMENTS = {
    *("As", "How", "If", "It", "No", "None", "Not", "Nothing", "Of", "One", "So", "That", "They", "This"),
    *("Those", "Until", "What", "Where", "Whether", "Which", "Who", "Whose"),
}
"""First words of docstrings that need the name in front of them to be understood."""
OF_VALUES = FRAGMENTS - {"Nothing", "This"} | {"And", "By", "For", "From", "To", "Told", "With"}
"""The same for constants and attributes, whose docstrings follow them. "This end unlinks." is a sentence."""
MAY_BE = re.compile(rf"^[ \t]*\w{{0,2}}[\"'][\s\\\"',.:;]*({'|'.join(FRAGMENTS | OF_VALUES)})\b", re.MULTILINE)
"""Finds any such docstring, and other texts: a file without a match need not be parsed."""


def fragments(text: str, *, values: bool = True) -> Iterator[tuple[int, str]]:
    """Yield line and first line of each docstring that begins in the middle of a sentence, those of ``values`` included."""
    if not MAY_BE.search(text):
        return
    for node in walk(parsed(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            continue
        for value, behind in pairwise(node.body if values else []):
            if isinstance(value, ast.Assign | ast.AnnAssign) and isinstance(behind, ast.Expr):
                words = behind.value.value if isinstance(behind.value, ast.Constant) else None
                if isinstance(words, str) and words.split()[0].strip(",.:;") in OF_VALUES:
                    yield behind.lineno, words.splitlines()[0]
        words = ast.get_docstring(node)
        if words and words.split()[0].strip(",.:;") in FRAGMENTS and not words.startswith("As :meth:"):
            yield getattr(node, "lineno", 1), words.splitlines()[0]


def test_docstrings_are_sentences() -> None:
    found = [
        f"{path}:{line}: {words}"
        for folder in FOLDERS
        for path in (file.relative_to(ROOT) for file in sorted((ROOT / folder).rglob("*.py")))
        for line, words in fragments((ROOT / path).read_text(encoding="utf-8"), values=folder != "tests")
    ]
    assert found == []


@pytest.mark.parametrize(
    ("words", "is_fragment"),
    [
        ("Of one step.", True),
        ("What it reads.", True),
        ("None: there is none.", True),
        ("As :meth:`pull`.", False),
        ("Return the peer.", False),
        ("Notify the peer.", False),
    ],
)
def test_fragments_are_found(words: str, is_fragment: bool) -> None:
    found = [line for _, line in fragments(f'def f():\n    """{words}"""\n')]
    assert found == ([words] if is_fragment else [])


@pytest.mark.parametrize(("words", "is_fragment"), [("Of one transfer.", True), ("This end unlinks.", False)])
def test_fragments_behind_values_are_found(words: str, is_fragment: bool) -> None:
    found = [line for _, line in fragments(f'SECONDS = 1\n"""{words}"""\n')]
    assert found == ([words] if is_fragment else [])
