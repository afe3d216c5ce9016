"""A run of one profile: its processes, their faults, and the checks of everything."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.abc

from aiodatadist._cli.chaos.messages import (
    Fault,
    Healed,
    PushLarge,
    Reached,
    Report,
    SideSettings,
    Stage,
    Told,
    Violated,
)
from aiodatadist._cli.chaos.process import DiedError, SideProcess
from aiodatadist._cli.chaos.profiles import Profile
from aiodatadist._cli.chaos.program import Step, program
from aiodatadist._cli.chaos.tally import Tally

CALM = 1.0
"""Seconds at the beginning in which there is no fault."""
ROUND = 5.0
"""Seconds of faults between two checks of everything."""
LARGE = 3.0
"""Seconds in which a large push must begin; one to a peer without a link never does."""
MAX_VIOLATIONS = 200
"""The most violations that are kept; further ones are only counted."""


@dataclass(frozen=True)
class Length:
    """The length of a run, and its faults.

    Attributes:
        seconds: seconds with faults.
        faults: the faults that occur; others of the program are left out.
    """

    seed: int
    seconds: float
    faults: Sequence[str]


@dataclass
class Result:
    """The result of one profile.

    Attributes:
        violations: (rule, description) of the first ones; ``broken`` is the number of all.
        looks: number of times that everything was at rest and checked.
        resident: bytes of memory that each process used at each check.
        is_interrupted: True if Ctrl-C came before the end: what happens from then on is no violation.
    """

    profile: str
    seed: int
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[str, str]] = field(default_factory=list)
    broken: int = 0
    looks: int = 0
    resident: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    is_interrupted: bool = False

    def violated(self, rule: str, what: str) -> None:
        if self.is_interrupted:
            return
        self.broken += 1
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append((rule, what))


class Run(ABC):
    """The processes of a profile, and how long they run.

    Attributes:
        looked: called with the seconds with faults so far, each time that everything was looked at.

    Args:
        url: URL of the pool, for processes with a context cache.
    """

    def __init__(self, profile: Profile, length: Length, logs: Path, url: str = "") -> None:
        seed = length.seed
        self._length = length
        self.profile = profile
        self.looked: Callable[[float], None] = lambda _: None
        self.result = Result(profile.name, seed)
        self._programs = {lane: program(seed, profile, lane) for lane in profile.lanes}
        group = f"chaos {os.getpid()}"
        self.clusters: list[int] = [*range(1, 1 + profile.clusters)]
        settings = (
            SideSettings(name=name, profile=profile, seed=seed, clusters=self.clusters, url=url, group=group)
            for name in profile.sides
        )
        self.sides = {each.name: SideProcess(each, profile, self._take, logs) for each in settings}

    async def run(self) -> Result:
        """Run to the end, and return the result, violations included."""
        began = time.monotonic()
        async with anyio.create_task_group() as group, AsyncExitStack() as stack:
            try:
                await self.open(stack)
                await self._rounds(group)
            except DiedError as died:
                self.result.violated("I3", str(died))
            except anyio.get_cancelled_exc_class():
                self.result.seconds = time.monotonic() - began
                self.result.is_interrupted = True
                raise
            finally:
                await self._end()
            group.cancel_scope.cancel()
        self.judge()
        self.result.seconds = time.monotonic() - began
        return self.result

    async def _rounds(self, group: anyio.abc.TaskGroup) -> None:
        for name in self.sides:
            await self.start(name, group)
        await self._resume()
        await anyio.sleep(CALM)
        await self._look_at_everything(is_first=True)
        self.looked(0.0)
        end = time.monotonic() + self._length.seconds
        while (left := end - time.monotonic()) > 0:
            await self._resume()
            with anyio.move_on_after(left if self.profile.is_calm else min(ROUND, left)):  # of calm ones, links last
                await self._faults(group)
            await self._revive(group)
            await self._look_at_everything()
            self.looked(self._length.seconds - max(0.0, end - time.monotonic()))

    async def _end(self) -> None:
        for side in reversed(self.sides.values()):
            code = await side.end()
            if code:
                self.result.violated("I3", f"the {side.name} did not end well: {side.last_words()}")

    # ---- what each kind of run has ----

    @abstractmethod
    async def open(self, stack: AsyncExitStack) -> None:
        """Open what is between the processes."""

    @abstractmethod
    async def start(self, name: str, group: anyio.abc.TaskGroup) -> None:
        """Start a process, wait until it is ready, and tell the others. Raises DiedError if it does not become ready."""

    @abstractmethod
    def heal(self) -> None:
        """Restore what is between the processes."""

    @abstractmethod
    async def suffer(self, step: Step) -> None:
        """Cause a fault that does not belong to a process."""

    @abstractmethod
    def concerned(self, step: Step) -> list[int]:
        """Return the clusters from which a successful transfer is expected after a fault; 0 is the pool."""

    @abstractmethod
    def killed(self, name: str, life: int, at: float) -> None:
        """Note that a process was killed."""

    @abstractmethod
    def judge(self) -> None:
        """Check at the end what only all reports together show."""

    @property
    @abstractmethod
    def listener(self) -> Sequence[SideProcess]:
        """The processes that report successful transfers after faults."""

    # ---- processes ----

    async def _resume(self) -> None:
        for side in self.sides.values():
            await self._stage(side, "resume")

    async def _stage(self, side: SideProcess, name: str, is_first: bool = False) -> None:
        await side.order(Stage(name=name, is_first=is_first))  # type: ignore[arg-type]
        await side.reached(name)

    async def _look_at_everything(self, is_first: bool = False) -> None:
        """Let operations end, then links, and then have all processes check what is left."""
        for name in ("drain", "part", "audit"):
            for side in reversed(self.sides.values()):
                await self._stage(side, name, is_first)
        self.result.looks += 1

    async def _revive(self, group: anyio.abc.TaskGroup) -> None:
        """Undo the effects of faults: let all processes run, and restore what is between them."""
        self.heal()
        for side in self.sides.values():
            side.go_on()
            if side.is_gone:
                self.result.violated("I3", f"the {side.name} ended by itself: {side.last_words()}")
                await self._kill(side.name, group)

    def _take(self, name: str, report: Report) -> None:
        if isinstance(report, Told):
            self.result.tally.add(report)
        elif isinstance(report, Violated):
            self.result.violated(report.rule, f"{name}: {report.what}")
        elif isinstance(report, Reached) and report.name == "audit":
            self.result.resident[name].append(report.resident)

    async def _kill(self, name: str, group: anyio.abc.TaskGroup) -> None:
        side = self.sides[name]
        life, at = side.life, await side.kill()
        self.killed(name, life, at)
        await self.start(name, group)
        await self._stage(side, "resume")

    # ---- faults ----

    async def _faults(self, group: anyio.abc.TaskGroup) -> None:
        """Cause faults until cancelled."""
        async with anyio.create_task_group() as lanes:
            lanes.start_soon(anyio.sleep_forever)  # a calm profile has no lane
            for steps in self._programs.values():
                lanes.start_soon(self._lane, steps, group)

    async def _lane(self, steps: Iterator[Step], group: anyio.abc.TaskGroup) -> None:
        for step in steps:
            await anyio.sleep(step.pause)
            if step.name not in self._length.faults:
                continue
            name = step.name if step.side == "" else f"{step.name} {step.side}"
            self.result.faults[name] += 1
            try:
                await self._suffer(step, group)
            finally:
                with anyio.CancelScope(shield=True):  # bounded: a line to a pipe that is read
                    healed = Healed(fault=name, clusters=self.concerned(step), at=time.monotonic())
                    for side in self.listener:
                        await side.order(healed)

    async def _suffer(self, step: Step, group: anyio.abc.TaskGroup) -> None:
        side = self.sides.get(step.side)
        if side is None:
            await self.suffer(step)
        elif step.name == "kill":
            with anyio.CancelScope(shield=True):  # bounded: a process has START to be ready
                await self._kill(step.side, group)
        elif step.name == "stop-copy":
            async with self.sides["owner"].copying(LARGE):
                await side.order(PushLarge())
            with _stopped(side):
                await anyio.sleep(step.seconds)
        elif step.name == "stop":
            with _stopped(side):
                await anyio.sleep(step.seconds)
        else:
            name = "softnpu" if step.name in {"delay", "fail", "exec", "hang", "flip"} else step.name
            await side.order(Fault(name=name, seconds=step.seconds, spec=step.spec))
            await anyio.sleep(step.seconds)


@contextmanager
def _stopped(side: SideProcess) -> Iterator[None]:
    side.stop()
    try:
        yield
    finally:
        side.go_on()
