"""The signatures that tooltips and the reference show: each can be read, and has nothing that only this run knows."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from aiodatadist import LeaseTicket, LLMConfig
from tests.unit.test_public_members import members
from tests.unit.test_public_names import PUBLIC
from tests.unit.test_public_types import CLASSES


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for module, names in PUBLIC.items():
        for name in names.split():
            function: Any = getattr(importlib.import_module(module), name)
            if callable(function):
                yield f"{module}.{name}", function
    for name, cls in CLASSES.items():
        for each in members(cls):
            function = getattr(cls, each)
            if callable(function):
                yield f"{name}.{each}", function


def signature(function: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(function))
    except ValueError:  # of C: an Enum, a tuple
        return ""


def test_a_signature_shows_no_object_by_its_address() -> None:
    shown = {name: signature(function) for name, function in functions()}
    assert len(shown) > 500
    assert {name: each for name, each in shown.items() if " at 0x" in each or "Annotated[" in each} == {}


def test_the_signature_of_a_model_has_the_types_alone() -> None:
    shown = inspect.signature(LLMConfig).parameters
    assert str(shown["transfer_checksum"]).replace("'", "") == "transfer_checksum: bool = False"
    assert str(inspect.signature(LeaseTicket).parameters["blocks"]) == "blocks: tuple[int, ...]"
