"""Reads the syntax of many files, for tests that hold for each of them: faster than ``ast`` alone, which visits all."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.heap import uncollected

LEAVES = {
    "asname",
    "attr",
    "conversion",
    "ctx",
    "id",
    "is_async",
    "kind",
    "level",
    "module",
    "op",
    "ops",
    "type_comment",
}
"""Fields that hold words or operators, and no part that has parts."""


def parsed(text: str) -> ast.Module:
    """Return the tree of a file."""
    with uncollected():
        return ast.parse(text)


class _Fields(dict[type[ast.AST], tuple[str, ...]]):
    """The fields of each kind of node that can hold parts."""

    def __missing__(self, kind: type[ast.AST]) -> tuple[str, ...]:
        names: tuple[str, ...] = () if kind is ast.Constant else kind.__match_args__
        self[kind] = found = tuple(name for name in names if name not in LEAVES)
        return found


_FIELDS = _Fields()


def children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node, except operators and ``Load``, ``Store`` and ``Del``."""
    for name in _FIELDS[type(node)]:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            yield value
        elif isinstance(value, list):
            yield from (each for each in value if isinstance(each, ast.AST))


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a node, its parts, their parts and so on, in any order."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        for name in _FIELDS[type(node)]:
            value = getattr(node, name, None)
            if isinstance(value, ast.AST):
                left.append(value)
            elif isinstance(value, list):
                left += [each for each in value if isinstance(each, ast.AST)]
