"""Each test runs with asyncio's own loop in the loop thread, and with uvloop's; whatever it leaves running fails it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import uvloop

from aiodatadist._blocking import stats
from aiodatadist._cache.task import CacheTask
from aiodatadist._concurrency import loop_thread as thread
from tests.blocking.pairs import Pair, linked_pair


@pytest.fixture(params=["asyncio", "uvloop"], autouse=True)
def loop_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> Iterator[None]:
    """Check that no loop thread and no worker is left."""
    make = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop
    monkeypatch.setattr(thread, "new_loop", make)
    before = set(threading.enumerate())
    yield
    left = [each for each in set(threading.enumerate()) - before if each.name != "aiodatadist call"]
    for each in left:  # a worker that was told to stop may be on its way out
        each.join(5)
    assert not [each for each in left if each.is_alive()]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Link two clusters, one-sided."""
    with linked_pair() as both:
        yield both


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set when a transfer has begun."""
    event, watch = threading.Event(), stats.Counters.watch

    def watched(self: stats.Counters, task: CacheTask) -> None:
        watch(self, task)
        event.set()

    monkeypatch.setattr(stats.Counters, "watch", watched)
    return event
