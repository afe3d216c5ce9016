"""The demo with the v1 interface: a shared prefix, pull_kv, merge_kv and predict, in two processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.profiles import at_night

from .process import PATIENCE, Demo
from .test_real_demo import Start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_demo(length: int, *arguments: str) -> Demo:
            prompt = tmp_path / f"prompt{length}.txt"
            prompt.write_text(("Call me Ishmael. Some years ago, never mind how long precisely. " * 20)[:length])
            demo = Demo.real("--v1", "--prompt", str(prompt), *arguments)
            stack.callback(demo.close)
            return demo

        yield start_demo


@pytest.mark.parametrize(("length", "nbytes"), [(17, 2 * 16 * 16384), at_night(1000, 63 * 16 * 16384)])
def test_v1_demo_ends_with_equal_bytes_and_tokens(start: Start, length: int, nbytes: int) -> None:
    """17 bytes are too few for a shared prefix of a whole block. The next test has 330."""
    out, errors = start(length, "--tokens", "8", "--json").process.communicate(timeout=PATIENCE)
    assert errors == ""
    result = json.loads(out)
    assert (result["tokens_equal"], result["kv_equal"]) == (True, True)
    assert len(result["text"]) == 8
    assert result["bytes"] == nbytes


def test_v1_demo_shows_what_it_did(start: Start) -> None:
    out, errors = start(330, "--tokens", "8").process.communicate(timeout=PATIENCE)
    assert errors == ""
    lines = out.splitlines()
    assert lines[-2:] == ["KV bytes equal: yes", "tokens equal: yes"]
    assert any(line.startswith("bytes           5.2 MiB of KV cache in one pull_kv") for line in lines)


@pytest.mark.nightly  # the parent is the one that test_real_demo.py shows
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_death_of_one_worker_ends_everything_with_one_line(start: Start, victim: str) -> None:
    demo = start(100, "--tokens", "200")
    demo.wait_until_started()
    demo.read_until("pull: 100%")
    os.kill(demo.pids[victim], signal.SIGKILL)
    demo.wait_until_all_ended()
    assert demo.process.returncode == 1
    assert demo.errors().startswith(
        f"aiodatadist: the {victim} process (pid {demo.pids[victim]}) was killed by SIGKILL"
    )


def test_v1_and_layered_are_two_demos() -> None:
    with ExitStack() as stack:
        demo = Demo.real("--v1", "--layered")
        stack.callback(demo.close)
        demo.wait_until_all_ended()
        assert demo.process.returncode == 2
        assert "--v1 and --layered are two demos" in demo.errors()
