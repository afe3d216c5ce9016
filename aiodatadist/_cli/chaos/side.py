"""The common part of both processes: orders and reports, watched operations, and pauses for checks."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict
from typing import ClassVar, Protocol

import anyio
import anyio.abc

from aiodatadist import CacheTask, LLMException, LLMStatusCode, OutOfMemory, PoolUsage
from aiodatadist._cache.table import Entry
from aiodatadist._cli.chaos.doors import Door
from aiodatadist._cli.chaos.faults import OwnFaults, beside_others
from aiodatadist._cli.chaos.lookout import Belongings, Lookout, resident, thread_names
from aiodatadist._cli.chaos.messages import (
    ORDER,
    Fault,
    Healed,
    Listening,
    Peer,
    Peers,
    PushLarge,
    Reached,
    Report,
    SideSettings,
    Stage,
    Violated,
)
from aiodatadist._cli.chaos.tally import GOOD, Tally
from aiodatadist._cli.kit.pipes import read_orders
from aiodatadist._concurrency.signal import Signal
from aiodatadist._counting import Figures
from aiodatadist._testing.ledger import RECLAIMED
from aiodatadist.errors import (
    CacheNotFound,
    DeviceError,
    InternalError,
    LinkError,
    NotLinked,
    StuckError,
    TransferError,
)
from aiodatadist.testing import BlockLedger, MisplacedError

TELL = 0.1
"""Seconds between two reports."""
LATE_TURN, LATE_TURNS = 0.05, 40
"""Seconds of a turn, and turns after a deadline in which a transfer must end: longer than until a peer is lost."""
STOP_TURNS = 100
"""Further turns if the peer writes: it has 5 s to report that it stopped, or the link ends."""
IDLE = 15.0
"""The average seconds between two operations of a task in an idle process."""
LINGER = 0.05
"""Seconds after the end of all links, in which no byte may land."""

FORGIVEN = (TransferError, LinkError, NotLinked, CacheNotFound, OutOfMemory, DeviceError)
"""The errors that a fault may cause. Any other is a violation, and so is a StuckError, although it is a DeviceError."""


def _is_busy(error: Exception) -> bool:
    """Return True for v1's status that another call uses the link, which happens without a fault."""
    return isinstance(error, LLMException) and error.status_code is LLMStatusCode.LLM_LINK_BUSY


class Rounds:
    """The point between two operations at which tasks pause while everything is checked."""

    def __init__(self) -> None:
        self._is_open = False
        self._changed = Signal()
        self._tasks = self._waiting = 0

    async def begin(self) -> None:
        """Wait, before each operation of a task, until the round is open."""
        self._waiting += 1
        self._changed.wake()
        try:
            while not self._is_open:
                await self._changed.wait()
        finally:
            self._waiting -= 1

    def enter(self) -> None:
        """Count one more task."""
        self._tasks += 1

    def leave(self) -> None:
        self._tasks -= 1
        self._changed.wake()

    def open(self) -> None:
        self._is_open = True
        self._changed.wake()

    async def rest(self, seconds: float) -> None:
        """Wait for ``seconds``, or until the round is closed."""
        with anyio.move_on_after(seconds):
            while self._is_open:
                await self._changed.wait()

    async def close(self) -> None:
        """Close the round, and wait until all tasks have stopped."""
        self._is_open = False
        self._changed.wake()
        while self._waiting < self._tasks:
            await self._changed.wait()


