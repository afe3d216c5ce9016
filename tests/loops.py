"""Event loops of tests: both where code touches the loop, all of them at night, one of them elsewhere."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Callable, Mapping

import pytest
import uvloop

from tests.clock import AutojumpLoop

Factory = Callable[[], asyncio.AbstractEventLoop]

LOOPS: dict[str, Factory] = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
VARIABLE = "AIODATADIST_LOOPS"
"""``both``: every test runs on both, whatever it touches."""

TOUCHES_THE_LOOP = (
    "tests/chaos/test_proxy.py",
    "tests/conformance/test_blob_exchange.py",
    "tests/context_caching/test_closing.py",
    "tests/context_caching/test_double_buffer.py",
    "tests/context_caching/test_loops.py",
    "tests/faults/test_cancellation.py",
    "tests/faults/test_checksums.py",
    "tests/faults/test_engine_survives.py",
    "tests/faults/test_ipv6.py",
    "tests/faults/test_liveness.py",
    "tests/faults/test_timeouts.py",
    "tests/hostile/test_tls_links.py",
    "tests/test_after_linking.py",
    "tests/test_children.py",
    "tests/test_deadlines.py",
    "tests/test_giving_way.py",
    "tests/test_listening.py",
    "tests/test_notifications.py",
    "tests/test_relink.py",
    "tests/unit/concurrency/test_deadlines.py",
    "tests/unit/link/",
    "tests/unit/test_stream.py",
    "tests/unit/test_synchronizers.py",
)
"""Files and folders: readers and writers of sockets and eventfds, callbacks from threads, and what goes on behind a call."""


def loops_of(test: str, is_autojump: bool = False) -> Mapping[str, Factory]:
    """Return loops by name, at least one."""
    if is_autojump or os.environ.get(VARIABLE) == "autojump":
        return {"autojump": AutojumpLoop}
    if is_both() or touches_the_loop(test):
        return LOOPS
    name = sorted(LOOPS)[zlib.crc32(test.encode()) % len(LOOPS)]
    return {name: LOOPS[name]}


def is_both() -> bool:
    return os.environ.get(VARIABLE) == "both" or os.environ.get("AIODATADIST_NIGHTLY") == "1"


def touches_the_loop(test: str) -> bool:
    return test.partition("::")[0].startswith(TOUCHES_THE_LOOP)


def name_of(item: pytest.Item) -> str:
    """Return the name of the loop that a test runs on; empty if the test is not asynchronous."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    factory = parameters.get("_asyncio_loop_factory")
    return next((name for name, each in LOOPS.items() if each is factory), "")


def is_on_one_of_them(item: pytest.Item) -> bool:
    """Return True for an asynchronous test that is not tried with the other loop in this run."""
    return bool(name_of(item)) and not is_both() and not touches_the_loop(item.nodeid)
