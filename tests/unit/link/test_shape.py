"""A link fits in one head: it has a session and transfers, and no class of the room is large."""

from __future__ import annotations

import ast

from aiodatadist._link import Link
from tests.rooms import ONE_WORKER, arrows, modules, nodes_of

TOGETHER = ONE_WORKER

MOST_METHODS = 35
MOST_FIELDS = 25


def classes() -> dict[str, ast.ClassDef]:
    return {
        f"{module}.{node.name}": node
        for module in modules()
        if module.startswith("aiodatadist._link")
        for node in nodes_of(module)
        if isinstance(node, ast.ClassDef)
    }


def methods_of(node: ast.ClassDef) -> set[str]:
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def fields_of(node: ast.ClassDef) -> set[str]:
    """Return the attributes that the methods of a class set."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self"
    }


def test_no_class_has_many_methods_or_fields() -> None:
    sizes = {name: (len(methods_of(node)), len(fields_of(node))) for name, node in classes().items()}
    assert "aiodatadist._link.link.Link" in sizes
    large = {name: size for name, size in sizes.items() if size[0] > MOST_METHODS or size[1] > MOST_FIELDS}
    assert large == {}


def test_a_link_has_a_session_and_is_none() -> None:
    assert Link.__mro__ == (Link, object)


def test_a_session_knows_no_transfers() -> None:
    above = [arrow for arrow in arrows() if arrow.importer == "aiodatadist._link.session"]
    assert above
    assert [str(arrow) for arrow in above if ".transfers" in arrow.module] == []
