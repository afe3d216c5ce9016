"""Tests in forked workers: each runs once, what goes wrong in a worker fails the run, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import children
from tests.workers import AT_ONCE, Queue, file_of

CONFTEST = """
import os
from pathlib import Path
from tests import children

children.server = lambda: None  # no test here starts a program, and a server costs more than a run

def note(name, text=""):
    with Path(__file__).with_name(name).open("a") as file:
        file.write(f"{os.getpid()} {text}\\n")
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs files of tests in workers."""
    for name in (name for name in os.environ if name.startswith("PYTEST_")):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a start is twice as fast without them

    def started(*options: str, conftest: str = "", **files: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "conftest.py").write_text(CONFTEST + conftest)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        for name, text in files.items():
            (tmp_path / f"test_{name}.py").write_text(f"import os, pytest\nfrom conftest import note\n{text}")
        return children.run([*COMMAND, *options], cwd=tmp_path, capture_output=True, text=True)

    return started


COMMAND = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.workers", "--workers", "2"]


def notes(folder: Path, name: str) -> list[list[str]]:
    """Return a process and a text of each note."""
    return [line.split() for line in (folder / name).read_text().splitlines()]


MANY = """
@pytest.mark.parametrize("number", range(30))
def test_it(number): note("ran", number)
"""


def test_each_test_runs_once_in_one_of_the_workers(run: Run, tmp_path: Path) -> None:
    done = run(a=MANY, b=MANY)
    assert done.returncode == 0, done.stdout
    assert "workers: 60 of 60 tests ran in 2 processes" in done.stdout
    assert "60 passed" in done.stdout
    assert Counter(number for _, number in notes(tmp_path, "ran")) == {str(number): 2 for number in range(30)}
    assert len({process for process, _ in notes(tmp_path, "ran")}) == 2


def test_tests_are_collected_once(run: Run, tmp_path: Path) -> None:
    assert run(a=f"note('imported')\n{MANY}", b=MANY).returncode == 0
    assert len(notes(tmp_path, "imported")) == 1


def test_failure_is_shown_with_its_output(run: Run) -> None:
    done = run(
        a="def test_bad():\n    print('the output')\n    assert 0, 'the reason'\ndef test_good(): print('quiet')"
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "the output" in done.stdout
    assert "the reason" in done.stdout
    assert "quiet" not in done.stdout
    assert "FAILED test_a.py::test_bad" in done.stdout
    assert "1 failed, 1 passed" in done.stdout


@pytest.mark.parametrize(
    ("death", "words"),
    [
        ("os._exit(3)", "ended with 3"),
        ("os._exit(0)", "ended with 0"),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    ],
)
def test_death_of_a_worker_fails_its_test_alone(run: Run, tmp_path: Path, death: str, words: str) -> None:
    done = run(a=f"def test_deadly(): {death}\n{MANY}", b=MANY)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "FAILED test_a.py::test_deadly" in done.stdout
    assert re.search(rf"^worker \d, process \d+, (was )?{words} in this test$", done.stdout, re.MULTILINE), done.stdout
    assert "1 failed, 60 passed" in done.stdout
    assert "workers: 61 of 61 tests ran in 3 processes" in done.stdout
    assert len(notes(tmp_path, "ran")) == 60


def test_death_of_a_worker_half_way_through_a_report_fails_its_test_alone(run: Run) -> None:
    cut = """
import os, struct
from tests.workers import Worker
send = Worker._send

def cut(self, number, reports):
    if number == 7:
        os.write(self._channel.fileno(), struct.pack("!i", 100) + b"half")
        os._exit(3)
    send(self, number, reports)

Worker._send = cut
"""
    done = run(conftest=cut, a=MANY)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "FAILED test_a.py::test_it[7]" in done.stdout
    assert "1 failed, 29 passed" in done.stdout


def test_death_of_a_worker_at_its_end_fails_the_run(run: Run) -> None:
    done = run(a="import atexit\ndef test_it(): atexit.register(lambda: os._exit(4))")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "ended with 4 after this test" in done.stdout


def test_test_without_a_result_fails_the_run(run: Run) -> None:
    forgets = """
from tests.workers import Runner
report = Runner._report
Runner._report = lambda self, number, reports: number == 7 or report(self, number, reports)
"""
    done = run(conftest=forgets, a=MANY)
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR
    assert "1 tests have no result, or more than one: test_a.py::test_it[7]" in done.stdout


def test_worker_that_skips_a_test_fails_the_run(run: Run) -> None:
    skips = """
from tests.workers import Worker
run = Worker._run
Worker._run = lambda self, number: number == 7 or run(self, number)
"""
    done = run("--workers", "1", conftest=skips, a=MANY)
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR
    assert "1 tests have no result, or more than one: test_a.py::test_it[7]" in done.stdout


FIXTURES = """
@pytest.fixture(scope="module")
def module():
    note("module", "up")
    yield
    note("module", "down")

