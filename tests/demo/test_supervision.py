"""Two children, one fate: however the demo ends, no process is left, and one line says why."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import pty
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest

from aiodatadist._cli.demo.messages import Receiving
from aiodatadist._cli.kit import children as kit
from aiodatadist._cli.kit.children import Child, start_child
from tests import children
from tests.profiles import at_night

from .process import PATIENCE, Demo

Start = Callable[..., Demo]


@pytest.fixture
def start() -> Iterator[Start]:
    """Yield a function that starts demos with fake workers. They end with the test."""
    with ExitStack() as stack:

        def start_demo(scenario: str, *arguments: str) -> Demo:
            demo = Demo.with_fakes(scenario, *arguments)
            stack.callback(demo.close)
            return demo

        yield start_demo


@pytest.mark.parametrize(
    ("scenario", "victim"),
    [("idle", "prefill"), ("deaf", "decode"), at_night("idle", "decode"), at_night("deaf", "prefill")],
)
def test_death_of_one_worker_ends_everything_with_one_line(start: Start, scenario: str, victim: str) -> None:
    demo = start(scenario)
    demo.wait_until_started()
    os.kill(demo.pids[victim], signal.SIGKILL)
    demo.wait_until_all_ended()
    assert demo.process.returncode == 1
    assert (
        demo.errors()
        == f"aiodatadist: the {victim} process (pid {demo.pids[victim]}) was killed by SIGKILL; the demo ends\n"
    )


def test_death_of_prefill_is_blamed_and_not_the_complaint_of_decode(start: Start) -> None:
    demo = start("complain")
    demo.wait_until_started()
    os.kill(demo.pids["prefill"], signal.SIGKILL)
    demo.wait_until_all_ended()
    assert "prefill process" in demo.errors()


def test_complaint_of_a_worker_is_the_line_when_no_worker_died(start: Start) -> None:
    demo = start("complain")
    demo.wait_until_started()
    demo.wait_until_all_ended()
    assert demo.process.returncode == 1
    assert demo.errors() == f"aiodatadist: the decode process (pid {demo.pids['decode']}) failed: the link is gone\n"


def test_death_of_the_parent_ends_workers_that_listen(start: Start) -> None:
    demo = start("idle")
    demo.wait_until_started()
    demo.process.kill()
    demo.wait_until_all_ended()


def test_death_of_the_parent_ends_workers_that_do_not_listen(start: Start) -> None:
    demo = start("deaf")
    demo.wait_until_started()
    assert {demo.read_until(r"(prefill|decode): 100%")[1] for _ in range(2)} == {"prefill", "decode"}
    demo.process.kill()
    demo.wait_until_all_ended()


@pytest.mark.parametrize("scenario", ["idle", "deaf"])
def test_interrupt_ends_all_with_one_line(start: Start, scenario: str) -> None:
    demo = start(scenario)
    demo.wait_until_started()
    demo.process.send_signal(signal.SIGINT)
    demo.wait_until_all_ended()
    assert demo.process.returncode == 130
    assert re.fullmatch(r"aiodatadist: interrupted(: .*%| before anything was) done\n", demo.errors())


def test_crash_of_a_worker_shows_its_last_words(start: Start) -> None:
    demo = start("crash")
    demo.wait_until_started()
    demo.wait_until_all_ended()
    assert demo.process.returncode == 1
    first, *rest = demo.errors().splitlines()
    assert first == f"aiodatadist: the decode process (pid {demo.pids['decode']}) ended unexpectedly with exit code 1"
    assert rest[-1] == "  RuntimeError: a bug of the demo's"


def test_busy_port_is_one_line_and_exit_code_2(start: Start) -> None:
    demo = start("busy", "--port", "4712")
    demo.wait_until_all_ended()
    assert demo.process.returncode == 2
    assert demo.errors() == "aiodatadist: cannot use port 4712: address in use\n"


def test_output_without_a_terminal_is_a_few_plain_lines(start: Start) -> None:
    demo = start("good")
    out, errors = demo.process.communicate(timeout=PATIENCE)
    assert (demo.process.returncode, errors) == (0, "")
    assert "\r" not in out
    assert "\x1b" not in out, "bytes of the text must be escaped"
    lines = out.splitlines()
    assert len(lines) <= 24
    assert "  >>>A\\x1b[31m\\x80ok" in lines
    assert "share of limit  0.50" in lines
    assert lines[-1] == "tokens equal: yes"


def test_different_tokens_are_said_and_exit_code_1(start: Start) -> None:
    demo = start("different")
    out, _ = demo.process.communicate(timeout=PATIENCE)
    assert demo.process.returncode == 1
    assert out.splitlines()[-1] == "tokens equal: NO"


def test_json_is_the_only_output(start: Start) -> None:
    demo = start("good", "--json")
    out, errors = demo.process.communicate(timeout=PATIENCE)
    assert (demo.process.returncode, errors) == (0, "")
    summary = json.loads(out)
    assert summary["tokens_equal"] is True
    assert summary["bytes"] == 3 << 18


def check_reader_gone(demo: Demo) -> None:
    assert demo.process.stdout is not None
    demo.process.stdout.close()
    demo.wait_until_all_ended()
    assert demo.process.returncode == 128 + signal.SIGPIPE, "as of what the signal ends"
    assert demo.errors() == ""


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_reader_that_never_was_there_is_no_traceback(start: Start, arguments: list[str]) -> None:
    check_reader_gone(start("good", *arguments))


def test_reader_that_goes_away_while_the_workers_report_is_no_traceback(start: Start) -> None:
    demo = start("endless")
    demo.wait_until_started()
    demo.read_until(r"prefill: \d+%")
    check_reader_gone(demo)


def test_terminal_gets_a_bar_for_each_phase() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        command = [sys.executable, str(Path(__file__).with_name("drive_demo.py")), "good", "--prompt", __file__]
        with children.Popen(
            command, stdout=theirs, env={**os.environ, "COLUMNS": "100", "TERM": "xterm"}, forks=True
        ) as process:
            os.close(theirs)
            shown = b""
            while True:
                try:
                    shown += terminal.read(65536)
                except OSError:  # Linux says EIO when the other end of a terminal is closed
                    break
        assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r\n", "\n")
    for phase in ("prefill", "reference", "pull", "decode"):
        assert re.search(rf"[\r\n]{phase} +\S+ 100% \d:\d\d:\d\d", text)
    assert text.endswith("tokens equal: yes\n")


def test_an_order_to_a_child_that_is_dead_is_logged_by_no_loop() -> None:
    """asyncio's own loop of Python 3.11.2 did."""
    told: list[str] = []

    async def order_and_stop() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        process = await anyio.open_process([sys.executable, "-c", "input()"], stdout=None, stderr=None)
        child = Child("decode", process)
        child.process.kill()
        await child.order(Receiving(port=1, blocks=list(range(1 << 18))))  # more than a pipe holds
        await child.stop(1.0)

    async def main() -> None:
        await order_and_stop()
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert not told


def test_a_child_with_unread_reports_is_gone_at_once_and_leaves_no_open_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hang, if its end is waited for while asyncio reads no more of a full pipe, whose end is never seen then."""

    async def main() -> None:
        child = await start_child("decode", [sys.executable, "-c", "print('x' * (1 << 20)); input()"], stderr=None)
        pipe, is_full = child.process.stdout._stream._transport, asyncio.Event()  # type: ignore[union-attr]
        monkeypatch.setattr(pipe, "pause_reading", is_full.set)
        await is_full.wait()
        monkeypatch.undo()
        pipe.pause_reading()
        monkeypatch.setattr(kit, "REAP_SECONDS", math.inf)
        await child.stop()
        assert child.process.returncode == -signal.SIGKILL

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert not [each for each in warned if "subprocess" in str(each.message)]
