"""The blocking calls are upstream's: every name, every parameter, and nothing to await."""

from __future__ import annotations

import inspect
from inspect import Parameter
from typing import Any

import pytest
from pydantic import BaseModel

import aiodatadist
from aiodatadist import blocking
from aiodatadist.blocking import LLMConfig
from tests.conformance.api_v2 import CALLS, CONSTANTS, READ_ONLY, SETTABLE
from tests.conformance.test_api_surface import BY_HAND, CALLED, Call, differences, parameters

ON_PURPOSE = {
    "LLMException": "Without a status it is LLM_FAILED: an exception that carries LLM_SUCCESS is taken for none.",
    "Cache": "Only a cache manager makes one, and it keeps for itself what the last three arguments say.",
    "CacheManager": "Only an LLMDataDist makes one, of its engine.",
    "CacheTask": "Only a cache manager makes one, of what is under way.",
}
"""Calls with other parameters than upstream's, and why."""


def lookup(name: str) -> Any:
    owner, _, member = name.partition(".")
    found = getattr(blocking, owner)
    return inspect.getattr_static(found, member) if member else found


@pytest.mark.parametrize("call", CALLED, ids=lambda call: call.name)
def test_a_call_has_upstreams_parameters_and_returns_when_it_is_done(call: Call) -> None:
    thing = lookup(call.name)
    assert not inspect.iscoroutinefunction(getattr(thing, "__func__", thing))
    if call.name in BY_HAND:
        assert thing is BY_HAND[call.name]  # tried where it is made
        return
    found = differences(parameters(thing), list(call.signature.parameters.values()))
    assert bool(found) is (call.name in ON_PURPOSE), found


def test_what_upstream_initialises_with_has_to_be_given() -> None:
    assert inspect.signature(blocking.LLMDataDist.init).parameters["options"].default is Parameter.empty


def test_what_moves_bytes_returns_nothing_as_upstream() -> None:
    moving = [call.name for call in CALLED if call.name.startswith("CacheManager.p") or "copy" in call.name]
    assert moving
    assert {str(inspect.signature(lookup(name)).return_annotation) for name in moving} == {"None"}


@pytest.mark.parametrize("owner", READ_ONLY)
def test_what_is_read_is_a_property(owner: str) -> None:
    for name in READ_ONLY[owner].split():
        assert isinstance(lookup(f"{owner}.{name}"), property), name


@pytest.mark.parametrize("owner", SETTABLE)
def test_what_is_set_can_be_read_and_set(owner: str) -> None:
    kind = getattr(blocking, owner)
    for name in SETTABLE[owner].split():
        is_field = issubclass(kind, BaseModel) and name in kind.model_fields
        assert is_field or lookup(f"{owner}.{name}").fset is not None, name


def test_values_are_the_same_classes_as_the_awaitable_ones() -> None:
    own = {"CacheManager", "CacheTask", "LLMConfig", "LlmConfig", "LLMDataDist", "LayerSynchronizer"}
    owners = {line.removeprefix("await ").partition("(")[0].partition(".")[0] for line in CALLS.split("\n") if line}
    names = (owners | set(CONSTANTS)) - own
    assert all(getattr(blocking, name) is getattr(aiodatadist, name) for name in names)
    assert names | own <= set(blocking.__all__)


def test_a_mode_that_was_not_switched_on_is_off_and_not_among_the_options() -> None:
    config = LLMConfig()
    modes = {"llm.EnableCacheManager", "llm.EnableRemoteCacheAccessible"}
    assert (config.enable_cache_manager, config.enable_remote_cache_accessible) == (False, False)
    assert not modes & config.generate_options().keys()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = False
    assert {key: config.gen_options()[key] for key in modes} == dict(zip(sorted(modes), "10", strict=True))
    assert LLMConfig(enable_cache_manager=True).options["llm.EnableCacheManager"] == "1"


def test_every_name_that_is_exported_is_there() -> None:
    assert [name for name in blocking.__all__ if not hasattr(blocking, name)] == []
    assert len(set(blocking.__all__)) == len(blocking.__all__)
