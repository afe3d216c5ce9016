"""The limits of CONTRIBUTING: a file has at most 600 lines, a class 35 methods, a function 50 lines without its docstring.

What is larger is listed with its reason. Nothing may join the lists, or grow, without one.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES, METHODS, STATEMENT_LINES = 600, 35, 50

LARGE_FILES = {
    "aiodatadist/_datadist.py": "the vendor's one object, and its documentation",
    "aiodatadist/_wire/messages.py": "a table: one class for each message of the protocol",
}
LARGE_CLASSES = {
    "LLMDataDist": "the vendor's one object: its methods and properties are what users call",
}
LONG_FUNCTIONS: dict[str, str] = {}


@cache
def trees() -> dict[str, ast.Module]:
    files = sorted((ROOT / "aiodatadist").rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


def test_files_can_be_read_in_one_go() -> None:
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in trees()}
    assert {name: n for name, n in lines.items() if n > LINES and name not in LARGE_FILES} == {}
    assert [name for name in LARGE_FILES if lines[name] <= LINES] == [], "no longer large: take them out of the list"


def test_classes_have_few_methods() -> None:
    large = {}
    for module in trees().values():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
                if len(methods) > METHODS:
                    large[node.name] = len(methods)
    assert set(large) == set(LARGE_CLASSES), large


def test_functions_fit_on_a_screen() -> None:
    long = {}
    for name, module in trees().items():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                lines = (node.end_lineno or 0) - first.lineno + 1
                if lines > STATEMENT_LINES:
                    long[f"{name}: {node.name}"] = lines
    assert set(long) == set(LONG_FUNCTIONS), long
