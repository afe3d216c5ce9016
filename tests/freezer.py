"""Runs a command while single processes of it stand still at random: ``python -m tests.freezer [--seed N] -- COMMAND``.

Five times a second one process of the run is frozen for 0.1 to 0.9 s: the command's own, or any that descends from it. A test
that fails for it measures the machine, or has found a defect: every process may be stopped for so long at any time.

The kernel's cgroups freeze without a signal, so that a process that a test has stopped stays as the test wants it. Where no
cgroup can be made, SIGSTOP does it, and only to processes that no test stops: those that run pytest.
"""

from __future__ import annotations

import argparse
import heapq
import math
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

EVERY = 0.2
"""Seconds between two processes that are frozen."""
FROZEN = 0.1, 0.9
"""Seconds for which one stands still."""
PROC = Path("/proc")


class Method(Protocol):
    """A way of freezing a process."""

    def may(self, process: int) -> bool: ...

    def freeze(self, process: int) -> None: ...

    def thaw(self, process: int) -> None: ...

    def close(self) -> None: ...


class ByCgroup:
    """In a cgroup of its own, which is frozen. Raises OSError if none can be made."""

    def __init__(self) -> None:
        mounts = [line.split() for line in (PROC / "mounts").read_text().splitlines()]
        roots = [Path(where) for _, where, kind, *_ in mounts if kind == "cgroup2"]
        if not roots:
            raise OSError("no cgroup2 is mounted")
        own = next(line[3:] for line in (PROC / "self" / "cgroup").read_text().splitlines() if line.startswith("0::"))
        self._home = roots[0] / own.lstrip("/")
        probe = self.folder(os.getpid())
        probe.mkdir()
        probe.rmdir()

    def folder(self, process: int) -> Path:
        return self._home / f"aiodatadist-freezer-{os.getpid()}-{process}"

    def may(self, _: int) -> bool:
        return True

    def freeze(self, process: int) -> None:
        folder = self.folder(process)
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.procs").write_text(str(process))
        (folder / "cgroup.freeze").write_text("1")

    def thaw(self, process: int) -> None:
        folder = self.folder(process)
        (folder / "cgroup.freeze").write_text("0")
        for member in (folder / "cgroup.procs").read_text().split():  # also children that it had before it stood still
            with suppress(OSError):
                (self._home / "cgroup.procs").write_text(member)

    def close(self) -> None:
        """Remove the cgroups. One that still has a process, which has ended and is not reaped, stays."""
        for folder in self._home.glob(f"aiodatadist-freezer-{os.getpid()}-*"):
            with suppress(OSError):
                folder.rmdir()


class BySignal:
    """SIGSTOP, and SIGCONT."""

    def may(self, process: int) -> bool:
        return b"pytest" in (PROC / str(process) / "cmdline").read_bytes()

    def freeze(self, process: int) -> None:
        os.kill(process, signal.SIGSTOP)

    def thaw(self, process: int) -> None:
        os.kill(process, signal.SIGCONT)

    def close(self) -> None:
        """Do nothing: nothing is left."""


def method() -> Method:
    """Return the best one that is allowed here."""
    try:
        return ByCgroup()
    except OSError:
        return BySignal()


@dataclass
class Freezer:
    """Freezes processes below one, and thaws them when their time has come."""

    root: int
    chance: random.Random
    method: Method
    frozen: list[tuple[float, int]] = field(default_factory=list)
    count: int = 0

    def freeze_one(self, now: float) -> None:
        """Choose a process, and freeze it unless it stands still already."""
        there = sorted(descendants(self.root))
        process, seconds = self.chance.choice(there), self.chance.uniform(*FROZEN)
        if any(process == each for _, each in self.frozen):
            return
        with suppress(OSError):  # it has ended
            if self.method.may(process):
                self.method.freeze(process)
                heapq.heappush(self.frozen, (now + seconds, process))
                self.count += 1

    def thaw(self, now: float) -> None:
        """Let those go on whose time has come."""
        while self.frozen and self.frozen[0][0] <= now:
            _, process = heapq.heappop(self.frozen)
            with suppress(OSError):
                self.method.thaw(process)


def descendants(root: int) -> Iterator[int]:
    """Yield a process and all below it."""
    parents: dict[int, int] = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {root}
    yield root
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
        yield from more


def run(command: list[str], seed: int) -> int:
    """Run a command to its end, and return its exit code."""
    process = subprocess.Popen(command)
    freezer = Freezer(process.pid, random.Random(seed), method())
    following = time.monotonic()
    try:
        while process.poll() is None:
            now = time.monotonic()
            freezer.thaw(now)
            if now >= following:
                freezer.freeze_one(now)
                following = now + EVERY
            time.sleep(0.01)
    finally:
        freezer.thaw(math.inf)
        process.terminate()
        process.wait()
        freezer.method.close()
    how = type(freezer.method).__name__.removeprefix("By").lower()
    print(f"seed {seed}: processes were frozen {freezer.count} times by {how}", flush=True)
    return process.returncode


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.freezer", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seed", type=int, default=None, metavar="N", help="of the choices; when they meet is up to time"
    )
    parser.add_argument("command", nargs="+", help="behind --")
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # frozen processes would stay so
    sys.exit(run(arguments.command, seed))


if __name__ == "__main__":
    main()
