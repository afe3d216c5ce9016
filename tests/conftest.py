"""Every asynchronous test runs on asyncio's own loop and on uvloop, with softnpu unless the environment says otherwise."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from tests import strictness

os.environ.setdefault("AIODATADIST_RUNTIME", "soft")
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # numpy's threads and ours on two cores make a run ten times as long


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long ones run in the night."""
    if os.environ.get("AIODATADIST_NIGHTLY") != "1":
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)


def pytest_collection_finish() -> None:
    """Some hundred thousand objects of all tests' are here to stay: garbage collections need not look at them again."""
    gc.collect()
    gc.freeze()


strictness.install()


@pytest.fixture(autouse=True)
def anyio_in_tasks_only() -> Iterator[None]:
    """anyio was used in no callback of the loop's: that works, or not, with what else is installed."""
    yield
    assert not (found := strictness.taken()), f"anyio outside a task, {len(found)} times; first\n{found[0]}"


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
    """Threads and open files are back to where they were."""
    gc.collect()
    files, threads = open_files(), threading.active_count()
    yield
    gc.collect()
    left = {name for name in open_files() - files if "softnpu" in name or "eventfd" in name or "socket" in name}
    assert not left, f"still open: {sorted(left)}"
    assert threading.active_count() <= threads + 8, "anyio's worker threads apart, none may be left"