class Side(ABC):
    """A process of a run."""

    def __init__(self, settings: SideSettings) -> None:
        self.settings = settings
        self.profile = settings.profile
        self.tally = Tally()
        self.rounds = Rounds()
        self.lookout = Lookout(self.violated)
        self.ledgers: dict[str, BlockLedger] = {}
        self.doors: list[Door] = []
        self.is_large_wanted = False
        self.faults = OwnFaults(self.doors)
        self._first = Belongings(**settings.belongings) if settings.belongings else None
        self._awaited: dict[int, list[tuple[str, float]]] = {}
        self._line = threading.Lock()

    # ---- for the command ----

    def say(self, report: Report) -> None:
        """Send a report, from any thread. This does not block, because the command always reads."""
        line = report.line()
        with self._line:
            while line:
                line = line[os.write(1, line) :]

    def violated(self, rule: str, what: str) -> None:
        self.say(Violated(rule=rule, what=what))

    async def run(self) -> None:
        """Run until the command orders the end, or closes stdin."""
        self.lookout.begin()
        async with anyio.create_task_group() as group:
            async with self.opened() as peers:
                self.say(Listening(peers=peers))
                async with anyio.create_task_group() as working:
                    working.start_soon(self._tell)
                    if self.profile.load == "busy":
                        working.start_soon(beside_others)
                    self.start(working)
                    await self._obey(working)
                    working.cancel_scope.cancel()
            self.lookout.end()
            group.cancel_scope.cancel()

    async def _tell(self) -> None:
        while True:
            await anyio.sleep(TELL)
            self._tell_now()

    def _tell_now(self) -> None:
        for ledger in self.ledgers.values():
            self.tally.checked += ledger.checked
            ledger.checked = 0
        self.say(self.tally.take())

    async def _obey(self, group: anyio.abc.TaskGroup) -> None:
        async for order in read_orders(ORDER):
            if isinstance(order, Stage) and order.name == "end":
                return
            if isinstance(order, Fault):
                group.start_soon(self.faults.suffer, order)
            elif isinstance(order, Healed):
                for cluster in order.clusters:
                    self._awaited.setdefault(cluster, []).append((order.fault, order.at))
            elif isinstance(order, Peers):
                await self.meet(order.peers)
            elif isinstance(order, PushLarge):
                self.is_large_wanted = True
            else:
                group.start_soon(self.reach, order)

    async def reach(self, stage: Stage) -> None:
        with self.lookout.over(f"stage {stage.name} of the {self.settings.name}", self.profile.patience):
            try:
                await self._STAGES[stage.name](self, stage)
            except Exception:
                self.violated("I7", f"stage {stage.name}: {traceback.format_exc()}")
        self._tell_now()
        first = {} if self._first is None else asdict(self._first)
        self.say(Reached(name=stage.name, belongings=first, resident=resident()))

    # ---- what each has ----

    @abstractmethod
    def opened(self) -> AbstractAsyncContextManager[dict[int, Peer]]:
        """Open the side's clusters and caches, for as long as it lives."""

    @abstractmethod
    def start(self, group: anyio.abc.TaskGroup) -> None:
        """Start the side's tasks, each with :meth:`work`."""

    @abstractmethod
    async def meet(self, peers: dict[int, Peer]) -> None:
        """Link to the owner, which has started, or started again."""

    @abstractmethod
    async def resumed(self) -> None:
        """Prepare for operations, which resume after this."""

    @abstractmethod
    async def drained(self) -> None:
        """Wait, after the end of operations and before the end of links, for whatever else must end."""

    @abstractmethod
    async def part(self) -> None:
        """Wait until there are no links."""

    # ---- operations ----

    def chance(self, *names: object) -> random.Random:
        """Return a random generator, the same for the same names: of a task, or of its k-th operation."""
        return random.Random("/".join(map(str, (self.settings.seed, self.profile.name, self.settings.name, *names))))

    async def work(self, name: str, operation: Callable[[random.Random], Awaitable[None]], pause: float = 0.01) -> None:
        """Do one operation after the other until cancelled. The k-th one has its own random numbers."""
        if self.profile.load == "idle":
            pause = IDLE
        self.rounds.enter()
        try:
            number = 0
            while True:
                await self.rounds.begin()
                chance = self.chance(name, self.settings.life, number)
                with self.lookout.over(f"operation {number} of task {name}", self.profile.patience):
                    await self._guarded(f"operation {number} of task {name}", operation, chance)
                number += 1
                await self.rounds.rest(chance.uniform(0, 2 * pause))
        finally:
            self.rounds.leave()

    async def _guarded(
        self, name: str, operation: Callable[[random.Random], Awaitable[None]], chance: random.Random
    ) -> None:
        try:
            await operation(chance)
        except MisplacedError as error:
            self.violated("I6", f"{name}: {error}")
        except Exception:  # whatever it is, no operation may raise it
            self.violated("I7", f"{name}: {traceback.format_exc()}")

    def ended(self, operation: str, error: Exception | None, may_fail: bool = False) -> str:
        """Count the end of an operation, and return its status. ``may_fail`` is True if a fault may have made it fail."""
        if error is None:
            status = GOOD
        elif isinstance(error, LLMException):
            status = error.status_code.name
        else:
            status = type(error).__name__
        is_forgiven = may_fail and type(error) is not InternalError and isinstance(error, LLMException)
        is_forgiven = is_forgiven or (error is not None and _is_busy(error))
        if isinstance(error, StuckError) or (error is not None and self.profile.is_calm and not is_forgiven):
            self.violated("I3", f"{operation}: {error!r}")
        elif error is not None and not is_forgiven and not isinstance(error, FORGIVEN):
            self.violated("I7", f"{operation}: {error!r}")
        self.tally.ended(operation, status)
        return status

    async def outcome(
        self,
        operation: str,
        begin: Callable[[], CacheTask],
        chance: random.Random,
        may_fail: bool = False,
        deadline: float | None = None,
    ) -> str:
        """Run a transfer to its end, cancelled now and then at a random moment, and return its status.

        ``deadline`` is the number of seconds that it was given.
        """
        try:
            task = begin()
        except LLMException as error:
            return self.ended(operation, error, may_fail)
        ends: list[CacheTask] = []
        task.add_done_callback(ends.append)

        async def wait() -> None:
            with suppress(LLMException):
                await task

        async with anyio.create_task_group() as group:
            if deadline is not None:
                group.start_soon(self._watch_deadline, operation, task, deadline)
            await to_its_end(task, wait, chance)
            group.cancel_scope.cancel()
        if not task.done() or len(ends) != 1:
            self.violated("I3", f"{operation}: after its end it is {task!r}, and {len(ends)} ends were told")
        if task.cancel():
            self.violated("I8", f"{operation}: it can be cancelled after its end")
        if task.cancelled():
            self.tally.ended(operation, "CANCELLED")
            return "CANCELLED"
        status = self.ended(operation, task.exception(), may_fail)
        if status == GOOD:
            self.tally.moved += task.result().bytes
        return status

    async def _watch_deadline(self, operation: str, task: CacheTask, deadline: float) -> None:
        """Report a transfer that ends too long after its deadline.

        Late counts in turns of the event loop, which may have been blocked, or stopped with its process. On strict
        softnpu a transfer that was stopped half-way ends when its channel is closed: only the profile's patience limits
        that.
        """
        await anyio.sleep(deadline)
        if self.profile.strict:
            return
        for _ in range(LATE_TURNS + (0 if self.profile.one_sided else STOP_TURNS)):
            if task.done():
                return
            await anyio.sleep(LATE_TURN)
        self.violated("I3", f"{operation}: its deadline of {deadline} s has passed, and it is {task!r}")

    def good(self, cluster: int, began: float, generation: int) -> None:
        """Note that a transfer that began at this time succeeded, with the right bytes."""
        if generation == RECLAIMED:
            self.violated("I6", f"a transfer from cluster {cluster} succeeded with bytes of memory that was given back")
        self.tally.saw(cluster, generation, began)
        now = time.monotonic()
        waiting = self._awaited.get(cluster, [])
        for fault, at in [each for each in waiting if each[1] <= began]:
            self.tally.recoveries.append((fault, now - at))
            waiting.remove((fault, at))

    # ---- looking at everything ----

    async def _drain(self, _: Stage) -> None:
        await self.faults.end_all()
        await self.rounds.close()
        await self.drained()
        self.look()

    async def _part(self, _: Stage) -> None:
        for door in self.doors:
            await door.settled()
        await self.part()
        for ledger in self.ledgers.values():
            ledger.settle_open()

    async def _audit(self, stage: Stage) -> None:
        await anyio.sleep(LINGER)
        self.look()
        for figures in self.figures():
            self._look_at_figures(figures)
        for entry in self.entries():
            if entry.leases or entry.is_poisoned:
                self.violated("I5", f"at rest cache {entry.cache_id} has {entry.leases} leases: {entry}")
        pools = [usage for figures in self.figures() for usage in figures.pools.values()]
        found = Belongings.now(sum(usage.total - usage.free for usage in pools))
        if stage.is_first or self._first is None:
            self._first = found
            return
        more = found.more_than(self._first)
        for words in more:
            self.violated("I5", f"{words}; threads are {', '.join(thread_names())}" if "threads" in words else words)
        if more:
            self.lookout.show()

    async def _resume(self, _: Stage) -> None:
        for cluster, waiting in self._awaited.items():
            for fault, at in waiting:
                if time.monotonic() - at > self.profile.patience:
                    self.violated("I3", f"no good transfer from cluster {cluster} since {fault}")
            waiting[:] = [each for each in waiting if time.monotonic() - each[1] <= self.profile.patience]
        await self.resumed()
        self.rounds.open()

    _STAGES: ClassVar = {"drain": _drain, "part": _part, "audit": _audit, "resume": _resume}

    def open(self, ledger: BlockLedger, blocks: Sequence[int], tensors: range | None = None) -> None:
        """Allow transfers to write there from now on. Until now nothing may have been written into the released memory."""
        for words in ledger.strays(blocks):
            self.violated("I2", f"{self.settings.name}: {words}")
        ledger.begin(blocks, tensors)

    def look(self) -> None:
        """Check every block."""
        for name, ledger in self.ledgers.items():
            strays = ledger.strays()
            for words in strays:
                self.violated("I2", f"{name} cache of the {self.settings.name}: {words}")
            for words in ledger.wrong():
                if words not in strays:
                    self.violated("I6", f"{name} cache of the {self.settings.name}: {words}")

    def figures(self) -> Iterable[Figures[PoolUsage]]:
        """Return the figures of all clusters of this process."""
        return [door.figures() for door in self.doors]

    def entries(self) -> Iterable[Entry]:
        """Return all caches of all clusters."""
        return [entry for door in self.doors for entry in door.entries()]

    def _look_at_figures(self, figures: Figures[PoolUsage]) -> None:
        running = {operation: flow.running for operation, flow in figures.transfers.items() if flow.running}
        pinned = {name: usage.pinned for name, usage in figures.pools.items() if usage.pinned}
        for what, rule in ((running, "I3"), (dict(figures.links), "I5"), (pinned, "I5")):
            if what:
                self.violated(rule, f"cluster {figures.cluster_id} is at rest, and has {what}")
        if figures.leases or figures.leases_opened != sum(figures.leases_ended.values()):
            self.violated("I4", f"cluster {figures.cluster_id} is at rest, and keeps {figures.leases} leases")


class Cancellable(Protocol):
    """A transfer."""

    def cancel(self) -> bool:
        """Ask it to stop; False if it has ended."""


async def to_its_end(task: Cancellable, wait: Callable[[], Awaitable[None]], chance: random.Random) -> None:
    """Await it with ``wait``: to its end, with the transfer cancelled, or with the awaiting task cancelled."""
    loop, way = asyncio.get_running_loop(), chance.random()
    delay = chance.choice((0.0, 0.0005, 0.005, 0.05)) * chance.random()
    timers: list[asyncio.TimerHandle] = []
    if way < 0.1:
        timers.append(loop.call_later(delay, task.cancel))

    async def waiting() -> None:
        if 0.1 <= way < 0.2:  # from here, because a task that has not begun to wait cancels nothing
            timers.append(loop.call_later(delay, waiter.cancel))
        await wait()

    waiter = asyncio.ensure_future(waiting())
    try:
        await asyncio.wait([waiter])
    finally:
        for timer in timers:
            timer.cancel()
        if not waiter.done():
            waiter.cancel()
            await asyncio.wait([waiter])
    if not waiter.cancelled():
        waiter.result()
