"""Event loops of tests, and their choice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests import loops

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def by_day(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (loops.VARIABLE, "AIODATADIST_NIGHTLY"):
        monkeypatch.delenv(name, raising=False)


def test_what_touches_the_loop_is_there_and_runs_on_both() -> None:
    for place in loops.TOUCHES_THE_LOOP:
        assert (ROOT / place).exists(), place
        assert loops.loops_of(f"{place}::test_it").keys() == {"asyncio", "uvloop"}


def test_others_run_on_one_always_the_same_and_together_on_both() -> None:
    tests = [f"tests/test_pull.py::test_{i}" for i in range(400)]
    first = [tuple(loops.loops_of(test)) for test in tests]
    assert first == [tuple(loops.loops_of(test)) for test in tests]
    assert all(first.count((name,)) > 100 for name in loops.LOOPS)


@pytest.mark.parametrize(("name", "value"), [(loops.VARIABLE, "both"), ("AIODATADIST_NIGHTLY", "1")])
def test_all_run_on_both_in_the_night_and_when_told(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert len(loops.loops_of("tests/test_pull.py::test_0")) == 2


def test_who_is_not_asynchronous_has_no_loop(request: pytest.FixtureRequest) -> None:
    assert loops.name_of(request.node) == ""
    assert not loops.is_on_one_of_them(request.node)


async def test_an_asynchronous_test_is_on_one_and_counted(request: pytest.FixtureRequest) -> None:
    module = type(asyncio.get_running_loop()).__module__.split(".")[0]
    assert loops.name_of(request.node) == module
    assert loops.is_on_one_of_them(request.node)
