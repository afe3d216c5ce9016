"""A resident holds an object's task group in a task of its own, and refuses callers on other loops and in other processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial

import anyio
import pytest

from aiodatadist._concurrency import forks
from aiodatadist._concurrency.resident import Misuse, Resident


class Refused(Exception):
    """Has the misuse, and the reason."""


def resident(patience: float = 30) -> Resident:
    return Resident("its task", Refused, what="it", unfinished="it was never stopped", patience=patience)


class Life:
    """Code that a resident runs: opening and closing wait until they may go on."""

    def __init__(self, home: Resident, *, may_open: bool = True, may_close: bool = True) -> None:
        self.home = home
        self.may_open, self.may_close = anyio.Event(), anyio.Event()
        self.opening, self.closing, self.over = anyio.Event(), anyio.Event(), anyio.Event()
        self.steps: list[str] = []
        for event, is_set in ((self.may_open, may_open), (self.may_close, may_close)):
            if is_set:
                event.set()

    async def live(self, started: asyncio.Future[None]) -> None:
        self.steps.append("opening")
        try:
            self.opening.set()
            await self.may_open.wait()
            async with anyio.create_task_group() as self.group:
                started.set_result(None)
                await self.home.stopping.wait()
                self.group.cancel_scope.cancel()
            self.closing.set()
            await self.may_close.wait()
        finally:
            self.steps.append("closed")
            self.over.set()


async def test_it_lives_from_start_to_stop_and_is_stopped_once() -> None:
    home = resident()
    life = Life(home)
    assert home.is_alive
    assert not await home.stop()  # it has not started
    await home.start(life.live)
    assert home.is_alive
    assert not home.is_over
    home.check()
    assert await home.stop()
    assert life.steps == ["opening", "closed"]
    assert not await home.stop()
    assert (home.is_alive, home.is_over, home.has_ended, home.error) == (False, True, True, None)
    home.result()
    with pytest.raises(Refused) as caught:
        home.check()
    assert caught.value.args == (Misuse.STOPPED, None)


async def test_a_failed_opening_is_raised_by_start() -> None:
    home = resident()

    async def fail(_: asyncio.Future[None]) -> None:
        raise ZeroDivisionError("while opening")

    with pytest.raises(ZeroDivisionError, match="while opening"):
        await home.start(fail)
    assert not home.is_alive


async def test_a_cancelled_start_closes_what_was_opened_first() -> None:
    home = resident()
    life = Life(home, may_open=False)
    starting = asyncio.create_task(home.start(life.live))
    await life.opening.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert life.steps == ["opening", "closed"]
    assert not home.is_alive


@pytest.mark.parametrize("is_patient", [True, False])
async def test_a_cancelled_stop_outlasts_the_end_but_not_for_ever(is_patient: bool) -> None:
    home = resident(60 if is_patient else 0)
    life = Life(home, may_close=False)
    await home.start(life.live)
    stopping = asyncio.create_task(home.stop())
    await life.closing.wait()
    stopping.cancel()
    if is_patient:
        await anyio.wait_all_tasks_blocked()
        assert not stopping.done()
    else:
        await asyncio.wait([stopping], timeout=10)
        assert stopping.done()
    life.may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not await home.stop()
    assert life.steps == ["opening", "closed"]


async def test_an_end_that_fails_after_the_caller_was_cancelled_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    home = resident()
    closing, may_close = anyio.Event(), anyio.Event()

    async def live(started: asyncio.Future[None]) -> None:
        started.set_result(None)
        await home.stopping.wait()
        closing.set()
        await may_close.wait()
        raise ZeroDivisionError("while closing")

    await home.start(live)
    stopping = asyncio.create_task(home.stop())
    await closing.wait()
    stopping.cancel()
    await anyio.wait_all_tasks_blocked()
    may_close.set()
    await asyncio.wait([stopping])
    assert stopping.cancelled()
    assert [record.getMessage() for record in caplog.records] == ["it failed to end"]
    with pytest.raises(ZeroDivisionError):
        home.result()


async def test_a_task_that_must_not_fail_ends_everything_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    home = resident()
    life = Life(home)
    await home.start(life.live)

    async def fail() -> None:
        raise ZeroDivisionError("in here")

    life.group.start_soon(home.keep, fail)
    life.group.start_soon(home.keep, fail)
    await life.over.wait()
    with pytest.raises(Refused) as caught:
        home.check()
    assert caught.value.args == (Misuse.FAILED, "ZeroDivisionError('in here')")
    assert [record.getMessage() for record in caplog.records] == ["it has ended: ZeroDivisionError('in here')"]
    assert await home.stop()
    assert isinstance(home.error, ExceptionGroup)


def test_there_has_to_be_a_loop() -> None:
    with pytest.raises(Refused) as caught:
        resident()
    assert caught.value.args[0] is Misuse.NO_LOOP


def started() -> Resident:
    """Return a resident whose loop is closed by now, which ended its task."""

    async def start() -> Resident:
        home = resident()
        await home.start(Life(home).live)
        return home

    return asyncio.run(start())


def test_one_that_its_loop_ends_says_that_it_was_forgotten() -> None:
    with pytest.warns(ResourceWarning, match="it was never stopped"):
        home = started()
    with pytest.raises(Refused) as caught:
        home.check()
    assert caught.value.args[0] is Misuse.LOOP_CLOSED
    assert not home.is_reachable
    assert asyncio.run(home.stop())
    assert not asyncio.run(home.stop())


def refused(check: Callable[[], object]) -> Misuse | None:
    try:
        check()
    except Refused as error:
        return error.args[0]  # type: ignore[no-any-return]
    return None


async def test_callers_of_other_loops_and_of_none_are_refused() -> None:
    home = resident()
    await home.start(Life(home).live)

    async def on_a_loop(check: Callable[[], object]) -> Misuse | None:
        return refused(check)

    def elsewhere(check: Callable[[], object]) -> Misuse | None:
        return asyncio.run(on_a_loop(check))

    for check in (home.check, home.check_here, home.check_loop):
        assert refused(check) is None
        assert await anyio.to_thread.run_sync(refused, check) is Misuse.NO_LOOP
        assert await anyio.to_thread.run_sync(elsewhere, check) is Misuse.OTHER_LOOP
    assert await anyio.to_thread.run_sync(refused, home.check_no_other_loop) is None
    assert await anyio.to_thread.run_sync(elsewhere, home.check_no_other_loop) is Misuse.OTHER_LOOP
    with pytest.raises(Refused):
        await anyio.to_thread.run_sync(partial(asyncio.run, home.stop()))
    assert home.is_alive
    await home.stop()


async def test_a_forked_child_is_refused_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    home = resident()
    await home.start(Life(home).live)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: home.pid + 1)
        patched.setattr(forks, "generation", forks.generation + 1)
        for check in (home.check, home.check_here, home.check_process):
            assert refused(check) is Misuse.FORKED
        assert not await home.stop()
    home.check()
    await home.stop()
