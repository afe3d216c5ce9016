"""The kit's child processes: fed, read, signalled with all that they started, and never waited for without a limit."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
from pydantic import TypeAdapter

from aiodatadist._cli.kit import children
from aiodatadist._cli.kit.children import Child, open_child
from aiodatadist._cli.kit.pipes import Message


class Word(Message):
    """An order and a report."""

    word: str


WORD = TypeAdapter(Word)


def shell(text: str) -> Sequence[str]:
    return ["sh", "-c", text]


async def test_orders_go_in_and_reports_come_out_until_the_child_closes_its_stdout() -> None:
    async with open_child("echo", shell("cat")) as child:
        for word in ("one", "two"):
            await child.order(Word(word=word))
        await child.close_orders()
        assert [report.word async for report in child.reports(WORD)] == ["one", "two"]
        assert await child.line() is None
        assert (await child.ended()).code == 0


async def test_the_end_says_how_it_came_about_and_what_was_said_last() -> None:
    async with open_child("talker", shell("echo first >&2; echo last >&2; exit 3")) as child:
        await child.keep_last_words()
        assert await child.ended() == (3, "first\nlast\n")


@pytest.mark.parametrize(("text", "code"), [("exec cat", 0), ("exec sleep 1000", None)], ids=["ends", "is killed"])
async def test_stop_returns_the_exit_code_of_a_child_that_ends_by_itself(text: str, code: int | None) -> None:
    child = await children.start_child("child", shell(text))
    assert await child.stop(grace=30.0 if code == 0 else 0.01) == code
    assert child.process.returncode == (0 if code == 0 else -signal.SIGKILL)


async def test_what_a_child_has_started_ends_with_it() -> None:
    async with open_child("parent", shell("sleep 1000 & echo $!; wait"), grace=0.0) as child:
        grandchild = os.pidfd_open(int(await child.line() or b""))
    try:
        assert select.select([grandchild], [], [], 30)[0], "the grandchild outlived the child"
    finally:
        os.close(grandchild)


async def test_a_child_that_cannot_be_killed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stuck in a driver does not end when it is killed."""
    monkeypatch.setattr(children, "REAP_SECONDS", 0.01)
    child = await children.start_child("stuck", shell("exec sleep 1000"))
    with monkeypatch.context() as patch:
        patch.setattr(Child, "signal", lambda self, number: None)
        assert await child.stop() is None
    assert child.process.returncode is None
    child.signal(signal.SIGKILL)
    assert await child.process.wait() == -signal.SIGKILL


async def test_an_order_to_a_child_that_has_ended_is_no_error() -> None:
    async with open_child("gone", [sys.executable, "-c", ""], stderr=subprocess.DEVNULL) as child:
        await child.process.wait()
        await child.order(Word(word="x" * (1 << 20)))
        await child.close_orders()
        await child.order(Word(word="y"))
        child.signal(signal.SIGKILL)
