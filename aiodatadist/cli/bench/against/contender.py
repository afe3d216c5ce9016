"""Another library, as the initiator sees it: a process that is told to move blocks for a while, and says how it went.

It is stopped (SIGSTOP), with its owner, whenever it is not its turn: some libraries have threads that never sleep.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from aiodatadist.cli.bench.against.environments import python_of
from aiodatadist.cli.bench.figures import Window
from aiodatadist.cli.bench.workload import Case
from aiodatadist.cli.kit.errors import CommandError

SCRIPT = Path(__file__).with_name("peers.py")
ANSWER_SECONDS = 120.0
LINE_BYTES = 1 << 28
"""A window of ten seconds has a million small transfers, whose latencies are one line."""


class Contender:
    """One library.

    Attributes:
        name: as ``--against`` has it.
        what: what it is, in its own words.
    """

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.what = ""
        self._process = process
        assert process.stdout is not None
        self._lines = BufferedByteReceiveStream(process.stdout)

    async def prepare(self, case: Case) -> None:
        """Raises CommandError: it does not work here."""
        self.what = (await self._ask(workload(case)))["ready"]

    async def window(self, seconds: float) -> Window:
        """Transfers for so long. Raises CommandError: one failed."""
        answer = await self._ask({"seconds": seconds}, seconds)
        return Window(answer["seconds"], answer["cpu_seconds"], latency=answer["latency"])

    async def wrong(self) -> list[str]:
        """What does not hold what it should, after a transfer into cleared memory."""
        count = (await self._ask({"check": True}))["wrong"]
        return [f"{self.what}: {count} blocks"] if count else []

    async def aclose(self) -> None:
        self._signal(signal.SIGKILL)
        await self._process.aclose()

    async def _ask(self, message: dict[str, Any], seconds: float = 0.0) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        try:
            return await self._answer(message, seconds)
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        """To both of its processes, which are a group."""
        with suppress(ProcessLookupError):  # they ended
            os.killpg(self._process.pid, number)

    async def _answer(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            with anyio.fail_after(seconds + ANSWER_SECONDS):
                await self._process.stdin.send(json.dumps(message).encode() + b"\n")
                answer: dict[str, Any] = json.loads(await self._lines.receive_until(b"\n", LINE_BYTES))
        except TimeoutError:
            raise CommandError(f"--against {self.name}: no answer within {seconds + ANSWER_SECONDS:.0f} s") from None
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
            raise CommandError(f"--against {self.name}: its process ended; its words are above") from None
        if "failed" in answer:
            raise CommandError(f"--against {self.name}: {answer['failed']}")
        return answer


def workload(case: Case) -> dict[str, Any]:
    """The blocks of a case, tensor after tensor, in one buffer."""
    (moves,) = case.moves
    tensor = case.blocks * case.block
    starts = [i * tensor for i in range(case.tensors)]
    sources, targets = ([start + block * case.block for start in starts for block in side] for side in moves)
    return {
        "op": case.op.value,
        "nbytes": case.tensors * tensor,
        "block": case.block,
        "sources": sources,
        "targets": targets,
    }


@asynccontextmanager
async def open_contenders(names: Sequence[str], case: Case) -> AsyncIterator[list[Contender]]:
    """All of them, ready for a case; they end with the block.

    Raises:
        CommandError: one cannot be installed, or does not work here.
    """
    contenders: list[Contender] = []
    try:
        for name in names:
            command = [await python_of(name), str(SCRIPT), name]
            contenders.append(Contender(name, await anyio.open_process(command, stderr=None, start_new_session=True)))
            await contenders[-1].prepare(case)
        yield contenders
    finally:
        with anyio.CancelScope(shield=True):  # bounded: a killed process ends
            for contender in contenders:
                await contender.aclose()
