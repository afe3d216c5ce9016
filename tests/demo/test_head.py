"""``aiodatadist demo | head``: a reader that leaves ends the command quietly, and its workers with it; ``demo >&-`` runs."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests import children

from .process import Demo

SIGPIPE = 141
"""The exit code that a shell gives to what a closed pipe has ended."""
WITHOUT = """
import os, runpy, sys

os.close({number})
sys.{name} = sys.__{name}__ = None
runpy.run_module("aiodatadist", run_name="__main__", alter_sys=True)
"""
"""Runs the command as an interpreter does that was started with a file descriptor closed."""


@pytest.mark.parametrize(
    "words",
    [
        [],
        pytest.param(["--layered"], marks=pytest.mark.nightly),
        pytest.param(["--v1"], marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def test_a_demo_whose_reader_leaves_ends_its_workers_first(words: list[str], prompt: str) -> None:
    with closing(Demo.real("--prompt", prompt, *words)) as demo:
        demo.wait_until_started()
        assert demo.process.stdout is not None
        demo.process.stdout.close()
        assert demo.errors() == ""
        assert demo.process.wait() in {0, SIGPIPE}
        assert demo.running() == [], "the command ends after its workers"


@pytest.mark.parametrize("words", [["doctor"], ["demo", "--context-cache"]], ids=" ".join)
def test_a_reader_that_leaves_is_no_error(words: list[str], prompt: str) -> None:
    command = [sys.executable, "-m", "aiodatadist", *words, *(["--prompt", prompt] if "demo" in words else [])]
    with children.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode in {0, SIGPIPE}


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    (tmp_path / "prompt").write_text("a prompt of more than one block of tokens")
    return str(tmp_path / "prompt")


def test_a_closed_output_is_no_error() -> None:
    command = [sys.executable, "-W", "error", "-m", "aiodatadist", "doctor"]
    ended = subprocess.run(["sh", "-c", 'exec "$@" 1>&-', "sh", *command], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", "", 0)


@pytest.mark.parametrize("more", [[], ["--context-cache"]], ids=" ".join)
def test_a_demo_with_a_closed_output_is_no_error(more: list[str], prompt: str) -> None:
    ended = without(1, "stdout", "demo", "--tokens", "1", "--prompt", prompt, *more)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", "", 0)


def test_a_complaint_does_not_go_to_the_output() -> None:
    ended = without(2, "stderr", "demo", "--tokens", "x")
    assert (ended.stdout, ended.returncode) == ("", 2)


def without(number: int, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command with this file descriptor closed."""
    command = [sys.executable, "-W", "error", "-c", WITHOUT.format(number=number, name=name), *words]
    return children.run(command, capture_output=True, text=True, forks=True)
