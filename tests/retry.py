"""Runs a pytest command and gives each failed test a second chance, alone: ``python -m tests.retry -- python -m pytest ...``.

If every failed test passes in its second run, the command succeeds and the tests are written to the file that
``AIODATADIST_FLAKY`` names, each with its first failure. Without that variable nothing is retried.

pytest itself writes a journal of its tests, in hooks that ``conftest.py`` imports from here. From the journal this module
knows what failed, and what was running when the process died: pytest-timeout ends the process, not only the test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

FLAKY = "AIODATADIST_FLAKY"
JOURNAL = "AIODATADIST_JOURNAL"
SELECTION = "AIODATADIST_SELECTION"
MOST_FAILURES = 8
"""More failures than this are a defect, not bad luck: nothing is retried."""
MOST_CHARACTERS = 12_000
"""Of one failure. The beginning and the end are kept."""


@dataclass
class Journal:
    """The course of one pytest run."""

    started: dict[str, None] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    is_complete: bool = False

    @classmethod
    def read(cls, path: Path) -> Journal:
        journal = cls()
        for line in path.read_text().splitlines() if path.exists() else ():
            kind, test, text = json.loads(line)
            match kind:
                case "start":
                    journal.started[test] = None
                case "failed":
                    journal.failed.setdefault(test, text)
                case "finish":
                    journal.finished.add(test)
                case "complete":
                    journal.is_complete = True
        return journal

    def interrupted(self) -> list[str]:
        """Return the tests that were running when the process died."""
        return [test for test in self.started if test not in self.finished]


# ---- in pytest's process ----

_orders: dict[str, str] = {}


def pytest_configure() -> None:
    # Taken out of the environment: a test may run pytest in a child process, whose tests are not ours.
    _orders.update({name: os.environ.pop(name) for name in (JOURNAL, SELECTION) if name in os.environ})


def pytest_runtest_logstart(nodeid: str) -> None:
    _write("start", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _write("failed", report.nodeid, report.longreprtext)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _write("finish", nodeid)


def pytest_unconfigure() -> None:
    _write("complete", "")


def selected(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that this run is for: all of them, or those that ``AIODATADIST_SELECTION`` asks for."""
    if not (path := _orders.get(SELECTION)):
        return list(items)
    wanted = json.loads(Path(path).read_text())
    if "only" in wanted:
        return [item for item in items if item.nodeid in wanted["only"]]
    return [item for item in items if item.nodeid not in wanted["without"]]


def _write(kind: str, test: str, text: str = "") -> None:
    # In workers no such hook is called: they report to the process that forked them, which writes for all.
    if path := _orders.get(JOURNAL):
        with Path(path).open("a") as file:
            file.write(json.dumps([kind, test, text]) + "\n")


# ---- around it ----


class Retry:
    """A pytest command, and the second runs of its failed tests."""

    def __init__(self, command: Sequence[str], flaky: Path, folder: Path) -> None:
        self._command = command
        self._flaky = flaky
        self._folder = folder
        self._runs = 0
        self._started: set[str] = set()
        self._failures: dict[str, str] = {}

    def run(self) -> int:
        """Return the exit status of the command; 0 if every failed test passed in its second run."""
        alone = list(without_workers(self._command))
        status, journal = self._pytest(self._command)
        while status and self._note(journal) and not journal.is_complete:
            # The process died in a test: the tests behind it have not run yet.
            status, journal = self._pytest(alone, {"without": sorted(self._started)})
            status = 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status
        if status and not (status == pytest.ExitCode.TESTS_FAILED and journal.failed):
            return status
        if len(self._failures) > MOST_FAILURES:
            print(f"retry: {len(self._failures)} tests failed, more than {MOST_FAILURES}: none is retried", flush=True)
            return pytest.ExitCode.TESTS_FAILED
        return self._second_runs(alone)

    def _note(self, journal: Journal) -> bool:
        """Remember the failures of a run. Return False if the run failed for another reason than a test."""
        self._started |= journal.started.keys()
        found = dict.fromkeys(journal.interrupted(), "the process died in this test; see the log") | journal.failed
        self._failures |= found
        return bool(found)

    def _second_runs(self, alone: Sequence[str]) -> int:
        for test, failure in self._failures.items():
            print(f"retry: {test}", flush=True)
            status, journal = self._pytest(alone, {"only": [test]})
            if status or test not in journal.finished:
                print(f"retry: failed twice: {test}", flush=True)
                return status or pytest.ExitCode.TESTS_FAILED
            record(self._flaky, f"{test} of {' '.join(self._command)}", failure)
        return 0

    def _pytest(self, command: Sequence[str], selection: dict[str, list[str]] | None = None) -> tuple[int, Journal]:
        self._runs += 1
        journal = self._folder / f"journal-{self._runs}"
        environment = {name: value for name, value in os.environ.items() if name not in (FLAKY, SELECTION)}
        environment[JOURNAL] = str(journal)
        if selection is not None:
            wanted = self._folder / f"selection-{self._runs}"
            wanted.write_text(json.dumps(selection))
            environment[SELECTION] = str(wanted)
        status = subprocess.run(command, check=False, env=environment).returncode
        return status, Journal.read(journal)


def without_workers(command: Iterable[str]) -> Iterable[str]:
    """Leave out the option that spreads tests over processes."""
    words = iter(command)
    for word in words:
        if word == "--workers":
            next(words)
        else:
            yield word


def record(flaky: Path, name: str, failure: str) -> None:
    """Add a test that failed once and then passed."""
    if len(failure) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        failure = f"{failure[:half]}\n[...]\n{failure[-half:]}"
    flaky.parent.mkdir(parents=True, exist_ok=True)
    with flaky.open("a") as file:
        file.write(f"---- {name}\n{failure.rstrip()}\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.retry", description=__doc__.splitlines()[0])
    parser.add_argument("command", nargs="+", help="the pytest command, behind --")
    command = parser.parse_args().command
    if not (flaky := os.environ.get(FLAKY)):
        sys.exit(subprocess.run(command, check=False).returncode)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(Retry(command, Path(flaky), Path(folder)).run())


if __name__ == "__main__":
    main()
