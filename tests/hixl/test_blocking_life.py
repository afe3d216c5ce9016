"""The life of an engine of ``import hixl``, whichever thread or signal handler ends it, and when."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aiodatadist._counting import OF_PROCESS
from aiodatadist._hixl import engine as awaitable
from aiodatadist._testing.ports import free_port
from aiodatadist._testing.views import shared_thread
from aiodatadist.blocking import hixl
from tests.hixl.pairs import options


@contextmanager
def handling(handler: Callable[[], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def on_the_loop(call: Callable[[], Any]) -> Any:
    """Call a function on the thread of the event loop, as a collection of garbage there may; return its result."""
    done, results = threading.Event(), []

    def run() -> None:
        try:
            results.append(call())
        finally:
            done.set()

    thread = shared_thread()
    assert thread is not None
    thread.post(run)
    assert done.wait(30)
    return results[0]


def check_ended(name: str) -> None:
    """Check that no engine is open: the loop's thread has ended, and the device and the name are free."""
    assert shared_thread() is None
    engine = hixl.Hixl()
    assert engine.initialize(name, options(0)) == hixl.SUCCESS
    engine.finalize()


@pytest.mark.parametrize("exits", [False, True], ids=["the handler returns", "the handler exits"])
@pytest.mark.parametrize("when", ["before it is open", "when it is open"])
def test_a_signal_handler_finalizes_the_engine_that_its_thread_initialises(
    when: str, exits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, engine, finalized = f"127.0.0.1:{free_port()}", hixl.Hixl(), threading.Event()
    initialize = awaitable.Hixl.initialize

    async def interrupted(*args: Any) -> None:
        if when == "when it is open":
            await initialize(*args)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert finalized.wait(30)  # without await, after which the call would be cancelled though it has succeeded
        if when == "before it is open":
            await initialize(*args)

    def finalize() -> None:
        engine.finalize()
        finalized.set()
        if exits:
            raise SystemExit

    with monkeypatch.context() as patch, handling(finalize):
        patch.setattr(awaitable.Hixl, "initialize", interrupted)
        if exits:
            with pytest.raises(SystemExit):
                engine.initialize(name, options(0))
        else:
            assert engine.initialize(name, options(0)) == hixl.FAILED
    assert finalized.is_set()
    assert engine.get_notifies() == (hixl.FAILED, [])
    check_ended(name)


def test_an_engine_that_one_thread_initialises_while_another_finalizes_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, engine = f"127.0.0.1:{free_port()}", hixl.Hixl()
    initialize = awaitable.Hixl.initialize
    finalizing = threading.Thread(target=engine.finalize)

    async def slow(*args: Any) -> None:
        finalizing.start()
        await initialize(*args)

    with monkeypatch.context() as patch:
        patch.setattr(awaitable.Hixl, "initialize", slow)
        assert engine.initialize(name, options(0)) in {hixl.SUCCESS, hixl.FAILED}  # whichever comes first then
    finalizing.join(30)
    assert engine.get_notifies() == (hixl.FAILED, [])
    check_ended(name)


def test_an_engine_stays_open_if_the_loops_own_thread_finalizes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread would wait for itself. The engine can be used and finalized afterwards."""
    name, engine = f"127.0.0.1:{free_port()}", hixl.Hixl()
    assert engine.initialize(name, options(0)) == hixl.SUCCESS
    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(OF_PROCESS, "add", lambda kind, logger, words, *args, **_: told.append(words % args))
        assert on_the_loop(engine.finalize) is None
    assert ["on the thread that must carry it out" in line for line in told] == [True]
    assert engine.get_notifies() == (hixl.SUCCESS, [])
    assert engine.initialize(name, options(0)) == hixl.SUCCESS  # it is
    engine.finalize()
    check_ended(name)


def test_an_engine_that_the_loops_own_thread_initialises_is_refused() -> None:
    name, other, engine = f"127.0.0.1:{free_port()}", hixl.Hixl(), hixl.Hixl()
    assert other.initialize("127.0.0.1", options(1)) == hixl.SUCCESS
    assert on_the_loop(lambda: engine.initialize(name, options(0))) == hixl.FAILED
    assert engine.initialize(name, options(0)) == hixl.SUCCESS
    engine.finalize()
    other.finalize()
    check_ended(name)
