"""The package is read from the ground up: a file uses only files of rooms above its own, and no files need each other.

``tests/rooms.py`` reads the imports; ``python -m tests.rooms`` draws them.
"""

from __future__ import annotations

import ast
import re
from itertools import pairwise

import pytest

from tests import rooms

TOGETHER = rooms.ONE_WORKER

ARCHITECTURE = rooms.ROOT.parent / "docs" / "architecture.md"

SEES_C = (
    "_native",
    "device",
    "transport",
    "cache.plan",
    "cache.units",
    "cluster.heartbeat_thread",
    "context_caching.memory.slots",
    "testing",
    "cli.probe",
)
"""Rooms and files that may know that there is C."""

PURE = {"errors", "values", "config", "wire"}
WAITS = {"asyncio", "anyio", "socket", "threading", "time", "select", "subprocess"}


def test_every_room_of_the_tree_has_a_place_and_every_place_is_in_the_tree() -> None:
    assert {rooms.room_of(module) for module in rooms.modules()} == set(rooms.ROOMS)
    for wing, order in rooms.WINGS.items():
        found = {inside for module in rooms.modules() if (inside := rooms.inside(module, wing)) is not None}
        assert found == set(order)


def test_no_file_uses_a_file_of_a_later_room() -> None:
    assert [str(arrow) for arrow in rooms.upward()] == []


def test_no_files_need_each_other() -> None:
    assert rooms.circles() == []


def test_errors_use_no_other_room() -> None:
    assert [str(i) for i in rooms.arrows() if rooms.room_of(i.importer) == "errors"] == []


def test_native_uses_nothing_but_errors() -> None:
    uses = [i for i in rooms.arrows() if rooms.room_of(i.importer) == "_native"]
    assert [str(i) for i in uses if rooms.room_of(i.module) not in {"_native", "errors"}] == []


def test_only_those_who_may_know_that_there_is_c_touch_it() -> None:
    for found in rooms.arrows():
        if found.module == "aiodatadist._native.library":
            importer = rooms.plain(found.importer)
            assert any(importer == who or importer.startswith(f"{who}.") for who in SEES_C), str(found)


def test_cffi_is_imported_in_one_place() -> None:
    importers = {i.importer for i in rooms.everything() if i.module.partition(".")[0] in {"cffi", "_cffi_backend"}}
    assert importers == {"aiodatadist._native._declarations"}


def test_pure_rooms_do_no_io() -> None:
    uses = [i for i in rooms.everything() if rooms.room_of(i.importer) in PURE]
    assert [str(i) for i in uses if i.module.partition(".")[0] in WAITS] == []


def test_commands_share_nothing_but_the_kit() -> None:
    entry = {"", "arguments"}
    ends = [(rooms.inside(found.importer, "cli"), rooms.inside(found.module, "cli")) for found in rooms.arrows()]
    between = {(user, used) for user, used in ends if None not in (user, used) and user != used and user not in entry}
    assert between == {
        ("demo", "kit"),
        ("probe", "kit"),
        ("doctor", "kit"),
        ("doctor", "probe"),
        ("bench", "kit"),
        ("chaos", "kit"),
    }


# ---- the table of rooms in docs/architecture.md ----


def rows_of(heading: str) -> list[str]:
    """Return the names in the first column of the table under a heading, one after the other."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    section = re.split(r"^## ", text.partition(f"## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, flags=re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_room_has_its_row_and_rows_stand_in_the_order_of_rooms() -> None:
    assert rows_of("Rooms") == [room or "aiodatadist" for room in rooms.ROOMS]


@pytest.mark.parametrize("wing", rooms.WINGS)
def test_every_room_inside_a_wing_has_its_row(wing: str) -> None:
    order = [room.replace(".", "/") or wing for room in rooms.WINGS[wing]]
    assert rows_of(f"Inside `{wing}`") == order


# ---- the reader of imports ----


def test_the_reader_of_imports_sees_them_everywhere_and_says_which_are_for_types() -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from aiodatadist._datadist import LLMDataDist
else:
    import aiodatadist._link
def f():
    try:
        from aiodatadist import errors, LLMRole
    except ImportError:
        from aiodatadist._native.library import ffi
"""
    found = [i for i in rooms.imports_of("x", ast.parse(source)) if i.module.startswith("aiodatadist")]
    assert [(i.module, i.name, i.is_for_types) for i in found] == [
        ("aiodatadist._datadist", "LLMDataDist", True),
        ("aiodatadist._link", "", False),
        ("aiodatadist.errors", "", False),
        ("aiodatadist", "LLMRole", False),
        ("aiodatadist._native.library", "ffi", False),
    ]


def test_circles_are_found_also_where_one_arrow_is_for_types_only() -> None:
    names = ["a", "b", "c", "d"]
    around = [rooms.Arrow(x, y, "", 1, x == "c") for x, y in pairwise([*names, "b"])]
    assert rooms.circles(names, around) == [["b", "c", "d"]]


def test_benchmarks_use_no_test() -> None:
    files = sorted((rooms.ROOT.parent / "benchmarks").glob("*.py"))
    assert files
    found = [
        f"{path.name}: {name}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in _modules(node)
        if name.partition(".")[0] == "tests"
    ]
    assert found == []


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []
