"""Each member that users see on a public class is on a list, and described: by its docstring, or in that of the class."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

from tests.unit.public_members import MEMBERS
from tests.unit.test_public_types import CLASSES, body_of, names_in


def members(cls: type) -> dict[str, Any]:
    """Return the public methods and properties that the package itself defines in this class."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property | classmethod | staticmethod))
    }


def attributes(cls: type) -> set[str]:
    """Return the public names that methods of the class set on ``self``."""
    stored = [node for node in ast.walk(body_of(cls)) if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)]
    targets = [
        target for node in stored for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return {name for target in targets for name in names_in(target, of_self=True)}


def visible(cls: type) -> set[str]:
    """Return the names of all public members that the class itself has, without tests of a contract."""
    typed = {name for name in inspect.get_annotations(cls) if not name.startswith("_")}
    return {name for name in {*members(cls), *attributes(cls), *typed} if not name.startswith("test_")}


def described(cls: type) -> str:
    return "\n".join(base.__doc__ or "" for base in cls.__mro__ if base is not object)


def undescribed(cls: type) -> set[str]:
    silent = {each for each in members(cls) if not inspect.getdoc(getattr(cls, each)) and not each.startswith("test_")}
    others = attributes(cls) - set(dir(cls))
    return {each for each in silent | others if not re.search(rf"\b{each}\b", described(cls))}


def test_what_a_public_class_has_is_described() -> None:
    assert {name: found for name, cls in CLASSES.items() if (found := undescribed(cls))} == {}


def test_a_public_class_has_the_members_of_the_list() -> None:
    listed = {name: set(MEMBERS.get(name, "").split()) for name in CLASSES}
    assert {name: visible(cls) for name, cls in CLASSES.items()} == listed


def test_the_list_names_public_classes_alone() -> None:
    assert MEMBERS.keys() - CLASSES.keys() == set()
