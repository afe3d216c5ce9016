"""Plain TCP, with which transfers are compared: it moves every block to its place."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.raw_tcp import serve_one as serve
from benchmarks.raw_tcp import transfer
from tests.machines.networks import address, cable, machines
from tests.machines.sockets import dial, listen

SIZE = 4 << 20


@contextmanager
def served(connections: int) -> Iterator[tuple[list[socket.socket], memoryview]]:
    """Yield connections from one machine to another, and the memory of that one."""
    memory = memoryview(bytearray(random.Random(3).randbytes(SIZE)))
    with machines("a", "b") as (a, b), ExitStack() as stack:
        cable(a, b)
        listener = stack.enter_context(listen(b, address(1, 2)))
        socks, threads = [], []
        for _ in range(connections):
            socks.append(dial(a, address(1, 2)))
            theirs, _ = listener.accept()
            stack.enter_context(theirs)
            threads.append(threading.Thread(target=serve, args=(theirs, memory)))
            threads[-1].start()
        try:
            yield socks, memory
        finally:
            for sock in socks:
                sock.close()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize("block", [4096, 65536, 1 << 20])
@pytest.mark.parametrize("connections", [1, 4])
def test_blocks_are_pulled_and_pushed(connections: int, block: int) -> None:
    with served(connections) as (socks, theirs):
        ours = memoryview(bytearray(SIZE))
        done = transfer(socks, ours, block, pulls=True)
        assert ours == theirs
        assert done.seconds > 0
        assert done.processor > 0
        ours[:] = random.Random(4).randbytes(SIZE)
        transfer(socks, ours, block, pulls=False)
        assert ours == theirs
