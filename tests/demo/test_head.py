"""``aiodatadist demo | head``: a reader that leaves ends the command quietly, and its workers with it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.context_caching.servers import eventually

SIGPIPE = 141
"""The exit code that a shell gives to what a closed pipe has ended."""


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


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
def test_a_reader_that_leaves_is_no_error(words: list[str]) -> None:
    command = [sys.executable, "-m", "aiodatadist", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in {0, SIGPIPE}
    eventually(lambda: is_gone(process.pid), "all processes of the command have ended")
