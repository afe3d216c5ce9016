"""An event loop in a thread: calls of other threads wait for it, and are settled whatever happens."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import anyio
import pytest

from aiodatadist._concurrency import loop_thread
from aiodatadist._concurrency.loop_thread import LoopThread, Unusable
from tests import children
from tests.profiles import examples


class Refused(Exception):
    """Has the reason."""


@contextmanager
def running(last_calls: float = 0) -> Iterator[tuple[LoopThread, list[str]]]:
    warned: list[str] = []
    thread = LoopThread("its loop", Refused, lambda: warned.append("warned"), last_calls)
    try:
        yield thread, warned
    finally:
        thread.join()
        thread.join()
    assert "its loop" not in {each.name for each in threading.enumerate()}


async def fail() -> None:
    raise ZeroDivisionError("there")


def why(caught: pytest.ExceptionInfo[Refused]) -> Unusable:
    return caught.value.args[0]  # type: ignore[no-any-return]


def test_calls_return_and_raise_and_posts_are_run_in_order() -> None:
    with running() as (thread, warned):
        assert thread.call(lambda: asyncio.sleep(0, "there")) == "there"
        with pytest.raises(ZeroDivisionError, match="there"):
            thread.call(fail)
        order: list[int] = []
        for i in range(20):
            thread.post(partial(order.append, i))
        thread.call(lambda: asyncio.sleep(0))
        assert order == list(range(20))
        assert not warned


def test_its_own_thread_and_what_comes_too_late_are_refused() -> None:
    with running() as (thread, _):

        async def itself() -> Unusable:
            with pytest.raises(Refused) as caught:
                thread.call(fail)
            return why(caught)

        assert thread.call(itself) is Unusable.OWN_THREAD
    for late in (partial(thread.call, fail), partial(thread.post, thread.join)):
        with pytest.raises(Refused) as caught:
            late()
        assert why(caught) is Unusable.OVER


def test_its_own_thread_cannot_wait_for_its_end() -> None:
    async def join(thread: LoopThread) -> None:
        thread.join()

    with running() as (thread, _), pytest.raises(Refused) as caught:
        thread.call(lambda: join(thread))
    assert why(caught) is Unusable.OWN_THREAD


def test_a_forked_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as (thread, _), monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: thread.pid + 1)
        for call in (thread.check_process, thread.join, lambda: thread.post(thread.join), lambda: thread.call(fail)):
            with pytest.raises(Refused) as caught:
                call()
            assert why(caught) is Unusable.FORKED


async def test_a_thread_that_runs_a_loop_is_warned() -> None:
    with running() as (thread, warned):
        thread.call(lambda: asyncio.sleep(0))
        assert warned == ["warned"]


def test_the_end_lets_calls_finish_for_a_while() -> None:
    begun = threading.Event()

    with ThreadPoolExecutor(1) as threads, running(60) as (thread, _):

        async def wait() -> str:
            begun.set()
            await thread._stopping.wait()
            await asyncio.sleep(0)
            return "finished"

        call = threads.submit(thread.call, wait)
        begun.wait()
        thread.join()
        assert call.result() == "finished"


def test_the_end_cancels_what_is_left() -> None:
    begun = threading.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as threads, running(0) as (thread, _):
        call = threads.submit(thread.call, wait)
        begun.wait()
        thread.join()
        with pytest.raises(Refused) as caught:
            call.result()
        assert why(caught) is Unusable.STOPPED


def test_an_interrupt_cancels_the_call_and_is_raised_when_it_has_ended() -> None:
    steps: list[str] = []

    async def wait() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            with anyio.CancelScope(shield=True):
                await asyncio.sleep(0)
            steps.append("ended")

    with running() as (thread, _):
        with pytest.raises(KeyboardInterrupt):
            thread.call(wait)
        assert steps == ["ended"]


def test_a_loop_that_cannot_be_made_is_said_by_the_maker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_loop() -> asyncio.AbstractEventLoop:
        raise OSError("too many open files")

    monkeypatch.setattr(loop_thread, "new_loop", no_loop)
    with pytest.raises(OSError, match="too many open files"):
        LoopThread("its loop", Refused, lambda: None, 0)
    assert not caplog.records


INTERRUPTED = """
import asyncio, random, signal, time
from aiodatadist._concurrency.loop_thread import LoopThread

class Refused(Exception): pass

def interrupt(*_):
    if is_armed:
        raise KeyboardInterrupt

async def call():
    await asyncio.sleep(0.0005)

is_armed, moments = False, random.Random(2)
thread = LoopThread("interrupted", lambda why: Refused(why), lambda: None, 0)
signal.signal(signal.SIGALRM, interrupt)
until = time.monotonic() + SECONDS
while time.monotonic() < until:
    try:
        try:
            is_armed = True
            signal.setitimer(signal.ITIMER_REAL, moments.random() * 0.0012 + 1e-5, 0.00005)
            thread.call(call)
        finally:
            is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
thread.call(call)
thread.join()
"""


def test_interrupts_that_come_in_showers_leave_a_thread_that_works() -> None:
    seconds = examples(2)
    script = INTERRUPTED.replace("SECONDS", str(seconds))
    done = children.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=seconds + 60, check=False
    )
    assert done.returncode == 0, done.stderr
