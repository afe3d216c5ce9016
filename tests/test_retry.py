"""A test that fails once and then passes does not stop the gate, and is named; one that fails twice stops it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import children, retry
from tests.lanes import ROOT

CONFTEST = """
import pytest
from tests import children, retry
from tests.retry import *

children.server = lambda: None  # no test here starts a program, and a server costs more than a run

def pytest_collection_modifyitems(items):
    items[:] = retry.selected(items)
"""
ONCE = """
import os
from pathlib import Path

def first_time(name):
    # Appends: a second process sees that the first was here.
    with Path(__file__).with_name(name).open("a+") as file:
        file.seek(0)
        seen = file.read()
        file.write(f"{os.getpid()}\\n")
    return not seen
"""


class Ended(NamedTuple):
    """A run that is over."""

    returncode: int
    stdout: str


class Project:
    """A folder of tests that is run through the retry."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.flaky = folder / "out" / "flaky.txt"
        self._monkeypatch = monkeypatch
        self._capfd = capfd
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "pytest.ini").write_text("[pytest]\n")

    def run(self, tests: str, *options: str, is_gate: bool = True) -> Ended:
        """Run the tests in processes, and the retry around them in this one."""
        (self.folder / "test_it.py").write_text(ONCE + tests)
        with self._monkeypatch.context() as patch:
            patch.chdir(self.folder)
            for name in (name for name in os.environ if name.startswith("PYTEST_")):
                patch.delenv(name)
            patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a start is twice as fast without them
            patch.setattr(subprocess, "run", children.run)
            patch.delenv(retry.FLAKY, raising=False)
            if is_gate:
                patch.setenv(retry.FLAKY, str(self.flaky))
            pytest_command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
            patch.setattr(sys, "argv", ["retry", "--", *pytest_command])
            with pytest.raises(SystemExit) as ended:
                retry.main()
        return Ended(int(ended.value.code or 0), self._capfd.readouterr().out)

    def flaky_text(self) -> str:
        return self.flaky.read_text() if self.flaky.exists() else ""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Project:
    return Project(tmp_path, monkeypatch, capfd)


PASSES_LATER = """
def test_good(): pass

def test_moody():
    assert not first_time("moody"), "the first failure"
"""
WORKERS = ("-p", "tests.workers", "--workers", "2")


@pytest.mark.parametrize("options", [(), WORKERS], ids=["one process", "workers"])
def test_test_that_passes_in_its_second_run_is_named_with_its_first_failure(
    project: Project, options: tuple[str, ...]
) -> None:
    ended = project.run(PASSES_LATER, *options)
    assert ended.returncode == 0, ended.stdout
    assert "test_it.py::test_moody" in project.flaky_text()
    assert "the first failure" in project.flaky_text()
    assert "test_good" not in project.flaky_text().replace("def test_good", "")
    runs = (project.folder / "moody").read_text().split()
    assert len(runs) == len(set(runs)) == 2, "its second run is a process of its own"


def test_test_that_fails_twice_fails_the_run(project: Project) -> None:
    ended = project.run(PASSES_LATER + "\ndef test_bad(): assert 0\n")
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert "failed twice: test_it.py::test_bad" in ended.stdout


def test_the_command_is_a_program(project: Project) -> None:
    (project.folder / "test_it.py").write_text("def test_bad(): assert 0")
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    environment.pop(retry.FLAKY, None)
    command = [sys.executable, "-m", "tests.retry", "--", sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    done = children.run(command, cwd=project.folder, env=environment, capture_output=True)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


def test_without_a_file_for_flaky_tests_nothing_is_retried(project: Project) -> None:
    assert project.run(PASSES_LATER, is_gate=False).returncode == pytest.ExitCode.TESTS_FAILED
    assert len((project.folder / "moody").read_text().split()) == 1


def test_process_that_dies_in_a_test_goes_on_behind_it(project: Project) -> None:
    ended = project.run(
        """
def test_before(): first_time("before")

def test_deadly():
    if first_time("deadly"):
        os._exit(1)

def test_behind(): first_time("behind")
"""
    )
    assert ended.returncode == 0, ended.stdout
    assert "test_it.py::test_deadly" in project.flaky_text()
    for name, times in (("before", 1), ("deadly", 2), ("behind", 1)):
        assert len((project.folder / name).read_text().split()) == times, name


def test_failure_behind_a_death_counts(project: Project) -> None:
    ended = project.run(
        """
def test_deadly():
    if first_time("deadly"):
        os._exit(1)

def test_behind(): assert 0
"""
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert "failed twice: test_it.py::test_behind" in ended.stdout


def test_process_that_dies_twice_in_a_test_fails_the_run(project: Project) -> None:
    assert project.run("\ndef test_deadly(): os._exit(1)\n").returncode == 1


def test_failing_teardown_is_retried(project: Project) -> None:
    ended = project.run(
        """
import pytest

@pytest.fixture
def resource():
    yield
    assert not first_time("teardown"), "left behind"

def test_it(resource): pass
"""
    )
    assert ended.returncode == 0, ended.stdout
    assert "left behind" in project.flaky_text()


def test_many_failures_are_a_defect(project: Project) -> None:
    ended = project.run(
        f"""
import pytest

@pytest.mark.parametrize("number", range({retry.MOST_FAILURES + 1}))
def test_it(number): assert not first_time(str(number))
"""
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert "none is retried" in ended.stdout


@pytest.mark.parametrize("tests", ["\nimport nothing_of_this_name\n", "\n"], ids=["import error", "no tests"])
def test_other_failures_are_not_retried(project: Project, tests: str) -> None:
    ended = project.run(tests)
    assert ended.returncode not in (0, pytest.ExitCode.TESTS_FAILED)
    assert "retry:" not in ended.stdout


def test_tests_of_a_child_process_are_not_in_the_journal(project: Project) -> None:
    ended = project.run(
        """
import subprocess, sys

def test_moody():
    assert not first_time("moody")

def test_parent():
    inner = Path(__file__).with_name("test_inner.py")
    inner.write_text("def test_inner(): assert 0")
    command = [sys.executable, "-m", "pytest", str(inner)]
    assert subprocess.run(command, capture_output=True).returncode == 1
""",
        "test_it.py",
    )
    assert ended.returncode == 0, ended.stdout
    assert "test_inner" not in project.flaky_text()


def test_long_failures_are_cut(tmp_path: Path) -> None:
    retry.record(tmp_path / "flaky.txt", "it", "a" * 50_000 + "the end")
    text = (tmp_path / "flaky.txt").read_text()
    assert len(text) < retry.MOST_CHARACTERS + 100
    assert text.startswith("---- it\naaa")
    assert text.endswith("the end\n")
