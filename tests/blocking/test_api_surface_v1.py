"""The blocking calls are v1's, too: every name, every parameter, and nothing to await."""

from __future__ import annotations

import inspect
from inspect import signature
from typing import Any

import pytest
from pydantic import BaseModel

from aiodatadist import blocking, legacy
from tests.conformance import test_api_v1
from tests.conformance.api_v1 import CALLS, READ_ONLY, SETTABLE
from tests.conformance.test_api_surface import Call, differences, parameters, parse

CALLED = [parse(line) for line in CALLS.split("\n") if line]

ON_PURPOSE = {
    **test_api_v1.ON_PURPOSE,
    "KvCacheManager": "Only an LLMDataDist makes one, of its engine.",
}
"""Calls with other parameters than upstream's, and why."""

OWN = {"LLMDataDist", "KvCacheManager", "LLMModel", "LLMConfig"}
"""Classes that have to be others than the awaitable ones."""

MOVING = {"pull_cache", "pull_blocks", "copy_cache", "copy_blocks", "swap_blocks"}


def lookup(name: str) -> Any:
    owner, _, member = name.partition(".")
    found = getattr(blocking, owner)
    return inspect.getattr_static(found, member) if member else found


@pytest.mark.parametrize("call", CALLED, ids=lambda call: call.name)
def test_a_call_has_upstreams_parameters_and_returns_when_it_is_done(call: Call) -> None:
    thing = lookup(call.name)
    function = getattr(thing, "__func__", thing)
    assert callable(function)
    assert not inspect.iscoroutinefunction(function)
    mine = list(signature(function).parameters.values()) if isinstance(thing, staticmethod) else parameters(thing)
    found = differences(mine, list(call.signature.parameters.values()))
    assert bool(found) is (call.name in ON_PURPOSE), found


@pytest.mark.parametrize("name", sorted(MOVING))
def test_what_moves_bytes_returns_nothing_as_upstream(name: str) -> None:
    assert signature(lookup(f"KvCacheManager.{name}")).return_annotation == "None"


@pytest.mark.parametrize("owner", READ_ONLY)
def test_what_is_read_is_there(owner: str) -> None:
    for name in READ_ONLY[owner].split():
        found = lookup(f"{owner}.{name}")
        assert owner == "CapacityState" or (isinstance(found, property) and found.fset is None), name


@pytest.mark.parametrize("owner", SETTABLE)
def test_what_is_set_can_be_read_and_set(owner: str) -> None:
    kind = getattr(blocking, owner)
    for name in SETTABLE[owner].split():
        is_field = issubclass(kind, BaseModel) and name in kind.model_fields
        assert is_field or lookup(f"{owner}.{name}").fset is not None, name


def test_values_are_the_same_classes_as_the_awaitable_ones() -> None:
    names = set(legacy.__all__)
    assert names <= set(blocking.__all__)
    assert {name for name in names if getattr(blocking, name) is not getattr(legacy, name)} == OWN
