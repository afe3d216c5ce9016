"""What the tests measure time with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from time import monotonic, sleep

import pytest

from tests.stopwatch import Stopwatch, lasting

FROZEN = """
import os, signal, sys
from tests.stopwatch import Stopwatch
with Stopwatch() as watch:
    print("ready", flush=True)
    sys.stdin.readline()
print(watch.stood_still)
"""


def test_what_takes_longer_fails() -> None:
    with pytest.raises(AssertionError, match="not less than"), lasting(0.01):
        sleep(0.5)


def test_what_takes_less_fails() -> None:
    with pytest.raises(AssertionError, match="less than 1"), lasting(2, at_least=1):
        pass


@pytest.mark.alone
def test_busy_threads_of_ours_are_no_excuse() -> None:
    def spin() -> float:
        with Stopwatch() as watch:
            end = monotonic() + 0.2
            while monotonic() < end:
                pass
        assert watch.seconds >= 0.2
        return watch.stood_still

    assert min(spin() for _ in range(5)) < 0.1


@pytest.mark.alone
def test_calls_of_ours_that_keep_the_interpreter_are_no_excuse() -> None:
    def fill() -> float:
        with Stopwatch() as watch:
            bytes(bytearray(1 << 28))
        return watch.stood_still / watch.seconds

    assert min(fill() for _ in range(5)) < 0.5


def test_a_process_that_was_stopped_stood_still() -> None:
    child = subprocess.Popen([sys.executable, "-c", FROZEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdin
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        sleep(0.2)
        os.kill(child.pid, signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.close()
        assert 0.15 < float(child.stdout.readline()) < 5


def test_what_goes_on_after_it_was_stopped_does_not_count() -> None:
    with lasting(0.05) as watch:
        watch.stop()
        sleep(0.1)
