"""A run of processes with context caches, and of the engine that they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread

from aiodatadist._cli.chaos.process import SideProcess
from aiodatadist._cli.chaos.profiles import Profile
from aiodatadist._cli.chaos.program import Step
from aiodatadist._cli.chaos.run import Length, Run
from aiodatadist._testing.servers import MooncakeLender, MooncakeMaster, RedisServer, Server, running

MEMORY = 64 << 20
"""The engine's memory in bytes: too little for all values."""


class PooledRun(Run):
    """Two processes, and an engine between them that is killed and stopped as well."""

    def __init__(self, profile: Profile, length: Length, logs: Path, url: str, victims: Sequence[Server]) -> None:
        super().__init__(profile, length, logs, url)
        self._victims = victims
        self._number = 0

    async def open(self, stack: AsyncExitStack) -> None:
        """Do nothing: the engine runs already."""

    async def start(self, name: str, group: anyio.abc.TaskGroup) -> None:
        await self.sides[name].start(group)

    def heal(self) -> None:
        """Faults of the engine undo themselves."""

    async def suffer(self, step: Step) -> None:
        victim = self._victims[self._number % len(self._victims)]
        self._number += 1
        fault, end = (victim.kill, victim.start) if step.name == "engine-kill" else (victim.stop, victim.go_on)
        with anyio.CancelScope(shield=True):  # bounded: a signal; there is an end to it only where it happened
            await anyio.to_thread.run_sync(fault)
        try:
            await anyio.sleep(step.seconds)
        finally:
            with anyio.CancelScope(shield=True):  # bounded: a server has its time to be ready
                await anyio.to_thread.run_sync(end)

    def concerned(self, step: Step) -> list[int]:
        return [0]

    def killed(self, name: str, life: int, at: float) -> None:
        """Expect nothing: values that the process saved may still be there or not."""

    @property
    def listener(self) -> Sequence[SideProcess]:
        return list(self.sides.values())

    def judge(self) -> None:
        """Do nothing: every value identifies itself."""


@contextmanager
def engine(name: str) -> Iterator[tuple[str, list[Server]]]:
    """Run an engine; yield its URL, and the URLs of those of its servers that may be killed."""
    if name == "redis":
        server = RedisServer(MEMORY)
        with running(server):
            yield server.url, [server]
    elif name == "mooncake":
        master = MooncakeMaster()
        with running(master):
            lender = MooncakeLender(master, MEMORY)
            with running(lender):
                yield master.url, [lender]
    else:
        yield "memory:", []
