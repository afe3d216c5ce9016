"""The processes of another library: at rest while it is not their turn, and gone with who started them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from aiodatadist._cli.bench.against.contender import open_contenders
from aiodatadist._cli.bench.workload import Case, MemoryKind, Op

CASE = Case(op=Op.PULL, memory=MemoryKind.USER, block=4096, blocks=16, layers=1, batch=4, concurrency=1)


def states() -> dict[int, str]:
    """Return the state of each process of other libraries, by its id: one letter, as the kernel writes it."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"against/peers.py" in (folder / "cmdline").read_bytes():
                found[int(folder.name)] = (folder / "stat").read_text().rpartition(") ")[2][0]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


async def become(pids: set[int], state: str) -> None:
    """Wait until all processes are in a state. A process that is gone counts as ``Z``."""
    with anyio.fail_after(10):
        while any(states().get(pid, "Z") != state for pid in pids):  # noqa: ASYNC110 - a process does not tell its state
            await anyio.sleep(0.01)


async def test_a_contender_is_stopped_while_it_is_not_its_turn() -> None:
    others = set(states())
    async with open_contenders(["process_vm"], CASE) as [contender]:
        ours = set(states()) - others
        assert len(ours) == 2
        await become(ours, "T")
        assert (await contender.window(0.01)).latency
        await become(ours, "T")
        assert await contender.wrong() == []
    await become(ours, "Z")


BENCH = """
import asyncio
from aiodatadist._cli.bench.against.contender import open_contenders
from tests.bench.test_contenders import CASE, states
async def main():
    others = set(states())
    async with open_contenders(["process_vm"], CASE):
        print(*set(states()) - others, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_stopped_processes_end_with_a_bench_that_is_killed() -> None:
    async with await anyio.open_process([sys.executable, "-c", BENCH], cwd=Path(__file__).parents[2]) as bench:
        assert bench.stdout is not None
        line = await BufferedByteReceiveStream(bench.stdout).receive_until(b"\n", 100)
        pids = set(map(int, line.split()))
        assert len(pids) == 2
        bench.send_signal(signal.SIGKILL)
        await bench.wait()
    await become(pids, "Z")
