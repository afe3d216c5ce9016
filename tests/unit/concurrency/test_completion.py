"""A completion ends once; a cancelled wait lasts until that end, or until what was asked to stop did not answer."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from aiodatadist._concurrency.completion import Completion, TransferState


class Work(Completion):
    """Ends when it is told to."""

    def __init__(self, quiesce_seconds: float = 60, *, answers: bool = False) -> None:
        super().__init__()
        self.seconds = quiesce_seconds
        self.answers = answers
        self.steps: list[str] = []

    @property
    def quiesce_seconds(self) -> float:
        return self.seconds

    def end_as(self, state: TransferState) -> None:
        self._end(state)

    def _cancel(self) -> bool:
        self.steps.append("cancel")
        if self.answers:
            self._end(TransferState.CANCELLED)
        return True

    def _unanswered(self) -> None:
        self.steps.append("unanswered")

    def _let_go(self) -> None:
        self.steps.append("let go")

    def _what(self) -> str:
        return "work"


async def test_the_end_calls_back_before_tasks_go_on_and_late_callbacks_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    work, order = Work(), []

    def fail(_: Work) -> None:
        raise ZeroDivisionError("of the callback's own")

    async def wait() -> None:
        await work.join()
        order.append("waited")

    task = asyncio.create_task(wait())
    await anyio.wait_all_tasks_blocked()
    work.add_done_callback(fail)
    work.add_done_callback(lambda done: order.append(done.state.value))
    work.end_as(TransferState.DONE)
    await task
    work.add_done_callback(lambda _: order.append("late"))
    assert order == ["done", "waited", "late"]
    assert (work.steps, work.is_done, work.is_cancelled) == (["let go"], True, False)
    assert "work: a done callback failed" in caplog.text
    assert not work.cancel()
    await work.join()
    assert repr(work) == "<work done>"


async def test_a_cancelled_wait_lasts_until_the_end() -> None:
    work = Work()
    waiting = asyncio.create_task(work.join())
    await anyio.wait_all_tasks_blocked()
    for _ in range(2):
        waiting.cancel()
        await anyio.wait_all_tasks_blocked()
    assert not waiting.done()
    work.end_as(TransferState.CANCELLED)
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert work.steps == ["cancel", "let go"]


async def test_one_that_ends_in_the_cancellation_is_not_waited_for() -> None:
    work = Work(answers=True)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await work.join()
    assert scope.cancelled_caught
    assert (work.steps, work.is_cancelled) == (["cancel", "let go"], True)


async def test_one_that_does_not_answer_is_given_up_at_its_limit() -> None:
    work = Work(quiesce_seconds=0)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await work.join()
    assert scope.cancelled_caught
    assert (work.steps, work.is_done) == (["cancel", "unanswered"], False)


async def test_a_callback_that_asks_a_cancelled_one_for_its_result_concerns_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    work = Work()

    def ask(_: Work) -> None:
        raise asyncio.CancelledError

    work.add_done_callback(ask)
    waiting = asyncio.create_task(work.join())
    await anyio.wait_all_tasks_blocked()
    work.end_as(TransferState.CANCELLED)
    await waiting
    assert "work: a done callback failed" in caplog.text


async def test_tasks_that_stopped_waiting_leave_nothing() -> None:
    work = Work()
    for _ in range(3):
        with anyio.move_on_after(0):
            await work._settled()
    assert work._waiters == []
