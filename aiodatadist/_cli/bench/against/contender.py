"""Another library, as the initiator sees it: a process that moves blocks for a while when told to, and reports the result.

The process and its owner are stopped (SIGSTOP) whenever it is not their turn: some libraries have threads that never sleep.
"""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from aiodatadist._cli.bench.against.environments import python_of
from aiodatadist._cli.bench.figures import Window
from aiodatadist._cli.bench.workload import Case
from aiodatadist._cli.kit.children import Child, open_child
from aiodatadist._cli.kit.errors import CommandError

SCRIPT = Path(__file__).with_name("peers.py")
ANSWER_SECONDS = 120.0


class Contender:
    """A library that is measured beside this one.

    Attributes:
        name: its name in ``--against``.
        what: its own description of itself.
    """

    def __init__(self, child: Child) -> None:
        self.name = child.name
        self.what = ""
        self._child = child

    async def prepare(self, case: Case) -> None:
        """Pass the workload to the library. Raises CommandError if the library does not work here."""
        self.what = (await self._ask(workload(case)))["ready"]

    async def window(self, seconds: float) -> Window:
        """Transfer for a number of seconds, and return the measurements. Raises CommandError if a transfer failed."""
        answer = await self._ask({"seconds": seconds}, seconds)
        return Window(answer["seconds"], answer["cpu_seconds"], latency=answer["latency"])

    async def wrong(self) -> list[str]:
        """Return which blocks have wrong contents after a transfer into cleared memory."""
        count = (await self._ask({"check": True}))["wrong"]
        return [f"{self.what}: {count} blocks"] if count else []

    async def _ask(self, message: dict[str, Any], seconds: float = 0.0) -> dict[str, Any]:
        self._child.signal(signal.SIGCONT)
        try:
            return await self._answer(message, seconds)
        finally:
            self._child.signal(signal.SIGSTOP)

    async def _answer(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            with anyio.fail_after(seconds + ANSWER_SECONDS):
                await self._child.feed(json.dumps(message).encode() + b"\n")
                line = await self._child.line()
        except TimeoutError:
            raise CommandError(f"--against {self.name}: no answer within {seconds + ANSWER_SECONDS:.0f} s") from None
        if line is None:
            raise CommandError(f"--against {self.name}: its process ended; its output is above")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise CommandError(f"--against {self.name}: {answer['failed']}")
        return answer


def workload(case: Case) -> dict[str, Any]:
    """Return the blocks of a case, tensor after tensor in one buffer, as the library's process reads them."""
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
    """Open the libraries, each ready for a case, until the end of the ``with`` block.

    Raises:
        CommandError: if one cannot be installed, or does not work here.
    """
    async with AsyncExitStack() as stack:
        contenders = []
        for name in names:
            command = [await python_of(name), str(SCRIPT), name]
            child = await stack.enter_async_context(open_child(name, command, stderr=None, grace=0.0))
            contenders.append(Contender(child))
            await contenders[-1].prepare(case)
        yield contenders
