"""``aiodatadist demo | head``: a reader that leaves ends the command quietly, and its workers with it; ``demo >&-`` runs."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

SIGPIPE = 141
"""The exit code that a shell gives to what a closed pipe has ended."""


def those_with(mark: str) -> list[int]:
    """Return the processes started with this in their environment. Workers have their own sessions and process groups."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile, or is another user's
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["doctor"],
        ["demo"],
        ["demo", "--context-cache"],
        pytest.param(["demo", "--layered"], marks=pytest.mark.nightly),
        pytest.param(["demo", "--v1"], marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def test_a_reader_that_leaves_is_no_error(words: list[str], tmp_path: Path) -> None:
    if "demo" in words:
        (tmp_path / "prompt").write_text("a prompt of more than one block of tokens")
        words = [*words, "--prompt", str(tmp_path / "prompt")]
    command = [sys.executable, "-m", "aiodatadist", *words]
    mark = str(uuid4())
    environment = {**os.environ, "AIODATADIST_TEST_MARK": mark}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        assert process.pid in those_with(mark)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in {0, SIGPIPE}
    assert those_with(mark) == [], "the command ends after its workers"


@pytest.mark.parametrize(
    "words", [["doctor"], ["demo", "--tokens", "1"], ["demo", "--tokens", "1", "--context-cache"]], ids=" ".join
)
def test_a_closed_output_is_no_error(words: list[str], tmp_path: Path) -> None:
    if "demo" in words:
        (tmp_path / "prompt").write_text("a prompt of more than one block of tokens")
        words = [*words, "--prompt", str(tmp_path / "prompt")]
    ended = without("1", words)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", "", 0)


def test_a_complaint_does_not_go_to_the_output() -> None:
    ended = without("2", ["demo", "--tokens", "x"])
    assert (ended.stdout, ended.returncode) == ("", 2)


def without(stream: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command with this file descriptor closed."""
    command = ["sh", "-c", f'exec "$@" {stream}>&-', "sh", sys.executable, "-W", "error", "-m", "aiodatadist", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)
