"""Processes that stand still at random, and go on."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests import children, freezer
from tests.freezer import ByCgroup, BySignal, Freezer, descendants


@dataclass
class Noted:
    """Freezes nothing."""

    frozen: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    def may(self, _: int) -> bool:
        return True

    def freeze(self, process: int) -> None:
        self.frozen.append(process)
        self.calls.append(process)

    def thaw(self, process: int) -> None:
        self.frozen.remove(process)

    def close(self) -> None:
        """Do nothing: nothing is left."""


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""


@pytest.fixture
def family() -> Iterator[tuple[children.Popen[str], int]]:
    """Start a process that repeats each line. Yield it and its child's id."""
    with children.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        yield parent, int(parent.stdout.readline())


def test_all_below_a_process_are_found(family: tuple[children.Popen[str], int]) -> None:
    parent, child = family
    assert set(descendants(parent.pid)) == {parent.pid, child}


def test_a_process_stands_still_once_at_a_time_and_goes_on(family: tuple[children.Popen[str], int]) -> None:
    parent, child = family
    noted = Noted()
    made = Freezer(parent.pid, random.Random(1), noted)
    for _ in range(50):
        made.freeze_one(10.0)
    assert sorted(noted.calls) == sorted({parent.pid, child})
    made.thaw(10.0)
    assert len(noted.frozen) == 2, "the shortest time is 0.1 s"
    made.thaw(10.9)
    assert not noted.frozen
    assert made.count == 2


def stands_still(method: ByCgroup | BySignal, process: int) -> bool:
    if isinstance(method, ByCgroup):
        return "frozen 1" in (method.folder(process) / "cgroup.events").read_text()
    return (freezer.PROC / str(process) / "stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("kind", [ByCgroup, BySignal])
def test_what_was_frozen_answers_when_it_goes_on(
    kind: type[ByCgroup | BySignal], family: tuple[children.Popen[str], int]
) -> None:
    parent, _ = family
    try:
        method = kind()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    assert parent.stdin is not None
    assert parent.stdout is not None
    method.freeze(parent.pid)
    parent.stdin.write("hello\n")
    parent.stdin.flush()
    while not stands_still(method, parent.pid):
        os.sched_yield()
    method.thaw(parent.pid)
    method.close()
    assert parent.stdout.readline() == "hello\n"


def test_signals_stop_only_what_runs_pytest(family: tuple[children.Popen[str], int]) -> None:
    assert not BySignal().may(family[1])


def test_a_run_ends_with_the_exit_code_of_its_command(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import json, sys; print(json.dumps(sys.argv[1:])); sys.exit(7)"
    assert freezer.run([sys.executable, "-c", code, "-m", "some tests"], 5) == 7
    first, last = capfd.readouterr().out.splitlines()
    assert json.loads(first) == ["-m", "some tests"]
    assert last.startswith("seed 5: processes were frozen ")
