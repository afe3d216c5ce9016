"""The package's pydantic models, and which of them describe input from others."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

from aiodatadist._values.foreign import SHOWN
from tests import rooms
from tests.hostile.vllm_names import both_halves

OWN_ROOMS = {"config", "legacy", "blocking", "cli", "testing"}
"""Their models describe what this engine's user says, or this project's own child processes."""
OWN = {
    "CacheSettings",
    "PeerRule",
    "PoolSettings",
    "Settings",
    "SglangSettings",
    "ValueSettings",
}
"""Of other rooms, likewise."""
CHECKED_BY_HAND = {"_numbers"}
"""Validators that stand in front of a list and check it themselves, its length first."""
FIXED = re.compile(r"\^\(?\[[^\]]+\]\{\d+\}\)?\??\$")
"""A pattern of so many characters, or of none."""
PRINTABLE = {r"^[\x20-\x7e]*$", r"^[\x21-\x7e]+$"}
GROWING = {"Hello", "EndpointInfo"}
"""They keep fields of newer minor versions for the proof. They are read before a peer is known, in 16 KiB at most."""
SHOWN_AS_IT_IS = {"host", "status"}
"""A host is printable and short because its validator says so. A status is a number, or a master's word, compared only."""


@cache
def foreign_models() -> tuple[type[BaseModel], ...]:
    """Return every model of input from others, by name."""
    with both_halves():
        for module, path in rooms.modules().items():
            if rooms.room_of(module) not in OWN_ROOMS and re.search(
                r"class \w+\((BaseModel|_Message)\)", path.read_text()
            ):
                importlib.import_module(module)
    found = {model for model in _below(BaseModel) if _is_foreign(model)}
    return tuple(
        sorted(found, key=lambda model: (model.__module__, model.__qualname__))
    )  # in whatever order they were imported


def _below(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def _is_foreign(model: type[BaseModel]) -> bool:
    is_ours = model.__module__.startswith(f"{rooms.HOUSE}.")
    return is_ours and rooms.room_of(model.__module__) not in OWN_ROOMS and model.__name__ not in OWN


def unbounded(model: type[BaseModel]) -> list[str]:
    """List the fields of a model that may be as large as their sender likes, or make more than one error for a list."""
    schema: Any = model.__pydantic_core_schema__
    return list(_complaints(schema, model.__name__, model.model_config.get("allow_inf_nan") is False))


def _complaints(node: Any, where: str, is_finite: bool) -> Iterator[str]:
    if isinstance(node, list):
        for each in node:
            yield from _complaints(each, where, is_finite)
    elif isinstance(node, dict) and _validator(node) not in CHECKED_BY_HAND:
        yield from (f"{where}: {what}" for what in _complaints_of(node, is_finite))
        for name, child in node.items():
            if name == "fields":
                for field, inner in child.items():
                    yield from _complaints(inner, f"{where}.{field}", is_finite)
            elif name not in {"metadata", "cls", "config", "function", "default", "serialization"}:
                yield from _complaints(child, where, is_finite)


def _validator(node: Any) -> str:
    function = node.get("function")
    return getattr(function.get("function"), "__name__", "") if isinstance(function, dict) else ""


def _complaints_of(node: Any, is_finite: bool) -> Iterator[str]:
    """Yield the complaints about one node, without those about its contents."""
    kind, is_endless = node.get("type"), node.get("max_length") is None
    is_list = kind in {"list", "set", "frozenset"} or (kind == "tuple" and node.get("variadic_item_index") is not None)
    if kind == "str" and is_endless and not FIXED.fullmatch(str(node.get("pattern") or "")):
        yield "a text without a maximum"
    if (is_list or kind == "dict") and is_endless:
        yield f"a {kind} without a maximum"
    if is_list and not node.get("fail_fast"):
        yield f"a {kind} that is checked beyond its first error"
    if kind == "tuple" and node.get("strict") is not False:
        yield "a tuple that refuses the lists of JSON"
    if kind == "float" and not (is_finite or node.get("allow_inf_nan") is False or node.get("le") is not None):
        yield "a number that may be infinite"
    if kind in {"any", "is-instance", "callable"}:
        yield kind
    if kind == "model" and node["cls"].model_config.get("extra") == "allow" and node["cls"].__name__ not in GROWING:
        yield "unknown fields are kept"


@cache
def texts_of_others() -> frozenset[str]:
    """Return the names of fields whose texts may be long, or have other characters than printable ASCII."""
    return frozenset(
        field
        for model in foreign_models()
        for field, inner in _fields_of(model.__pydantic_core_schema__)
        if field not in SHOWN_AS_IT_IS and _has_text(inner)
    )


def _fields_of(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for name, child in node.items():
            if name == "fields":
                yield from child.items()
            elif name in {"schema", "definitions"}:
                yield from _fields_of(child)
    elif isinstance(node, list):
        for each in node:
            yield from _fields_of(each)


def _has_text(node: Any) -> bool:
    """Return True if a node has text. Models inside it do not count: they have their own fields."""
    if isinstance(node, list):
        return any(map(_has_text, node))
    if not isinstance(node, dict) or node.get("type") in {"model", "definition-ref"}:
        return False
    if node.get("type") == "str":
        pattern = str(node.get("pattern") or "")
        is_short = (node.get("max_length") or 10**9) <= SHOWN
        return not (FIXED.fullmatch(pattern) or (pattern in PRINTABLE and is_short))
    return any(_has_text(child) for name, child in node.items() if name not in {"metadata", "function", "default"})
