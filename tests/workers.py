"""A pytest plugin that runs tests in forked worker processes: ``python -m pytest -p tests.workers --workers 4``.

The tests are collected once, and each worker inherits them: it imports and collects nothing. Workers are forked before any
test has run, from a process with one thread and no event loop. They take tests from one queue, a few at a time. A worker
stays with a file as long as tests of it are left, then takes the next file, then helps another worker with its file.
Files that have the same ``TOGETHER`` count as one file, because they share something that is made once in a process.

If a worker dies, the test that it ran fails, and another worker takes its place. A test without a result fails the run.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
from _pytest.runner import runtestprotocol

from tests import children

AT_ONCE = 4
"""The number of tests that a worker is given at a time."""
LAST = "unit"
"""Tests in folders of this name run last. They are short, so all workers end at about the same time."""
SET_DEATH_SIGNAL = 1
"""The option of ``prctl`` that sets the signal a process gets when its parent ends."""

Given = list[int]
"""The numbers of the tests that a worker must run. An empty list ends it."""
Result = tuple[int, list[dict[str, Any]]]
"""A test's number, and its serialised reports."""


MORE = None
"""The message by which a worker asks for more tests."""
GONE: Final = object()
"""The message that stands for the end of a worker."""


class Lost(Exception):
    """Tests have no result, or more than one."""


# ---- which test next ----


def file_of(item: pytest.Item) -> str:
    """Return the file of a test, or the name that the files have in common that belong together."""
    return getattr(getattr(item, "module", None), "TOGETHER", item.nodeid.partition("::")[0])


class Queue:
    """The tests that have not been given to a worker, by file.

    Args:
        files: the file of each test.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._of = files
        self._left: dict[str, deque[int]] = {}
        for number in sorted(range(len(files)), key=lambda number: LAST in Path(files[number]).parts):
            self._left.setdefault(files[number], deque()).append(number)
        self._new = deque(self._left)

    def take(self, file: str) -> Given:
        """Take the next tests for a worker that ran tests of ``file`` before. None are left if it is empty."""
        while self._new and not self._left.get(file):
            file = self._new.popleft()
        if not self._left.get(file):
            file = max(self._left, key=lambda each: len(self._left[each]))
        tests = self._left[file]
        return [tests.popleft() for _ in range(min(AT_ONCE, len(tests)))]

    def put_back(self, tests: Given) -> None:
        """Take back tests of one file that were given to a worker, which did not run them."""
        if tests:
            self._left[self._of[tests[0]]].extendleft(reversed(tests))


# ---- in a worker ----


class Worker:
    """The plugin of a worker process, which runs tests and sends their reports."""

    def __init__(self, session: pytest.Session, channel: Connection) -> None:
        self._session = session
        self._config = session.config
        self._channel = channel
        self._reports: list[pytest.TestReport] = []

    def become(self, number: int, count: int, base: Path) -> None:
        """Set up this process, which has just been forked, as worker ``number`` of ``count``."""
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        # aiodatadist.testing looks at these names, which are pytest-xdist's, when it shares out ports.
        os.environ |= {"PYTEST_XDIST_WORKER": f"gw{number}", "PYTEST_XDIST_WORKER_COUNT": str(count)}
        factory = self._config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = base / f"worker-{number}"
        factory._basetemp.mkdir(mode=0o700)
        random.seed()
        self._config.pluginmanager.register(self, "worker")
        self._config.pluginmanager.getplugin("capturemanager").start_global_capturing()

    def run(self) -> None:
        """Run tests until none are given."""
        children.server()  # what it imports takes seconds on a busy machine, and no test waits for that
        last = 0
        while tests := self._channel.recv():
            for last in tests:
                self._run(last)
            self._channel.send(MORE)
        self._end(last)

    def _run(self, number: int) -> None:
        items = self._session.items
        # What was set up for the file of the last test is torn down, if this is a test of another file.
        self._reports = self._torn_down(items[number])
        following = items[number + 1] if number + 1 < len(items) else None
        self._config.hook.pytest_runtest_protocol(item=items[number], nextitem=following)
        self._send(number, self._reports)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a test and keep its reports, which another process logs."""
        self._reports += runtestprotocol(item, log=False, nextitem=nextitem)
        return True

    def _torn_down(self, item: pytest.Item | None) -> list[pytest.TestReport]:
        """Tear down what ``item`` does not need, and return a report if that fails."""
        try:
            self._session._setupstate.teardown_exact(item)
        except Exception:
            name, where = (item.nodeid, item.location) if item else ("the end of a worker", ("", None, ""))
            return [pytest.TestReport(name, where, {}, "failed", traceback.format_exc(), "teardown")]
        return []

    def _send(self, number: int, reports: Iterable[pytest.TestReport]) -> None:
        hook, told = self._config.hook, filter(self._is_told, reports)
        self._channel.send(
            (number, [hook.pytest_report_to_serializable(config=self._config, report=each) for each in told])
        )

    def _is_told(self, report: pytest.TestReport) -> bool:
        """Return False for a set-up or tear-down that passed: of three reports of a test, two are not shown."""
        option = self._config.option
        return report.when == "call" or not report.passed or bool(report.sections or option.durations)

    def _end(self, last: int) -> None:
        reports = self._torn_down(None)
        atexit._run_exitfuncs()
        if reports:
            self._send(last, reports)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        """Pass a warning on to the process that prints all of them."""
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        passed_on = warnings.WarningMessage(
            UserWarning(text), UserWarning, warning_message.filename, warning_message.lineno
        )
        self._channel.send({"warning_message": passed_on, "when": when, "nodeid": nodeid, "location": location})


