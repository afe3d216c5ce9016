"""Programs on machines, spoken with line by line, and the carrier of a network between machines."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests import children
from tests.machines.networks import TUN, Machine, address_lines

TUNSETIFF, IFF_TUN_NO_PI = 0x400454CA, 0x1001


class Program:
    """A program that answers each line that it is told with a line. Both are JSON.

    Args:
        machine: where it runs; None for no machine.
        module: its module, which runs as ``__main__``.
    """

    def __init__(
        self,
        machine: Machine | None,
        module: str,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        inside = ["tests.machines.inside", machine.namespace] if machine else []
        self._process = children.Popen[str](
            [sys.executable, "-m", *inside, module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
            pass_fds=pass_fds,
            text=True,
        )

    def tell(self, words: object) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Return the next line. Raises AssertionError if the program has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the program ended with {self._process.wait()}: what it said last is on stderr"
        return json.loads(line)

    def ask(self, words: object) -> Any:
        """Send a line, and return the answer."""
        self.tell(words)
        return self.hear()

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Stop it with SIGSTOP; return when it stands still."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """Continue it with SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it if it still runs, and close its pipes."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def end(self) -> int:
        """Close its input, and return its status when it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()


class Weather:
    """The carrier of a network, as the test that uses it sees it. Machines have the numbers 0, 1, 2, ..."""

    def __init__(self, program: Program, machines: int) -> None:
        self._program = program
        ends = range(machines)
        self._all = [(a, b) for a in ends for b in ends if a != b]

    def change(self, *ways: tuple[int, int], **change: Any) -> None:
        """Change attributes of :class:`carrier.Way` for these ways, or for all of them. It has happened on return."""
        assert self._program.ask({"ways": ways or self._all, "change": change}) is None

    def cut(self, *ways: tuple[int, int]) -> None:
        """Let no packet pass, and none that is under way arrive."""
        self.change(*ways, is_cut=True)

    def mend(self, *ways: tuple[int, int]) -> None:
        """Let packets pass again."""
        self.change(*ways, is_cut=False, cut_flows=(), largest=0)

    def wait_passed(self, way: tuple[int, int], at_least: int) -> int:
        """Wait until ``at_least`` packets in all have passed; return how many have."""
        return int(self._program.ask({"count": "passed", "way": way, "at_least": at_least}))

    def wait_dropped(self, way: tuple[int, int], at_least: int) -> int:
        """Wait until ``at_least`` packets in all were lost, or met a cut; return how many have."""
        return int(self._program.ask({"count": "dropped", "way": way, "at_least": at_least}))

    def flows(self) -> dict[tuple[int, int], int]:
        """Return the packets of each pair of ports so far, the lower port first, in the order of their first packets."""
        return {(low, high): count for low, high, count in self._program.ask({"flows": None})}


def _tun(name: str) -> int:
    """Make a TUN device in this thread's namespace. It lasts as long as the descriptor."""
    number = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(number, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN_NO_PI))
    except OSError:
        os.close(number)
        raise
    return number


@contextmanager
def weather(*joined: Machine, net: int = 1, mtu: int = 1500, seed: int = 1) -> Iterator[Weather]:
    """Join machines by a carrier: they are hosts 1, 2, 3, ... of the network, whose device is ``net1`` if ``net`` is 1."""
    devices: list[int] = []
    program: Program | None = None
    try:
        for host, machine in enumerate(joined, 1):
            devices.append(machine.inside(lambda: _tun(f"net{net}")))
            machine.ip(*address_lines(f"net{net}", net, host, mtu))
        program = Program(None, "tests.machines.carrier", net, seed, *devices, pass_fds=devices)
        yield Weather(program, len(joined))
    finally:
        if program is not None:
            program.close()
        for each in devices:
            os.close(each)