@pytest.mark.parametrize("number", range(9))
def test_it(number, module, session): note("ran")
"""
SESSION = """
import pytest

@pytest.fixture(scope="session")
def session():
    note("session", "up")
    yield
    note("session", "down")
"""


def test_fixtures_are_set_up_once_in_a_worker(run: Run, tmp_path: Path) -> None:
    assert run("--workers", "1", conftest=SESSION, a=FIXTURES, b=FIXTURES).returncode == 0
    assert [text for _, text in notes(tmp_path, "module")] == ["up", "down"] * 2
    assert [text for _, text in notes(tmp_path, "session")] == ["up", "down"]


def test_fixtures_are_torn_down_in_each_worker(run: Run, tmp_path: Path) -> None:
    assert run(conftest=SESSION, a=FIXTURES, b=FIXTURES, c=FIXTURES).returncode == 0
    for name in ("module", "session"):
        by_process: dict[str, list[str]] = {}
        for process, text in notes(tmp_path, name):
            by_process.setdefault(process, []).append(text)
        assert len(by_process) == 2
        for texts in by_process.values():
            assert texts == ["up", "down"] * (len(texts) // 2)


def test_failing_teardown_of_a_worker_fails_the_run(run: Run) -> None:
    failing = SESSION.replace('note("session", "down")', "assert 0, 'left behind'")
    done = run(conftest=failing, a=FIXTURES)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "left behind" in done.stdout


def test_warnings_are_shown(run: Run) -> None:
    done = run(a="import warnings\ndef test_it(): warnings.warn('beware')")
    assert done.returncode == 0, done.stdout
    assert "UserWarning: beware" in done.stdout


@pytest.mark.parametrize("limits", [(), ("-p", "tests.time_limits")], ids=["pytest-timeout's", "ours"])
def test_plugins_are_around_each_test(run: Run, limits: tuple[str, ...]) -> None:
    """Plugins do much around the protocol of a test: they catch warnings, explain assertions, and limit the time."""
    options = ("-p", "pytest_timeout", *limits, "-o", "timeout=0.1", "-o", "timeout_method=thread")
    done = run(*options, a="def test_it(): os.read(os.pipe()[0], 1)")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "Stack of MainThread" in done.stdout + done.stderr
    assert "ended with 1 in this test" in done.stdout


def test_temporary_folders_are_apart(run: Run, tmp_path: Path) -> None:
    folders = "def test_it(number, tmp_path): note('ran', tmp_path)"
    assert run(a=MANY.replace('def test_it(number): note("ran", number)', folders), b=MANY).returncode == 0
    found = [text for _, text in notes(tmp_path, "ran") if "/" in text]
    assert len(set(found)) == len(found) == 30


def test_run_ends_after_enough_failures(run: Run, tmp_path: Path) -> None:
    done = run("-x", a=f"def test_bad(): assert 0\n{MANY}{MANY.replace('test_it', 'test_other')}")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "stopping after 1 failures" in done.stdout


def test_thread_of_the_collection_is_refused(run: Run) -> None:
    done = run(
        a="import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\ndef test_it(): 0"
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "2 threads after the collection" in done.stdout + done.stderr


def test_interrupt_ends_all_processes(run: Run, tmp_path: Path) -> None:
    run(a="")
    (tmp_path / "test_a.py").write_text("def test_it():\n    print(flush=True)\n    input()\n")
    with children.Popen(
        [*COMMAND, "-s"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "\n":
                break
        os.killpg(process.pid, signal.SIGINT)
        assert "KeyboardInterrupt" in process.stdout.read()  # ends when no process has it open any longer
        assert process.wait() == pytest.ExitCode.INTERRUPTED


def test_files_that_belong_together_are_one_for_the_queue(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert file_of(request.node) == request.node.nodeid.partition("::")[0]
    monkeypatch.setattr(sys.modules[__name__], "TOGETHER", "tests/others", raising=False)
    assert file_of(request.node) == "tests/others"


def test_worker_stays_with_its_file_and_units_come_last() -> None:
    files = ["tests/unit/test_u.py"] * 2 + ["tests/test_a.py"] * 9 + ["tests/test_b.py"] * 3
    queue = Queue(files)
    assert queue.take("") == [2, 3, 4, 5]
    assert queue.take("") == [11, 12, 13]
    assert queue.take("tests/test_a.py") == [6, 7, 8, 9]
    assert queue.take("tests/test_b.py") == [0, 1]
    assert queue.take("tests/unit/test_u.py") == [10], "the rest of a file that another worker has begun"
    queue.put_back([10])
    assert queue.take("tests/unit/test_u.py") == [10]
    assert queue.take("tests/test_a.py") == []
    assert AT_ONCE == 4