# ---- around the workers ----


@dataclass(eq=False)
class Handle:
    """A worker, as the process that forked it sees it."""

    number: int
    pid: int
    channel: Connection
    ended: int
    given: Given = field(default_factory=list)
    last: int = 0


class Runner:
    """Workers, and the results of their tests."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session = session
        self._config = session.config
        self._hook = session.config.hook
        self._count = count
        self._forked = 0
        self._workers: list[Handle] = []
        self._queue = Queue([file_of(item) for item in session.items])
        self._results = [0] * len(session.items)
        self._base: Path = self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]

    def run(self) -> None:
        """Run all tests. Raises Lost if a test has no result, and what pytest raises to end early."""
        capture = self._config.pluginmanager.getplugin("capturemanager")
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        terminal.showfspath = False  # files are mixed
        capture.stop_global_capturing()  # before a fork, because the files with what was captured would be shared
        try:
            for _ in range(self._count):
                self._fork()
            while self._workers:
                self._take_reports()
        finally:
            for worker in self._workers:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
            capture.start_global_capturing()
        lost = [item.nodeid for item, count in zip(self._session.items, self._results, strict=True) if count != 1]
        if lost:
            raise Lost(f"{len(lost)} tests have no result, or more than one: {', '.join(lost[:20])}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write how many tests ran."""
        ran = sum(map(bool, self._results))
        terminalreporter.write_line(f"workers: {ran} of {len(self._results)} tests ran in {self._forked} processes")

    def _fork(self) -> None:
        if (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
            raise pytest.UsageError(f"{threads} threads after the collection: a test's module starts one, and none may")
        sys.stdout.flush()
        sys.stderr.flush()
        ours, theirs = Pipe()
        number, self._forked = self._forked, self._forked + 1
        pid = os.fork()
        if not pid:
            self._be_worker(number, theirs)
        theirs.close()
        worker = Handle(number, pid, ours, os.pidfd_open(pid))
        self._workers.append(worker)
        self._give(worker)

    def _be_worker(self, number: int, channel: Connection) -> NoReturn:
        status = 1
        try:
            worker = Worker(self._session, channel)
            worker.become(number, self._count, self._base)
            worker.run()
            status = 0
        except KeyboardInterrupt:
            status = 130
        except BaseException:
            self._config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _give(self, worker: Handle) -> None:
        """Give a worker tests, or let it end."""
        worker.given = self._queue.take(file_of(self._session.items[worker.last]))
        with suppress(BrokenPipeError):  # it died, which is noticed next
            worker.channel.send(worker.given)
        if worker.given:
            worker.last = worker.given[-1]

    def _take_reports(self) -> None:
        """Wait for workers, and take what each of them has sent."""
        ready = set(wait([each.channel for each in self._workers] + [each.ended for each in self._workers]))
        for worker in list(self._workers):
            if worker.channel not in ready and worker.ended not in ready:
                continue
            try:
                sent: Any = worker.channel.recv() if worker.channel.poll() else GONE
            except (EOFError, OSError):  # it died, perhaps half-way through a report
                sent = GONE
            if sent is GONE:
                self._ended(worker)
            else:
                self._take(worker, sent)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _take(self, worker: Handle, sent: Result | dict[str, Any] | None) -> None:
        if sent is MORE:
            self._give(worker)
            return
        if isinstance(sent, dict):
            self._hook.pytest_warning_recorded.call_historic(kwargs=sent)
            return
        number, reports = sent
        deserialised = [self._hook.pytest_report_from_serializable(config=self._config, data=each) for each in reports]
        if number in worker.given:
            worker.given.remove(number)
            self._report(number, deserialised)
        else:  # what it says of its end
            for report in deserialised:
                self._hook.pytest_runtest_logreport(report=report)

    def _report(self, number: int, reports: Sequence[pytest.TestReport]) -> None:
        self._results[number] += 1
        item, location = self._session.items[number], reports[-1].location  # the item's own would be looked for again
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=location)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=location)

    def _ended(self, worker: Handle) -> None:
        """Forget a worker that has ended. If it died in a test, fail the test, and fork another worker."""
        self._workers.remove(worker)
        worker.channel.close()
        os.close(worker.ended)
        _, status = os.waitpid(worker.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if not code and not worker.given:
            return
        if code == 130:
            raise KeyboardInterrupt
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        number = worker.given.pop(0) if (is_in_a_test := bool(worker.given)) else worker.last
        item = self._session.items[number]
        report = pytest.TestReport(
            item.nodeid, item.location, {}, "failed",
            f"worker {worker.number}, process {worker.pid}, {how} {'in' if is_in_a_test else 'after'} this test", "call",
        )  # fmt: skip
        self._queue.put_back(worker.given)
        if not is_in_a_test:
            self._hook.pytest_runtest_logreport(report=report)
            return
        self._report(number, [report])
        self._fork()


# ---- hooks of pytest ----


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="fork as many processes, which run the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in workers, if some are asked for and there are tests to run."""
    count = session.config.getoption("workers")
    if not count or not session.items or session.testsfailed or session.config.option.collectonly:
        return None
    runner = Runner(session, min(count, len(session.items)))
    session.config.pluginmanager.register(runner, "workers")
    runner.run()
    return True
