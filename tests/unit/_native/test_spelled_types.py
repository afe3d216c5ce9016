"""Types of C are made when the package is imported, in one thread: two threads that make one at the same moment abort."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from aiodatadist._native.library import SPELLED, ffi
from tests.rooms import ONE_WORKER, modules, nodes_of

TOGETHER = ONE_WORKER

CALLS = {"alignof", "callback", "cast", "from_buffer", "getctype", "new", "offsetof", "sizeof", "typeof"}


def spelled() -> Iterator[str]:
    """Yield all types that the package names in a text."""
    for module in modules():
        for node in nodes_of(module):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                first, whose = node.args[0], node.func.value
                is_ffi = isinstance(whose, ast.Name) and whose.id == "ffi" and node.func.attr in CALLS
                if is_ffi and isinstance(first, ast.JoinedStr):
                    yield ast.unparse(first)
                if is_ffi and isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value


def test_every_type_that_the_package_spells_is_made_at_import() -> None:
    assert sorted(set(spelled())) == sorted(SPELLED), "SPELLED of aiodatadist/_native/library.py has others"


@pytest.mark.parametrize("name", SPELLED)
def test_a_type_is_there(name: str) -> None:
    assert ffi.typeof(name) is ffi.typeof(name)
