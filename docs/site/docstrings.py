"""Docstrings in the Markdown that the site is made of."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parent))
from hooks import as_markdown


class Markdown(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


class Halves(griffe.Extension):
    """Show ``x = awaited(start_x, "...")`` as the method that it is: with the parameters of ``start_x``."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        for name, attribute in list(cls.members.items()):
            call = _half(attribute.value) if attribute.is_attribute else None
            if call is not None:
                start, doc = call.arguments[:2]
                cls.set_member(name, _method(name, cls.members[str(start)], ast.literal_eval(str(doc))))


def _half(value: Any) -> Any:
    """Return the call of ``awaited`` or ``waiting`` in an expression, whatever decorates it; otherwise None."""
    while isinstance(value, griffe.ExprCall) and value.arguments:
        if str(value.function) in {"awaited", "waiting"}:
            return value
        value = value.arguments[0]
    return None


def _method(name: str, start: Any, doc: str) -> griffe.Function:
    made = griffe.Function(
        name, parameters=start.parameters, returns="CcResult", lineno=start.lineno, endlineno=start.endlineno
    )
    made.labels |= {"async"} if start.name.startswith("start_") else set()
    written = as_markdown(inspect.cleandoc(doc))
    made.docstring = griffe.Docstring(written, parent=made, parser=start.docstring.parser)
    made.docstring.parser_options = start.docstring.parser_options
    return made


ATTRIBUTES = re.compile(r"^Attributes:\n((?: +.*\n?|\n(?= ))+)", flags=re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {5,}.*|\n(?= {5}))*)\n?", flags=re.MULTILINE)


class Attributes(griffe.Extension):
    """Give each attribute of a class an entry, with what the docstring of the class says of it."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.docstring is None:
            return
        written = inspect.cleandoc(cls.docstring.value)
        found = ATTRIBUTES.search(written)
        if found is None:
            return
        left = ENTRY.sub(lambda entry: "" if _describe(cls, entry) else entry[0], found[1])
        section = f"Attributes:\n{left}" if left.strip() else ""
        cls.docstring.value = f"{written[: found.start()]}{section}{written[found.end() :]}".strip()


def _describe(cls: griffe.Class, entry: re.Match[str]) -> bool:
    """Move an entry to the attributes that it names. Return False if one of them is not the class's own."""
    names = entry[1].split(", ")
    if not all(name in cls.members and cls.members[name].is_attribute for name in names):
        return False
    words = " ".join(entry[2].split())
    for name in names:
        attribute = cls.members[name]
        if attribute.docstring is None:
            text = words[0].upper() + words[1:]
            attribute.docstring = griffe.Docstring(text, parent=attribute, parser=cls.docstring.parser)
    return True
