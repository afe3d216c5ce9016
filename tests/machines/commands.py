"""Commands of users on machines: ``aiodatadist`` and ``python``, as they are typed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests import children
from tests.machines.networks import Machine

KEYS = f"first {'5a' * 32}\n"
PATIENCE = 300.0
"""Seconds after which a test gives up; says nothing about the command."""


def trusting(folder: Path, keys: str = KEYS) -> Path:
    """Make a folder of keys, as on each of two machines."""
    folder.mkdir(mode=0o700)
    (folder / "keys").touch(0o600)
    (folder / "keys").write_text(keys, encoding="ascii")
    return folder


class Running:
    """A command that runs on a machine."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        """Return the next line that it prints; empty at its end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def until(self, words: str) -> str:
        """Return the first line with these words."""
        while words not in (line := self.line()):
            assert self.process.poll() is None or line, f"it ended before it said {words!r}: {self.rest()}"
        return line

    def rest(self) -> tuple[int, str, str]:
        """Wait for its end, and return its exit code, and the rest of what it prints and of its errors."""
        out, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, errors


@contextmanager
def running(machine: Machine, words: Sequence[str], trust: Path | None = None, **more: str) -> Iterator[Running]:
    """Run a command on a machine until the end of the block. ``aiodatadist`` and ``python`` are this Python's.

    Args:
        trust: its folder of keys.
        more: more variables of its environment.
    """
    given: Mapping[str, str] = {**({} if trust is None else {"AIODATADIST_TRUST": str(trust)}), **more}
    start = {"aiodatadist": [sys.executable, "-m", "aiodatadist"], "python": [sys.executable]}
    command = [*start[words[0]], *words[1:]]
    inside = ["ip", "netns", "exec", machine.namespace, "env", *(f"{name}={value}" for name, value in given.items())]
    process = children.Popen[str](
        [*inside, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        yield Running(process)
    finally:
        process.kill()
        process.communicate()
