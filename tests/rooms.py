"""The import graph of the package, file by file, as text: ``python -m tests.rooms``.

An arrow is any import of the package's own, one that only the type checker reads included. A room uses the rooms above it.

The inner room ``link`` is the package ``aiodatadist._link``. A room that users import, ``legacy`` say, is a module that only
names what is public, over the inner package ``aiodatadist._legacy``.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import aiodatadist
from tests.heap import uncollected
from tests.syntax import parsed, walk

ONE_WORKER = "tests/unit/rooms"
"""Files of tests with this ``TOGETHER`` run in one worker, which reads the package once."""
ROOT = Path(aiodatadist.__file__).parent
HOUSE = "aiodatadist"

ROOMS = (
    "as_program",
    "errors",
    "counting",
    "values",
    "config",
    "wire",
    "_native",
    "concurrency",
    "device",
    "transport",
    "cache",
    "link",
    "layered",
    "cluster",
    "cache_manager",
    "datadist",
    "hixl",
    "legacy",
    "context_caching",
    "",  # the package itself: the public names
    "blocking",
    "telemetry",
    "adapters",
    "testing",
    "cli",
    "__main__",
)
"""From the ground up."""

WINGS = {
    "context_caching": (
        "results", "pools.contract", "errors", "checks", "identity", "memory", "pools", "transfer", "health_gate",
        "pool_guard", "block_index", "calls", "running", "awaited", "lookups", "cache", "", "ems",
    ),
    "link": (
        "lifecycle", "control", "host", "data", "session", "ownership", "transfers", "reactions", "link_handshake", "link",
        "",
    ),
    "cli": ("kit", "demo", "probe", "doctor", "bench", "chaos", "arguments", ""),
}  # fmt: skip
"""The same inside a room that has rooms."""


class Arrow(NamedTuple):
    """``importer`` imports ``name`` of ``module``: the module itself where it is empty."""

    importer: str
    module: str
    name: str
    line: int
    is_for_types: bool

    def __str__(self) -> str:
        what = f"{self.name} of {self.module}" if self.name else self.module
        return f"{self.importer}:{self.line} imports {what}{' (for types)' if self.is_for_types else ''}"


@cache
def modules() -> dict[str, Path]:
    """Return every file by the name of its module."""
    return {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in ROOT.rglob("*.py")
    }


def plain(module: str) -> str:
    """Return a module's name below the package, without the underscore of an inner room: ``link.session``."""
    rest = module.removeprefix(HOUSE).removeprefix(".")
    return rest if rest.partition(".")[0] in ROOMS else rest.removeprefix("_")


def room_of(module: str) -> str:
    return plain(module).partition(".")[0]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def imports_of(module: str, tree: ast.AST, *, for_types: bool = False) -> Iterator[Arrow]:
    """Yield all imports of a tree, whatever they import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Arrow(module, alias.name, "", node.lineno, for_types)
        elif isinstance(node, ast.ImportFrom):
            yield from _names_of(module, node, for_types)
        elif isinstance(node, ast.If) and is_type_checking(node):
            yield from imports_of(module, ast.Module(node.body, []), for_types=True)
            yield from imports_of(module, ast.Module(node.orelse, []), for_types=for_types)
        elif not isinstance(node, ast.expr):  # which has no statement in it
            yield from imports_of(module, node, for_types=for_types)


def _names_of(module: str, node: ast.ImportFrom, for_types: bool) -> Iterator[Arrow]:
    if node.level:
        raise ValueError(f"{module}:{node.lineno} is a relative import, which cannot be placed")
    for alias in node.names:
        inner = f"{node.module}.{alias.name}"
        if inner in modules():
            yield Arrow(module, inner, "", node.lineno, for_types)
        else:
            yield Arrow(module, node.module or "", alias.name, node.lineno, for_types)


@cache
def tree_of(module: str) -> ast.Module:
    return parsed(modules()[module].read_text(encoding="utf-8"))


@cache
def nodes_of(module: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's tree, except operators, ``Load``, ``Store`` and ``Del``."""
    with uncollected():
        return tuple(walk(tree_of(module)))


@cache
def everything() -> tuple[Arrow, ...]:
    """Return all imports, including those of other packages."""
    return tuple(arrow for module in sorted(modules()) for arrow in imports_of(module, tree_of(module)))


@cache
def arrows() -> tuple[Arrow, ...]:
    """Return the arrows inside the package."""
    return tuple(arrow for arrow in everything() if arrow.module.partition(".")[0] == HOUSE)


def upward() -> list[Arrow]:
    """Return the arrows to a later room."""
    place = {room: number for number, room in enumerate(ROOMS)}
    found = [arrow for arrow in arrows() if place[room_of(arrow.importer)] < place[room_of(arrow.module)]]
    for wing, order in WINGS.items():
        story = {room: number for number, room in enumerate(order)}
        for arrow in arrows():
            ends = [inside(module, wing) for module in (arrow.importer, arrow.module)]
            if None not in ends and story[str(ends[0])] < story[str(ends[1])]:
                found.append(arrow)
    return found


def inside(module: str, wing: str) -> str | None:
    """Return the room of a wing that a module is in, or the file that has its own place; None if it is outside the wing."""
    name = plain(module)
    if room_of(module) != wing:
        return None
    rest = name.removeprefix(wing).removeprefix(".")
    return rest if rest in WINGS[wing] else rest.partition(".")[0]


def circles(files: Iterable[str] | None = None, imports: Iterable[Arrow] | None = None) -> list[list[str]]:
    """Find files that need each other, directly or not: the strongly connected parts, by Tarjan's algorithm."""
    graph: dict[str, set[str]] = defaultdict(set)
    for arrow in arrows() if imports is None else imports:
        graph[arrow.importer].add(arrow.module)
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        path.append(module)
        for other in sorted(graph[module]):
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in path:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            part = path[path.index(module) :]
            del path[path.index(module) :]
            if len(part) > 1:
                found.append(sorted(part))

    for module in sorted(modules() if files is None else files):
        if module not in number:
            visit(module)
    return found


def drawn() -> Iterator[str]:
    """Yield a line for each room: its number of files, and the rooms that it uses."""
    uses: dict[str, set[str]] = defaultdict(set)
    for arrow in arrows():
        if room_of(arrow.importer) != room_of(arrow.module):
            uses[room_of(arrow.importer)].add(room_of(arrow.module))
    files = [room_of(module) for module in modules()]
    for room in ROOMS:
        used = [other or HOUSE for other in ROOMS if other in uses[room]]
        yield f"{room or HOUSE:16} {files.count(room):3} files  <- {', '.join(used) or '-'}"


def main() -> int:
    for line in drawn():
        print(line)
    wrong = [f"upward: {arrow}" for arrow in upward()] + [f"circle: {' '.join(part)}" for part in circles()]
    for line in wrong:
        print(line)
    print(f"{len(modules())} files, {len(arrows())} imports, {len(upward())} upward, {len(circles())} circles")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
