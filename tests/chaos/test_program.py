"""A seed decides which faults come."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from aiodatadist import TransferPriority
from aiodatadist._cli.chaos.profiles import PROFILES
from aiodatadist._cli.chaos.program import FAULTS as NAMES
from aiodatadist._cli.chaos.program import Step, program
from aiodatadist._cli.chaos.terms import Terms, some_terms

LANES = PROFILES["one-sided"].lanes
FAULTS = {
    "processes": {"kill", "stop", "spin", "hog", "clock", "full"},
    "network": {
        "latency", "bandwidth", "slicer", "hold", "slowclose", "resetpeer", "limitdata", "corrupt", "drop", "repeat",
        "reorder", "down",
    },
    "devices": {"delay", "fail", "exec", "hang"},
    "copies": {"stop-copy"},
}  # fmt: skip


def steps(seed: int, lane: str, profile: str = "one-sided", count: int = 200) -> list[Step]:
    return list(islice(program(seed, PROFILES[profile], lane), count))


@pytest.mark.parametrize("lane", LANES)
def test_the_same_seed_is_the_same_program_and_another_is_another(lane: str) -> None:
    assert steps(1, lane) == steps(1, lane)
    assert steps(1, lane) != steps(2, lane)
    assert steps(1, lane) != steps(1, lane, "uvloop")


@pytest.mark.parametrize("lane", LANES)
def test_every_fault_comes(lane: str) -> None:
    assert {step.name for step in steps(1, lane)} == FAULTS[lane]


def test_all_faults_are_those_of_the_lanes() -> None:
    engine = {step.name for step in steps(1, "engine", "redis")}
    flips = {step.name for step in steps(1, "devices", "checksum")}
    assert set(NAMES) == engine.union(flips, *FAULTS.values())


def test_terms_come_of_the_seed_and_where_nothing_may_fail_no_deadline_is_short() -> None:
    def drawn(profile: str, seed: int) -> list[Terms]:
        chance = random.Random(seed)
        return [some_terms(chance, PROFILES[profile]) for _ in range(200)]

    assert drawn("one-sided", 1) == drawn("one-sided", 1) != drawn("one-sided", 2)
    assert {terms.priority for terms in drawn("one-sided", 1)} == set(TransferPriority)
    assert {terms.deadline for terms in drawn("one-sided", 1)} == {None, 0.002, 0.02, 0.2, 2.0}
    assert {terms.deadline for terms in drawn("calm", 1)} == {None, 30.0}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_fault_ends_before_the_patience_of_an_operation(profile: str) -> None:
    for lane in PROFILES[profile].lanes:
        assert max(step.seconds for step in steps(1, lane, profile)) < 3
