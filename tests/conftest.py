"""Asynchronous tests run on asyncio's own loop, on uvloop, or both: see ``loops.py``. softnpu is the device, unless told."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

import anyio._backends._asyncio  # noqa: F401 - pytest rewrites anyio's modules, which fails where the stack is deep (Python 3.11)
import pytest

from aiodatadist._testing import pairs
from tests import children, clock, loops, over_tcp, profiles, retry, skipped, strictness
from tests.heap import pytest_collection, pytest_runtest_setup  # noqa: F401 - hooks of pytest
from tests.retry import (  # noqa: F401 - hooks of pytest
    pytest_configure,
    pytest_runtest_logfinish,
    pytest_runtest_logreport,
    pytest_runtest_logstart,
    pytest_unconfigure,
)
from tests.time_limits import pytest_timeout_cancel_timer, pytest_timeout_set_timer  # noqa: F401 - hooks of pytest

os.environ.setdefault("AIODATADIST_RUNTIME", "soft")
os.environ.setdefault("HCCL_NPU_SOCKET_PORT_RANGE", "auto")  # other tests' processes use these devices, too
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # numpy's threads and ours on two cores make a run ten times as long
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


pairs.DEFAULTS["sync_kv_timeout"] = 600_000  # a transfer's limit strikes where a test sets one, and on no busy machine


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, loops.Factory]:
    return loops.loops_of(item.nodeid, item.get_closest_marker("autojump") is not None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long tests to the night, and run only failed tests in a retry."""
    items[:] = retry.selected(items)
    over_tcp.mark(items)
    if not profiles.IS_NIGHT:
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        LEFT_OUT["nightly"] = len(nightly)
    LEFT_OUT["other_loop"] = sum(map(loops.is_on_one_of_them, items))


def pytest_collection_finish() -> None:
    """Freeze some hundred thousand objects of the tests, so that garbage collections need not look at them again."""
    gc.collect()
    gc.freeze()


strictness.install()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    """Fail a test that used anyio in a callback of the loop: that works, or not, with what else is installed.

    This is no fixture that every test uses, because that would cost a tenth of most tests.
    """
    result = yield
    assert not (found := strictness.taken()), f"anyio outside a task, {len(found)} times; first\n{found[0]}"
    return result


# ---- what was left out ----

LEFT_OUT = {"nightly": 0, "other_loop": 0}
"""Tests, as counted when they were collected."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Write one line, after all others but the last one."""
    yield
    reports = terminalreporter.stats.get("skipped", [])
    if line := skipped.line((str(report.longrepr[2]) for report in reports), **LEFT_OUT):
        terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Name the event loop of a failed test: the test's own name may not."""
    report = yield
    if report.failed and (name := loops.name_of(item)):
        report.sections.append(("event loop", name))
        if name == "autojump":
            report.sections.append(("jumps of its clock", "\n".join(clock.JUMPS)))
    return report


# ---- nothing is left ----


def open_files() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{entry.name} {entry.readlink()}")
        except FileNotFoundError:
            continue
    return found


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Check that threads and open files are back to where they were."""
    children.server()  # its socket stays
    gc.collect()
    files, threads = open_files(), threading.active_count()
    yield
    gc.collect()
    left = {name for name in open_files() - files if "softnpu" in name or "eventfd" in name or "socket" in name}
    left = {name for name in left if int(name.split()[0]) not in children.own_descriptors()}
    assert not left, f"still open: {sorted(left)}"
    assert threading.active_count() <= threads + 8, "anyio's worker threads apart, none may be left"
