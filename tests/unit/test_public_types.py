"""Every public attribute has a type that is written down: two type checkers infer different ones.

``make types`` asks pyright the same of all that public names lead to; this looks at the public classes alone, at once.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.unit.test_public_names import PUBLIC


def public_classes() -> dict[str, type]:
    """Return the public classes and what they inherit in the package, by name."""
    found: dict[str, type] = {}
    for module, names in PUBLIC.items():
        for name in names.split():
            value = getattr(importlib.import_module(module), name)
            if inspect.isclass(value):
                bases = [each for each in value.__mro__ if each.__module__.startswith("aiodatadist")]
                found.update({f"{each.__module__}.{each.__qualname__}": each for each in bases})
    return found


CLASSES = public_classes()


def body_of(cls: type) -> ast.ClassDef:
    tree = ast.parse(Path(str(sys.modules[cls.__module__].__file__)).read_text(encoding="utf-8"))
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls.__name__)


def names_in(target: ast.expr, of_self: bool) -> Iterator[str]:
    """Yield the public names that an assignment sets: of ``self`` in a method, or in the body of a class."""
    if isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from names_in(each, of_self)
    elif (
        of_self
        and isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    ):
        yield from [target.attr] if not target.attr.startswith("_") else []
    elif not of_self and isinstance(target, ast.Name):
        yield from [target.id] if not target.id.startswith("_") else []


def untyped(body: ast.ClassDef, is_enum: bool) -> set[str]:
    """Return the public attributes that are set, and typed in no place: what a parameter is has the parameter's type."""
    typed = {each.name for each in body.body if isinstance(each, ast.FunctionDef)}  # setters of properties
    assigned: set[str] = set()
    if not is_enum:
        for statement in body.body:
            assigned |= {name for t in getattr(statement, "targets", ()) for name in names_in(t, of_self=False)}
    has_slots = any("__slots__" in ast.unparse(each) for each in body.body if isinstance(each, ast.Assign))
    for node in ast.walk(body):
        if isinstance(node, ast.AnnAssign):
            typed |= {*names_in(node.target, of_self=True), *names_in(node.target, of_self=False)}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
            for each in ast.walk(node):
                if isinstance(each, ast.Assign):
                    names = {name for t in each.targets for name in names_in(t, of_self=True)}
                    is_given = isinstance(each.value, ast.Name) and each.value.id in given and not has_slots
                    (typed if is_given else assigned).update(names)
                elif isinstance(each, ast.AugAssign):
                    assigned |= set(names_in(each.target, of_self=True))
    return assigned - typed


def without_types(cls: type) -> set[str]:
    inherited = {each for base in cls.__mro__[1:] for each in inspect.get_annotations(base)}
    return untyped(body_of(cls), issubclass(cls, enum.Enum)) - inherited


def test_public_attributes_have_types() -> None:
    assert {name: found for name, cls in CLASSES.items() if (found := without_types(cls))} == {}


def test_an_attribute_without_a_type_is_seen() -> None:
    [body] = ast.parse(
        "class Thing:\n"
        "    word = blocking(f)\n"
        "    kept: int = 3\n"
        "    def __init__(self, given: int):\n"
        "        self.given = given\n"
        "        self.made = make()\n"
        "        self.one, self.two = pair\n"
        "        self._own = 3\n"
        "        self.kept = 4\n"
        "        self.typed: int = 5\n"
    ).body
    assert isinstance(body, ast.ClassDef)
    assert untyped(body, is_enum=False) == {"word", "made", "one", "two"}
