"""A v1 program finds every name it knows, with the parameters it knows; what moves or waits is awaited, and nothing else."""

from __future__ import annotations

import dataclasses
import re
from inspect import getattr_static, signature
from typing import Any

import pytest
from pydantic import BaseModel

from aiodatadist import legacy
from tests.conformance.api_v1 import CALLS, READ_ONLY, SETTABLE
from tests.conformance.test_api_surface import Call, differences, is_awaited, parameters, parse

ON_PURPOSE = {
    "LLMModel": "Only add_model makes one, of what it knows.",
}
"""Calls with other parameters than upstream's, and why."""

OTHERWISE = {
    "LLMDataDist.link_clusters": "Local addresses may be left out, because there is one device.",
    "LLMConfig.device_id": "A process has one device: several are refused.",
    "LLMConfig.buf_pool_cfg": "Size classes are added up to one pool, because an allocation takes whole pages of it.",
    "KvCacheManager.allocate_cache": "A key that is bound is LLM_PARAM_INVALID and not LLM_FAILED, also within one call.",
    "KvCacheManager.pull_cache": "After a timeout the link works, because what was on its way has stopped.",
    "LLMDataDist.add_model": "Without a runner it is LLM_FEATURE_NOT_ENABLED, because the vendor's own is not public.",
    "LLMModel.predict": "A cache can be pulled when the model has run, and not while it runs.",
    "Tensor": "What upstream calls a native handle is an address here, which it does not own.",
}
"""What is called alike and does something else, and why."""

ITEMS = 68
"""Of v1 in upstream's interface; a class counts once, and what can be read and set does, too."""

CALLED = [parse(line) for line in CALLS.split("\n") if line]


def lookup(name: str) -> Any:
    owner, _, member = name.partition(".")
    found = getattr(legacy, owner, None)
    return getattr_static(found, member, None) if found is not None and member else found


def test_the_table_is_complete() -> None:
    members = [f"{owner}.{name}" for table in (READ_ONLY, SETTABLE) for owner in table for name in table[owner].split()]
    names = [call.name for call in CALLED] + members
    assert len(set(names)) == len(names) == ITEMS


@pytest.mark.parametrize("call", CALLED, ids=lambda call: call.name)
def test_a_call_has_upstreams_parameters_or_a_reason(call: Call) -> None:
    thing = lookup(call.name)
    assert callable(thing) or isinstance(thing, (staticmethod, classmethod))
    mine = parameters(thing)
    if isinstance(thing, staticmethod):
        mine = list(signature(thing.__func__).parameters.values())
    found = differences(mine, list(call.signature.parameters.values()))
    if call.name in ON_PURPOSE:
        assert found, f"{call.name} is as upstream's: take it off the list"
    else:
        assert not found, call.name


@pytest.mark.parametrize("call", CALLED, ids=lambda call: call.name)
def test_what_moves_or_waits_is_awaited_and_nothing_else(call: Call) -> None:
    assert is_awaited(lookup(call.name)) is call.is_awaited


def test_every_deviation_has_its_reason_in_a_sentence() -> None:
    assert set(ON_PURPOSE) <= {call.name for call in CALLED}
    fields = {f"LLMConfig.{name}" for name in legacy.LLMConfig.model_fields}
    assert [name for name in OTHERWISE if lookup(name) is None and name not in fields] == []
    reasons = [*ON_PURPOSE.values(), *OTHERWISE.values()]
    assert all(re.fullmatch(r"[A-Z].*[^.]\.", reason) for reason in reasons)


@pytest.mark.parametrize("owner", READ_ONLY)
def test_what_is_read_cannot_be_set(owner: str) -> None:
    kind = lookup(owner)
    for name in READ_ONLY[owner].split():
        found = lookup(f"{owner}.{name}")
        if kind is legacy.CapacityState:
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(legacy.CapacityState(True, 1, 2), name, 3)
        else:
            assert isinstance(found, property), name
            assert found.fset is None, name


@pytest.mark.parametrize("owner", SETTABLE)
def test_what_is_set_can_be_read_and_set(owner: str) -> None:
    kind = lookup(owner)
    for name in SETTABLE[owner].split():
        found = lookup(f"{owner}.{name}")
        is_field = issubclass(kind, BaseModel) and name in kind.model_fields and not kind.model_fields[name].frozen
        assert is_field or (isinstance(found, property) and found.fset is not None), name


def test_everything_upstream_names_is_exported() -> None:
    owners = {call.name.partition(".")[0] for call in CALLED} | set(READ_ONLY) | set(SETTABLE)
    assert owners == set(legacy.__all__)
