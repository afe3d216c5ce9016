"""Threads that the system starts, and that find no memory for their first step."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from aiodatadist import LLMException
from aiodatadist._concurrency.blocking_calls import KeptThread, in_thread
from aiodatadist._concurrency.threads import DaemonThread


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodatadist._concurrency.threads.BEGIN_TIMEOUT", 0.05)


def test_one_that_never_begins_is_told_of_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "_bootstrap", lambda _: None)
    thread = DaemonThread(pytest.fail, "it")
    with pytest.raises(RuntimeError, match=r"a new thread did not begin within 0\.05 s: out of memory"):
        thread.start()
    assert thread not in threading.enumerate()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_that_begins_too_late_calls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    late, over = threading.Event(), threading.Event()

    def bootstrap(thread: Any) -> None:
        late.wait()
        try:
            thread._started.set()
            thread.run()
        finally:
            over.set()

    monkeypatch.setattr(threading.Thread, "_bootstrap", bootstrap)
    called: list[int] = []
    thread = DaemonThread(called.append, "it", (1,))
    with pytest.raises(RuntimeError, match="did not begin"):
        thread.start()
    late.set()
    assert over.wait(10)
    assert called == []


def test_one_that_begins_too_late_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    late, over = threading.Event(), threading.Event()
    bootstrap = threading.Thread._bootstrap  # type: ignore[attr-defined]

    def begin_late(thread: Any) -> None:
        late.wait()
        try:
            bootstrap(thread)
        finally:
            over.set()

    monkeypatch.setattr(threading.Thread, "_bootstrap", begin_late)
    thread = DaemonThread(pytest.fail, "it")
    with pytest.raises(RuntimeError, match="did not begin"):
        thread.start()
    assert thread not in threading.enumerate()
    late.set()
    assert over.wait(10)
    while thread in threading.enumerate() or thread.is_alive():
        threading.Event().wait(0.01)
    assert "Traceback" not in capfd.readouterr().err


def test_one_that_begins_calls_its_target_once() -> None:
    called: list[int] = []
    thread = DaemonThread(called.append, "it", (1,))
    thread.start()
    thread.join(10)
    assert (called, thread.daemon, thread.name) == ([1], True, "it")


async def test_a_call_whose_thread_does_not_begin_was_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "_bootstrap", lambda _: None)
    with pytest.raises(LLMException, match="no thread can be started: a new thread did not begin"):
        await in_thread(pytest.fail)


async def test_a_kept_thread_that_does_not_begin_fails_its_call_and_the_next_call_starts_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = KeptThread("it")
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "_bootstrap", lambda _: None)
        with pytest.raises(LLMException, match="no thread can be started: a new thread did not begin"):
            await kept.start(pytest.fail)
    first, second = [await kept.start(threading.current_thread) for _ in range(2)]
    assert first is second
    await kept.aclose()
    assert not first.is_alive()


async def test_a_kept_thread_goes_on_after_a_call_that_raised() -> None:
    kept = KeptThread("it")
    with pytest.raises(ZeroDivisionError):
        await kept.start(lambda: 1 / 0)
    assert await kept.start(lambda: 7) == 7
    await kept.aclose()
    await kept.aclose()
