"""A demo in a process of its own, and the means to see that nothing of it is left."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests import children

PATIENCE = 50.0
"""Seconds after which a test gives up; says nothing about the demo."""


class Demo:
    """A demo process, and a pidfd of each of its workers once they are known."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = children.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, forks=True)
        self.pids: dict[str, int] = {}
        self._pidfds: list[int] = []

    @classmethod
    def with_fakes(cls, scenario: str, *arguments: str) -> Demo:
        """Start the real parent with workers from ``fake_worker.py``."""
        drive = Path(__file__).with_name("drive_demo.py")
        return cls([sys.executable, str(drive), scenario, "--prompt", __file__, *arguments])

    @classmethod
    def real(cls, *arguments: str) -> Demo:
        """Start the command as it is."""
        return cls([sys.executable, "-m", "aiodatadist", "demo", *arguments])

    def read_until(self, pattern: str) -> re.Match[str]:
        """Read stdout up to a line that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.fullmatch(pattern, line.rstrip("\n"))
            if found:
                return found
        raise AssertionError(f"the demo ended before it said {pattern!r}: {self.errors()}")

    def wait_until_started(self) -> None:
        """Read up to the line that names the workers."""
        found = self.read_until(r"processes: prefill (\d+), decode (\d+)")
        self.pids = {"prefill": int(found[1]), "decode": int(found[2])}
        self._pidfds = [os.pidfd_open(pid) for pid in self.pids.values()]

    def wait_until_all_ended(self) -> None:
        """Wait until the demo and both workers are gone."""
        self.process.wait(timeout=PATIENCE)
        for pidfd in self._pidfds:
            assert select.select([pidfd], [], [], PATIENCE)[0], "a worker outlived the demo"

    def running(self) -> list[str]:
        """Return the workers that have not ended."""
        pairs = zip(self.pids, self._pidfds, strict=True)
        return [name for name, pidfd in pairs if not select.select([pidfd], [], [], 0)[0]]

    def output(self) -> str:
        """Return the rest of stdout."""
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        for pidfd in self._pidfds:
            os.close(pidfd)
