"""The real thing: two workers, a cache that moves between them, and what happens when one of them dies."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.profiles import at_night

from .process import PATIENCE, Demo

Start = Callable[..., Demo]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts demos over a text of 330 bytes, 21 blocks. They end with the test."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(("All happy families are alike; each unhappy family is unhappy in its own way. " * 20)[:330])
    with ExitStack() as stack:

        def start_demo(*arguments: str) -> Demo:
            demo = Demo.real("--prompt", str(prompt), *arguments)
            stack.callback(demo.close)
            return demo

        yield start_demo


def test_demo_ends_with_equal_tokens(start: Start) -> None:
    demo = start("--tokens", "8")
    out, errors = demo.process.communicate(timeout=PATIENCE)
    assert (demo.process.returncode, errors) == (0, "")
    lines = out.splitlines()
    assert lines[-2:] == ["KV bytes equal: yes", "tokens equal: yes"]
    assert any(line.startswith("bytes           5.2 MiB") for line in lines)
    assert len(lines) <= 27  # three of them for the path of the prompt
    assert [line for line in lines if len(line) > 80 and "prompt.txt" not in line] == []


def test_same_seed_writes_the_same_text_and_another_seed_another(start: Start, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("All happy families are alike.")
    texts = []
    for seed in ("1", "1", "2"):
        out, _ = start("--tokens", "8", "--json", "--seed", seed, "--prompt", str(short)).process.communicate(
            timeout=PATIENCE
        )
        texts.append(json.loads(out)["text"])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        ("prefill: 50%", "prefill"),
        ("prefill: 50%", "decode"),
        at_night("pull: 100%", "decode"),
        at_night("pull: 100%", "prefill"),
    ],
)
def test_death_of_one_worker_ends_everything_with_one_line(start: Start, moment: str, victim: str) -> None:
    demo = start("--tokens", "200")
    demo.wait_until_started()
    demo.read_until(moment)
    os.kill(demo.pids[victim], signal.SIGKILL)
    demo.wait_until_all_ended()
    assert demo.process.returncode == 1
    assert (
        demo.errors()
        == f"aiodatadist: the {victim} process (pid {demo.pids[victim]}) was killed by SIGKILL; the demo ends\n"
    )


@pytest.mark.parametrize("moment", ["prefill: 50%", at_night("pull: 100%")])
def test_death_of_the_parent_ends_both_workers(start: Start, moment: str) -> None:
    demo = start("--tokens", "200")
    demo.wait_until_started()
    demo.read_until(moment)
    demo.process.kill()
    demo.wait_until_all_ended()


def test_interrupt_ends_all_and_says_what_was_done(start: Start) -> None:
    demo = start("--tokens", "200")
    demo.wait_until_started()
    demo.read_until("prefill: 50%")
    demo.process.send_signal(signal.SIGINT)
    demo.wait_until_all_ended()
    assert demo.process.returncode == 130
    assert re.fullmatch(r"aiodatadist: interrupted: .*prefill \d+%.* done\n", demo.errors())


def test_busy_port_is_one_line_with_the_port_and_exit_code_2(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        demo = start("--port", str(port))
        demo.wait_until_all_ended()
    assert demo.process.returncode == 2
    errors = demo.errors()
    assert errors.count("\n") == 1
    assert str(port) in errors
    assert "--port" in errors
