"""A v2 program finds every name it knows, with the parameters it knows; what moves or waits is awaited, and nothing else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from inspect import Parameter, Signature
from typing import Any

import pytest
from pydantic import BaseModel

import aiodatadist
from aiodatadist import BlocksCacheKey, CacheKey, CacheTask, ParamInvalid
from tests.conformance.api_v2 import CALLS, CONSTANTS, READ_ONLY, SETTABLE

ONLY_BLOCKING: set[str] = {"LlmConfig", "CacheManager.set_is_call_linked"}
"""Names that only ``aiodatadist.blocking`` has: another spelling, and a call without an effect."""

ON_PURPOSE = {
    "LLMException": "Without a status it is LLM_FAILED: an exception that carries LLM_SUCCESS is taken for none.",
    "LLMDataDist.init": "The options may be left out, because the configuration may be given to the constructor.",
    "Cache": "Only a cache manager makes one, and it keeps for itself what the last three arguments say.",
    "CacheManager": "Only an LLMDataDist makes one, of its engine.",
    "CacheTask": "Only a cache manager makes one, of what is under way.",
}
"""Calls with other parameters than upstream's, and why."""

BY_HAND = {"CacheKey": CacheKey, "BlocksCacheKey": BlocksCacheKey}
"""Their constructors take ``*args, **kwargs``, for two names of one argument: what they accept is tried."""


@dataclass(frozen=True)
class Call:
    name: str
    signature: Signature
    is_awaited: bool


def parse(line: str) -> Call:
    found = re.fullmatch(r"(await )?([\w.]+)\((.*)\)", line)
    assert found is not None, line
    stand_in = eval(f"lambda {found[3]}: None", dict(vars(aiodatadist)))
    return Call(found[2], inspect.signature(stand_in), found[1] is not None)


CALLED = [parse(line) for line in CALLS.split("\n") if line]


def lookup(name: str) -> Any:
    """Return the object of this name; None if it, or its class, is not there."""
    owner, _, member = name.partition(".")
    found = getattr(aiodatadist, owner, None)
    return inspect.getattr_static(found, member, None) if found is not None and member else found


def is_missing(name: str) -> bool:
    return bool({name, name.partition(".")[0]} & ONLY_BLOCKING)


def parameters(thing: Any) -> list[Parameter]:
    """Return the parameters without ``self`` and ``cls``."""
    is_bound = isinstance(thing, (type, staticmethod))
    function = thing.__func__ if isinstance(thing, (staticmethod, classmethod)) else thing
    return list(inspect.signature(function).parameters.values())[0 if is_bound else 1 :]


def differences(mine: list[Parameter], theirs: list[Parameter]) -> list[str]:
    """Yield the reasons why a call that fits ``theirs`` may not fit ``mine``."""
    found = []
    for i, want in enumerate(theirs):
        have = mine[i] if i < len(mine) else None
        if have is None or have.name != want.name:
            found.append(f"parameter {i} is {have.name if have else 'missing'}, not {want.name}")
        elif have.default != want.default or type(have.default) is not type(want.default):
            found.append(f"the default of {want.name} is {have.default!r}, not {want.default!r}")
        elif have.kind != want.kind and want.kind is not Parameter.KEYWORD_ONLY:
            found.append(f"{want.name} is {have.kind.description}, not {want.kind.description}")
    variadic = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}
    required = [p.name for p in mine[len(theirs) :] if p.default is Parameter.empty and p.kind not in variadic]
    return [*found, *(f"{name} is required" for name in required)]


def is_awaited(thing: Any) -> bool:
    """Return True for a coroutine function, or a function that returns a CacheTask."""
    function = thing.__func__ if isinstance(thing, (staticmethod, classmethod)) else thing
    if isinstance(function, type):
        return False
    return inspect.iscoroutinefunction(function) or inspect.signature(function).return_annotation in {
        "CacheTask",
        CacheTask,
    }


@pytest.mark.parametrize("call", CALLED, ids=lambda call: call.name)
def test_a_call_has_upstreams_parameters_or_a_reason(call: Call) -> None:
    if is_missing(call.name) or call.name in BY_HAND:
        return
    thing = lookup(call.name)
    assert callable(thing) or isinstance(thing, (staticmethod, classmethod))
    found = differences(parameters(thing), list(call.signature.parameters.values()))
    if call.name in ON_PURPOSE:
        assert found, f"{call.name} is as upstream's: take it off the list"
    else:
        assert not found, call.name


@pytest.mark.parametrize("call", CALLED, ids=lambda call: call.name)
def test_what_moves_or_waits_is_awaited_and_nothing_else(call: Call) -> None:
    if not is_missing(call.name):
        assert is_awaited(lookup(call.name)) is call.is_awaited


