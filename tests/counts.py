"""Counts what makes tests slow, or makes them depend on the machine's speed: ``python -m tests.counts``.

The rules look at the syntax of each file in ``tests``. Functions, classes and files that are marked ``measures`` or ``alone``
are left out, because ``make test`` does not run them; so are ``samples``, which are programs for users. Nor are
sleeps and limits counted in what is marked ``autojump``: by that clock they guess nothing.

- *guessing sleeps*: ``asyncio.sleep``, ``anyio.sleep`` or ``time.sleep`` with anything but a literal 0, and not directly in a
  ``while`` loop.
- *polls*: the same directly in a ``while`` loop.
- *time that passes*: ``let_pass`` of ``tests/held.py``, where the time is what a test is about.
- *delays*: ``delay=`` behind a function's name in a literal, which is softnpu's fault that makes a call late by some time.
- *short limits*: ``fail_after``, ``move_on_after``, ``timeout``, or ``timeout=`` of a wait, with a literal below 1, or
  below 10 if it raises; but not in ``with pytest.raises(TimeoutError)``, where a slow machine does no harm.
- *clock limits*: ``assert`` that the difference of a clock and an earlier time is less than something.
- *private reaches*: ``x._name``, an imported ``_name``, or ``"_name"`` for ``getattr``, ``setattr`` and the like, if the
  package defines ``_name`` and the file does not, and ``x`` is neither ``self`` nor ``cls``.
- *process starts*: places that call ``subprocess``, ``create_subprocess_exec``, ``open_process``, ``run_process``,
  ``os.fork``, or ``Process`` of ``multiprocessing``. What ``tests/children.py`` forks is none.

``python -m tests.counts KIND`` lists the places of one kind, for example ``delays``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.rooms import modules, nodes_of
from tests.syntax import children, parsed, walk

TESTS = Path(__file__).parent
LEFT_OUT = {"samples"}
NOT_IN_MAKE_TEST = {"measures", "alone"}
OF_REAL_TIME = {"guessing sleeps", "polls", "time that passes", "short limits", "clock limits"}

CEILINGS: Final = {
    "guessing sleeps": 0,
    "polls": 45,
    "time that passes": 10,
    "delays": 0,
    "short limits": 0,
    "clock limits": 0,
    "private reaches": 142,
    "process starts": 55,
}
"""The most places of each kind. Lower a number when you remove a place; none may rise."""

_SLEEPERS = {"asyncio", "anyio", "time"}
_LIMITS = {"fail_after": 10, "move_on_after": 1, "timeout": 10}
"""Below how many seconds each is short."""
_CLOCKS = {"current_time", "monotonic", "perf_counter", "time"}
_WAITS = {"acquire", "communicate", "get", "join", "result", "run", "wait", "wait_for"}
_OF_NAMED_TUPLES = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}
"""Public methods and attributes, whatever the package calls by these names."""
_BY_NAME = {"delattr", "getattr", "hasattr", "setattr"}
_STARTS = {"create_subprocess_exec", "create_subprocess_shell", "fork", "open_process", "Process", "run_process"}
_SUBPROCESS = {"Popen", "call", "check_call", "check_output", "run"}


class Place(NamedTuple):
    """A place of one kind."""

    kind: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class _Reader(ast.NodeVisitor):
    """Finds the places in one file."""

    def __init__(self, file: str, tree: ast.Module, private: frozenset[str], marks: set[str]) -> None:
        self._file = file
        self._tree = tree
        self._marks = marks
        self._private = private
        self._loops: list[str] = []
        self._is_to_strike = False
        self.places: list[Place] = []

    @cached_property
    def _own(self) -> set[str]:
        return set(private_names(walk(self._tree)))

    def visit(self, node: ast.AST) -> None:
        """Look at a node, and at what is in it."""
        _LOOKERS.get(type(node), _Reader.generic_visit)(self, node)

    def generic_visit(self, node: ast.AST) -> None:
        for child in children(node):
            self.visit(child)

    def _add(self, kind: str, node: ast.expr | ast.stmt) -> None:
        if not (kind in OF_REAL_TIME and "autojump" in self._marks):
            self.places.append(Place(kind, self._file, node.lineno))

    def _visit_definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        outside = self._marks, self._loops
        self._marks = self._marks.union(*map(_attributes, node.decorator_list))
        if not self._marks & NOT_IN_MAKE_TEST:
            self._loops = []
            self.generic_visit(node)
        self._marks, self._loops = outside

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_definition  # noqa: N815 - ast's names

    def _visit_loop(self, node: ast.While | ast.For | ast.AsyncFor) -> None:
        self._loops.append(type(node).__name__)
        self.generic_visit(node)
        self._loops.pop()

    visit_While = visit_For = visit_AsyncFor = _visit_loop  # noqa: N815

    def visit_With(self, node: ast.With) -> None:
        outside = self._is_to_strike
        self._is_to_strike |= any(map(_wants_a_timeout, node.items))
        self.generic_visit(node)
        self._is_to_strike = outside

    def visit_Call(self, node: ast.Call) -> None:
        owner, name = _called(node.func)
        self._look_at_time(node, owner, name)
        if name in _BY_NAME and any(
            isinstance(each, ast.Constant) and self._is_foreign(each.value) for each in node.args
        ):
            self._add("private reaches", node)
        if (name in _STARTS and owner != "children") or (owner == "subprocess" and name in _SUBPROCESS):
            self._add("process starts", node)
        self.generic_visit(node)

    def _look_at_time(self, node: ast.Call, owner: str, name: str) -> None:
        first = node.args[0] if node.args else None
        if name == "sleep" and owner in _SLEEPERS and not (isinstance(first, ast.Constant) and first.value == 0):
            self._add("polls" if self._loops and self._loops[-1] == "While" else "guessing sleeps", node)
        if name == "let_pass":
            self._add("time that passes", node)
        limits = [first] if name in _LIMITS and first and (name != "timeout" or owner == "asyncio") else []
        if name in _LIMITS or name in _WAITS:
            limits += [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
        if any(_is_short(limit, _LIMITS.get(name, 1)) for limit in limits) and not self._is_to_strike:
            self._add("short limits", node)

    def visit_Assert(self, node: ast.Assert) -> None:
        for each in walk(node.test):
            if isinstance(each, ast.Compare) and _limits_a_clock(each):
                self._add("clock limits", node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}) and self._is_foreign(node.attr):
            self._add("private reaches", node)
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").startswith("aiodatadist"):
            for name in node.names:
                if self._is_foreign(name.name):
                    self._add("private reaches", node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and ":delay=" in node.value:
            for _ in re.finditer(":delay=", node.value):
                self._add("delays", node)

    def _is_foreign(self, name: object) -> bool:
        return name in self._private and name not in self._own and name not in _OF_NAMED_TUPLES


_LOOKERS: dict[type[ast.AST], Callable[[_Reader, Any], None]] = {
    getattr(ast, name.removeprefix("visit_")): method
    for name, method in vars(_Reader).items()
    if name.startswith("visit_")
}
"""The functions that look at each kind of node, apart from nodes that only contain others."""


def _called(function: ast.expr) -> tuple[str, str]:
    """Return the object and the name of what is called."""
    if isinstance(function, ast.Attribute):
        return (function.value.id if isinstance(function.value, ast.Name) else "", function.attr)
    return ("", function.id if isinstance(function, ast.Name) else "")


def _is_short(limit: ast.expr, most: float) -> bool:
    return isinstance(limit, ast.Constant) and isinstance(limit.value, (int, float)) and 0 < limit.value < most


def _limits_a_clock(compared: ast.Compare) -> bool:
    sides = [compared.left, *compared.comparators]
    return any(
        isinstance(least, ast.Lt | ast.LtE) and _is_since(side)
        for side, least in zip(sides, compared.ops, strict=False)
    )


def _is_since(side: ast.expr) -> bool:
    match side:
        case ast.BinOp(left=ast.Call(func=clock), op=ast.Sub()):
            return _called(clock)[1] in _CLOCKS
    return False


def _wants_a_timeout(item: ast.withitem) -> bool:
    match item.context_expr:
        case ast.Call(func=function, args=[ast.Name(id="TimeoutError"), *_]):
            return _called(function) == ("pytest", "raises")
    return False


def _attributes(node: ast.AST) -> set[str]:
    """Return the attributes that an expression names, which for a decorator are its marks."""
    return {each.attr for each in walk(node) if isinstance(each, ast.Attribute)}


def _marks_of_the_file(tree: ast.Module) -> set[str]:
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=marks):
                return _attributes(marks)
    return set()


def private_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the private names that a file defines: functions, classes, variables and attributes of ``self``."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case ast.Name(id=name, ctx=ast.Store()):
                pass
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                pass
            case _:
                continue
        if name.startswith("_") and not name.startswith("__") and name != "_":
            yield name


@cache
def names_of_the_package() -> frozenset[str]:
    """Return all private names that the package defines."""
    return frozenset(name for module in modules() for name in private_names(nodes_of(module)))


def places_in(source: str, file: str = "", private: frozenset[str] = frozenset()) -> list[Place]:
    """Return the places in the text of a file. ``private``: the private names of the package."""
    tree = parsed(source)
    marks = _marks_of_the_file(tree)
    if marks & NOT_IN_MAKE_TEST:
        return []
    reader = _Reader(file, tree, private, marks)
    reader.visit(tree)
    return reader.places


def all_places() -> list[Place]:
    """Return the places in all tests."""
    private = names_of_the_package()
    found: list[Place] = []
    for path in sorted(TESTS.rglob("*.py")):
        file = path.relative_to(TESTS)
        if file.parts[0] not in LEFT_OUT and file.name not in {"counts.py", "freezer.py", "held.py", "test_counts.py"}:
            found += places_in(path.read_text(), str(file), private)
    return found


def main() -> None:
    """Print the counts, or the places of one kind."""
    wanted = " ".join(sys.argv[1:])
    places = all_places()
    if wanted:
        print(*(place for place in places if place.kind == wanted), sep="\n")
        return
    counts = Counter(place.kind for place in places)
    for kind, ceiling in CEILINGS.items():
        files = {place.file for place in places if place.kind == kind}
        print(f"{kind:16}  {counts[kind]:4} in {len(files):3} files, at most {ceiling}")


if __name__ == "__main__":
    main()
