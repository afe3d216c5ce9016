"""The house is read from the ground up: a room uses only the rooms before it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import aiodatadist
from aiodatadist import errors

ROOT = Path(aiodatadist.__file__).parent
NAMES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
}

STORY: list[set[str]] = [
    {"errors"},
    {"values"},
    {"config", "wire"},
    {"_native"},
    {"concurrency"},
    {"device"},
    {"transport"},
    {"cache"},
    {"link"},
    {"layered"},
    {"cluster", "cache_manager"},
    {"datadist"},
    {"", "legacy", "context_caching", "blocking"},  # "" is the package itself, the front door
    {"testing"},
    {"cli"},
    {"__main__"},
]
PLACE = {room: number for number, rooms in enumerate(STORY) for room in rooms}

SEES_C = ("_native", "device", "transport", "cache.plan", "context_caching.memory.slots", "testing")
"""Who may know that there is C."""


class Import(NamedTuple):
    """``importer`` needs ``name`` of ``module`` (the module itself if empty) when it runs."""

    importer: str
    module: str
    name: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.name or '*'} of {self.module}"


def room_of(module: str) -> str:
    return module.removeprefix("aiodatadist").removeprefix(".").partition(".")[0]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def running(node: ast.AST) -> Iterator[ast.AST]:
    """All of a tree but what only the type checker reads."""
    yield node
    for child in node.orelse if isinstance(node, ast.If) and is_type_checking(node) else ast.iter_child_nodes(node):
        yield from running(child)


def imports_of(module: str, tree: ast.AST) -> Iterator[Import]:
    for node in running(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, "", node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} is a relative import: this test cannot place it"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in NAMES:
                    yield Import(module, inner, "", node.lineno)
                else:
                    yield Import(module, node.module or "", alias.name, node.lineno)


def source_of(module: str) -> str:
    path = ROOT.parent.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


IMPORTS = [
    found
    for module in sorted(NAMES)
    for found in imports_of(module, ast.parse(source_of(module)))
    if found.module.partition(".")[0] == "aiodatadist"
]


def test_every_module_has_a_place_in_the_story() -> None:
    assert {module for module in NAMES if room_of(module) not in PLACE} == set()


def test_no_room_uses_a_later_one() -> None:
    upward = [str(i) for i in IMPORTS if PLACE[room_of(i.importer)] < PLACE[room_of(i.module)]]
    assert upward == []


def test_errors_use_no_other_room() -> None:
    assert [str(i) for i in IMPORTS if room_of(i.importer) == "errors"] == []


def test_native_uses_nothing_but_errors() -> None:
    others = [
        str(i) for i in IMPORTS if room_of(i.importer) == "_native" and room_of(i.module) not in {"_native", "errors"}
    ]
    assert others == []


def test_only_those_who_may_know_that_there_is_c_touch_it() -> None:
    for found in IMPORTS:
        if found.module == "aiodatadist._native.library":
            inside = found.importer.removeprefix("aiodatadist.")
            assert any(inside == who or inside.startswith(f"{who}.") for who in SEES_C), str(found)


def test_cffi_is_imported_in_one_place() -> None:
    everything = [i for module in NAMES for i in imports_of(module, ast.parse(source_of(module)))]
    assert {i.importer for i in everything if i.module.partition(".")[0] == "cffi"} == {"aiodatadist._native.library"}


def test_pure_rooms_do_no_io() -> None:
    pure = {"errors", "values", "config", "wire"}
    forbidden = {"asyncio", "anyio", "socket", "threading", "time", "select", "subprocess"}
    everything = [
        i for module in NAMES if room_of(module) in pure for i in imports_of(module, ast.parse(source_of(module)))
    ]
    assert [str(i) for i in everything if i.module.partition(".")[0] in forbidden] == []


def test_the_reader_of_imports_sees_them_everywhere_but_under_type_checking() -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from aiodatadist.datadist import LLMDataDist
else:
    import aiodatadist.link
def f():
    try:
        from aiodatadist import errors, LLMRole
    except ImportError:
        from aiodatadist._native.library import ffi
"""
    found = [(i.module, i.name) for i in imports_of("x", ast.parse(source)) if i.module.startswith("aiodatadist")]
    assert found == [
        ("aiodatadist.link", ""),
        ("aiodatadist.errors", ""),
        ("aiodatadist", "LLMRole"),
        ("aiodatadist._native.library", "ffi"),
    ]


# ---- what is exported ----


def test_what_is_exported_is_what_is_there() -> None:
    public = {
        name
        for name, value in vars(aiodatadist).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(aiodatadist.__all__) == public | {"__version__"}
    assert len(set(aiodatadist.__all__)) == len(aiodatadist.__all__)


@pytest.mark.parametrize("module", ["device", "transport", "testing", "values.descriptors"])
def test_every_room_has_what_it_exports(module: str) -> None:
    room = importlib.import_module(f"aiodatadist.{module}")
    assert [name for name in room.__all__ if not hasattr(room, name)] == []


def test_every_exception_is_exported() -> None:
    kinds = {n for n, k in vars(errors).items() if isinstance(k, type) and issubclass(k, BaseException)}
    assert kinds <= set(aiodatadist.__all__)


def test_typed_marker_is_there() -> None:
    assert (ROOT / "py.typed").is_file()