def test_every_deviation_has_its_reason_in_a_sentence() -> None:
    assert set(ON_PURPOSE) <= {call.name for call in CALLED}
    assert all(re.fullmatch(r"[A-Z].*[^.]\.", reason) for reason in ON_PURPOSE.values())


def test_exactly_what_is_on_the_list_is_not_there_yet() -> None:
    members = {f"{owner}.{name}" for table in (READ_ONLY, SETTABLE) for owner in table for name in table[owner].split()}
    constants = {f"{owner}.{name}" for owner in CONSTANTS for name in CONSTANTS[owner]}
    everything = {call.name for call in CALLED} | members | constants

    def topmost(name: str) -> str:
        owner = name.partition(".")[0]
        return owner if lookup(owner) is None else name

    missing = {topmost(name) for name in everything if not is_there(name)}
    assert missing == ONLY_BLOCKING


def is_there(name: str) -> bool:
    owner, _, member = name.partition(".")
    kind = lookup(owner)
    is_field = isinstance(kind, type) and issubclass(kind, BaseModel) and member in kind.model_fields
    return lookup(name) is not None or is_field


@pytest.mark.parametrize("owner", READ_ONLY)
def test_what_is_read_is_a_property(owner: str) -> None:
    for name in READ_ONLY[owner].split():
        assert isinstance(lookup(f"{owner}.{name}"), property), name


@pytest.mark.parametrize("owner", SETTABLE)
def test_what_is_set_can_be_read_and_set(owner: str) -> None:
    if owner in ONLY_BLOCKING:
        return
    kind = lookup(owner)
    for name in SETTABLE[owner].split():
        found = lookup(f"{owner}.{name}")
        is_field = issubclass(kind, BaseModel) and name in kind.model_fields and not kind.model_fields[name].frozen
        assert is_field or (isinstance(found, property) and found.fset is not None), name


@pytest.mark.parametrize("owner", CONSTANTS)
def test_constants_are_numbers_and_upstreams_and_no_others(owner: str) -> None:
    if owner in ONLY_BLOCKING:
        return
    kind = lookup(owner)
    assert issubclass(kind, IntEnum)
    assert {member.name: member.value for member in kind} == CONSTANTS[owner]
    assert all(kind(number) is kind[name] for name, number in CONSTANTS[owner].items())


@pytest.mark.parametrize("owner", ["LLMRole", "Placement"])
def test_roles_and_placements_are_written_as_upstream_writes_them(owner: str) -> None:
    assert {str(member) for member in lookup(owner)} == {f"{owner}.{name}" for name in CONSTANTS[owner]}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_key_takes_its_arguments_by_position_and_by_name(name: str) -> None:
    theirs = next(call for call in CALLED if call.name == name).signature.parameters
    make: Callable[..., Any] = BY_HAND[name]
    numbers = {parameter: 11 + i for i, parameter in enumerate(theirs)}
    required = {p: numbers[p] for p in theirs if theirs[p].default is Parameter.empty}
    key = make(*numbers.values())
    assert {p: getattr(key, p) for p in theirs} == numbers
    assert make(**numbers) == key
    assert key.prompt_cluster_id == key.cluster_id
    assert make(
        prompt_cluster_id=required["cluster_id"], **{p: n for p, n in required.items() if p != "cluster_id"}
    ) == (make(**required))
    for parameter in set(theirs) - set(required):
        assert getattr(make(**required), parameter) == theirs[parameter].default
    mistakes: list[tuple[list[int], dict[str, int]]] = [
        ([*numbers.values(), 1], {}),
        ([], {**required, "other": 1}),
        ([], {}),
    ]
    for positional, named in mistakes:
        with pytest.raises(ParamInvalid):
            make(*positional, **named)


def test_everything_upstream_names_is_exported() -> None:
    owners = {call.name.partition(".")[0] for call in CALLED} | set(CONSTANTS)
    assert owners - ONLY_BLOCKING <= set(aiodatadist.__all__)


@pytest.mark.parametrize(
    ("mine", "complaint"),
    [
        ("f(a, c=1)", "parameter 1 is c, not b"),
        ("f(b=1, a=2)", "parameter 0 is b, not a"),
        ("f(a)", "parameter 1 is missing, not b"),
        ("f(a, b=2)", "the default of b is 2, not 1"),
        ("f(a, b=True)", "the default of b is True, not 1"),
        ("f(a, *, b=1)", "b is keyword-only, not positional or keyword"),
        ("f(a, b=1, *, c)", "c is required"),
        ("f(a, b=1, *, c=3)", None),
        ("f(a, b=1, c=3)", None),
    ],
)
def test_a_renamed_moved_or_changed_parameter_is_noticed(mine: str, complaint: str | None) -> None:
    have, want = (list(parse(text).signature.parameters.values()) for text in (mine, "f(a, b=1)"))
    found = differences(have, want)
    assert (found[0] if found else None) == complaint
