"""A prefill engine that is stopped while it pushes, loses its link, and goes on: no byte lands in blocks given back."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiodatadist._adapters.block_service import BlockService
from aiodatadist._adapters.ended import Ended
from aiodatadist._adapters.kv_cache import TensorGroup
from aiodatadist._adapters.peer_links import PeerAddress
from aiodatadist._adapters.push_in import ExpectOrder
from aiodatadist._adapters.settings import Settings
from aiodatadist.testing import inside
from tests import children
from tests.profiles import at_night

ROOT = Path(__file__).resolve().parents[2]
BLOCKS, NBYTES, TENSORS = 64, 1 << 20, 2
FAST: dict[str, Any] = {"heartbeat_interval": 0.1, "link_seconds": 5}

PREFILL = """
import json, sys, time
import anyio
import numpy as np
from aiodatadist.testing import soft_hold
from aiodatadist._adapters.block_service import BlockService, Portion
from aiodatadist._adapters.settings import Settings
from tests.adapters.test_stopped_pushes import BLOCKS, FAST, group, TENSORS, NBYTES
service = BlockService(Settings(device_id=1, **FAST))
arrays = [np.full((BLOCKS, NBYTES), 0x11, np.uint8) for _ in range(TENSORS)]
print(service.open_groups([group(arrays)], [], {}).model_dump_json(), flush=True)
while request := sys.stdin.readline().strip():
    with soft_hold("HcclBatchPut", at="half") as copy:
        service.push(request, Portion(0, tuple(range(BLOCKS))))
        service.pushed(request, request)
        anyio.run(copy.arrived)
        print("half", flush=True)
        sys.stdin.readline()
    while not (ended := service.take()).sent:
        time.sleep(0.001)
    print(json.dumps(ended.outcomes), flush=True)
service.close()
"""


def group(arrays: list[Any]) -> TensorGroup:
    return TensorGroup(tuple(array.ctypes.data for array in arrays), BLOCKS, NBYTES)


@contextmanager
def prefill() -> Iterator[tuple[subprocess.Popen[str], PeerAddress]]:
    with children.Popen(
        [sys.executable, "-c", PREFILL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            yield process, PeerAddress.model_validate_json(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


class Decode:
    def __init__(self) -> None:
        self.service = BlockService(Settings(**FAST))
        self.arrays = [np.zeros((BLOCKS, NBYTES), np.uint8) for _ in range(TENSORS)]
        self.service.open_groups([group(self.arrays)], [], {})
        self.found = Ended()

    def take(self) -> Ended:
        ended = self.service.take()
        self.found.outcomes |= ended.outcomes
        return self.found

    def until_over(self, request: str) -> str:
        while request not in self.take().outcomes:
            time.sleep(0.001)
        return self.found.outcomes[request]

    def is_withheld(self) -> bool:
        registry = inside(self.service).registry
        return any(entry.is_withheld for entry in registry.table)


def begin(decode: Decode, process: subprocess.Popen[str], address: PeerAddress, request: str) -> None:
    """Have a request pushed: half of it is written."""
    assert process.stdin is not None
    assert process.stdout is not None
    for array in decode.arrays:
        array[:] = 0
    decode.service.expect(ExpectOrder(request, address, request, 0, tuple(range(BLOCKS))))
    print(request, file=process.stdin, flush=True)
    assert process.stdout.readline() == "half\n"


def test_blocks_come_back_when_the_stopped_engine_goes_on() -> None:
    decode = Decode()
    with closing(decode.service), prefill() as (process, address):
        for request in ("first", "second"):
            begin(decode, process, address, request)
            process.send_signal(signal.SIGSTOP)
            while not decode.is_withheld():
                assert request not in decode.take().outcomes, "a byte of it can still land"
            process.send_signal(signal.SIGCONT)
            assert request not in decode.take().outcomes
            print(file=process.stdin, flush=True)  # the rest is written now
            how = decode.until_over(request)
            assert how != "push_arrived"
            for array in decode.arrays:  # the blocks are the engine's again
                array[:] = 0x77
            assert process.stdout is not None
            assert request in process.stdout.readline()
            assert all((array == 0x77).all() for array in decode.arrays)


def descriptors() -> Counter[str]:
    """Count this process's descriptors, by what they refer to."""
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[re.sub(r"\d+", "N", str(entry.readlink()))] += 1
        except FileNotFoundError:  # the one that reads the folder
            continue
    return found


def lose_an_engine(decode: Decode, how: signal.Signals) -> None:
    """Lose an engine that was killed, or stopped and killed, while it wrote."""
    with prefill() as (process, address):
        request = f"{process.pid}"
        begin(decode, process, address, request)
        process.send_signal(how)
        if how is signal.SIGSTOP:
            while request not in decode.take().outcomes and not decode.is_withheld():
                time.sleep(0.001)
            process.kill()
        decode.until_over(request)


@pytest.mark.parametrize("rounds", [1, at_night(6)])
def test_engines_that_are_lost_leave_no_descriptors(rounds: int) -> None:
    """But for three of the heartbeat thread, an epoll and two eventfds, which the first link starts."""
    decode = Decode()
    with closing(decode.service):
        expected = descriptors() + Counter({"anon_inode:[eventpoll]": 1, "anon_inode:[eventfd]": 2})
        for _ in range(rounds):
            lose_an_engine(decode, signal.SIGSTOP)
            lose_an_engine(decode, signal.SIGKILL)
        until = time.monotonic() + 20
        while (after := descriptors()) != expected:
            assert time.monotonic() < until, (after - expected, expected - after)
            time.sleep(0.01)
