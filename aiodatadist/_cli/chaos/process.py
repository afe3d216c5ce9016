"""A process of a run, as the command sees it: started, killed, stopped, started again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc

from aiodatadist._cli.chaos.messages import REPORT, Copying, Listening, Order, Reached, Report, SideSettings
from aiodatadist._cli.chaos.profiles import Profile
from aiodatadist._cli.kit.children import GRACE_SECONDS, Child, environment, module_command, start_child
from aiodatadist._concurrency.signal import Signal

START = 30.0
"""Seconds in which a process must be ready."""
LATER = 15.0
"""Additional seconds for a stage, after the limit at which the process itself complains."""

Take = Callable[[str, Report], None]
"""Called with the name of a process and its report."""


class DiedError(Exception):
    """A process ended by itself, or no longer reports."""


class SideProcess:
    """A process of a run.

    Args:
        take: called with each of its reports.
        logs: a folder for its stderr.
    """

    def __init__(self, settings: SideSettings, profile: Profile, take: Take, logs: Path) -> None:
        self._settings, self._profile = settings, profile
        self._environment = {**environment(), **_variables(profile)}
        self._take = take
        self._logs = logs
        self._child: Child | None = None
        self._said = Signal()
        self._listening: list[Listening] = []
        self._reached: set[str] = set()
        self._is_gone = False
        self._copies = 0
        self._belongings: dict[str, int] = {}
        self.name = settings.name

    @property
    def life(self) -> int:
        return self._settings.life

    @property
    def log(self) -> Path:
        return self._logs / f"{self.name}-{self.life}.log"

    async def start(self, group: anyio.abc.TaskGroup) -> Listening:
        """Start the process and wait until it is ready. Raises DiedError if it does not become ready."""
        self._listening.clear()
        self._is_gone = False
        self._reached.clear()
        command = module_command("chaos", "--side", self._settings.model_dump_json())
        with self.log.open("wb") as log:
            self._child = await start_child(self.name, command, env=self._environment, stderr=log)
        group.start_soon(self._read, self._child)
        with anyio.move_on_after(START):
            while not self._listening and not self._is_gone:
                await self._said.wait()
        if not self._listening:
            raise DiedError(f"the {self.name} was not ready: {self.last_words()}")
        return self._listening[0]

    async def _read(self, child: Child) -> None:
        async for report in child.reports(REPORT):
            if isinstance(report, Listening):
                self._listening.append(report)
            elif isinstance(report, Reached):
                self._reached.add(report.name)
                self._belongings = self._belongings or report.belongings
            elif isinstance(report, Copying):
                self._copies += 1
            self._take(self.name, report)
            self._said.wake()
        if child is self._child:
            self._is_gone = True
            self._said.wake()

    async def order(self, order: Order) -> None:
        """Send an order. No effect if the process has ended."""
        if self._child is not None:
            await self._child.order(order)

    @asynccontextmanager
    async def copying(self, seconds: float) -> AsyncIterator[None]:
        """Run the body, then wait until bytes of a large push arrive here, for a limited time."""
        before = self._copies
        yield
        with anyio.move_on_after(seconds):
            while self._copies == before:
                await self._said.wait()

    async def reached(self, stage: str) -> None:
        """Wait until the process reports the stage, once for each order. Raises DiedError if it does not."""
        with anyio.move_on_after(self._profile.patience + LATER):
            while stage not in self._reached and not self._is_gone:
                await self._said.wait()
        if stage not in self._reached:
            await self._make_it_tell()
            raise DiedError(f"the {self.name} did not reach stage {stage!r}: {self.last_words()}")
        self._reached.discard(stage)

    async def _make_it_tell(self) -> None:
        """Abort the process, so that faulthandler writes the stacks of its threads."""
        if self._child is not None:
            self._signal(signal.SIGABRT)
            with anyio.move_on_after(GRACE_SECONDS):
                await self._child.ended()

    @property
    def is_gone(self) -> bool:
        """True if the process ended by itself."""
        return self._is_gone

    def last_words(self) -> str:
        """Return the exit code and the end of the process's log."""
        text = self.log.read_bytes()[-3000:].decode(errors="replace").strip()
        code = None if self._child is None else self._child.process.returncode
        return f"exit code {code}; {self.log} ends with\n{text}"

    # ---- what is done to it ----

    async def kill(self) -> float:
        """Kill the process, and return the time. The next start is another life."""
        assert self._child is not None
        child, self._child = self._child, None
        at = time.monotonic()
        await child.stop()
        update = {"life": self._settings.life + 1, "belongings": self._belongings}
        self._settings = self._settings.model_copy(update=update)
        return at

    def stop(self) -> None:
        """Stop the process (SIGSTOP), if there is one."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._child is not None:
            self._child.signal(number)

    async def end(self) -> int | None:
        """End the process in good order, and return its exit code: 0 if there is none, None if it had to be killed."""
        child, self._child = self._child, None
        return 0 if child is None else await child.stop(START)


def _variables(profile: Profile) -> dict[str, str]:
    """Return environment variables that configure softnpu for the profile.

    Ports are not fixed, because others use this machine, too.
    """
    variables = {"AIODATADIST_RUNTIME": "soft", "HCCL_NPU_SOCKET_PORT_RANGE": "auto", "PYTHONFAULTHANDLER": "1"}
    variables["SOFTNPU_STRICT"] = profile.strict
    if profile.strict:
        variables["SOFTNPU_CONNECT_TIMEOUT"] = "5"
    return {name: value for name, value in variables.items() if value} | {
        name: "" for name in ("SOFTNPU_FAULTS",) if os.environ.get(name)
    }
