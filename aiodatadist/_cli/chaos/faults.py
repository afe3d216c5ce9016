"""Faults that a process causes in itself when it is told to."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, suppress

import anyio

from aiodatadist import Cache, CacheDesc, DataType, LLMException, OutOfMemory
from aiodatadist._cli.chaos.doors import Door
from aiodatadist._cli.chaos.messages import Fault
from aiodatadist._concurrency.signal import Signal
from aiodatadist.testing import soft_fault, soft_faults_cleared

_HOUR = 3600.0


class OwnFaults:
    """The faults of this process. Each lasts for a given time, and is then undone.

    Args:
        doors: the clusters of the process, whose pools can be full.
    """

    def __init__(self, doors: list[Door]) -> None:
        self._doors = doors
        self._running: dict[anyio.CancelScope, None] = {}
        self._ended = Signal()
        self._real_time, self._real_time_ns = time.time, time.time_ns

    async def suffer(self, fault: Fault) -> None:
        with anyio.CancelScope() as scope:
            self._running[scope] = None
            try:
                await self._suffer(fault)
            finally:
                del self._running[scope]
                self._ended.wake()

    async def end_all(self) -> None:
        """Wait until no fault lasts any longer."""
        while self._running:
            for scope in self._running:
                scope.cancel()
            await self._ended.wait()

    async def _suffer(self, fault: Fault) -> None:
        if fault.name == "spin":
            spin(fault.seconds)
        elif fault.name == "hog":
            await self._hogged(fault.seconds)
        elif fault.name == "clock":
            await self._at_another_time(_HOUR if fault.spec == "+" else -_HOUR, fault.seconds)
        elif fault.name == "full":
            await self._full(fault.seconds)
        else:
            await self._soft(fault)

    @staticmethod
    async def _hogged(seconds: float) -> None:
        """Run a pure Python thread that holds the interpreter whenever it can."""
        hog = Hog()
        hog.start()
        try:
            await anyio.sleep(seconds)
        finally:
            hog.over.set()
            hog.join(5)

    async def _at_another_time(self, jump: float, seconds: float) -> None:
        """Make ``time.time`` of this process jump. C code that reads the clock sees no jump."""
        time.time = lambda: self._real_time() + jump
        time.time_ns = lambda: self._real_time_ns() + int(jump * 1e9)
        try:
            await anyio.sleep(seconds)
        finally:
            time.time, time.time_ns = self._real_time, self._real_time_ns

    async def _full(self, seconds: float) -> None:
        """Take all pages of device memory in every pool."""
        filled = [(door, cache) for door in self._doors for cache in await _fill(door)]
        try:
            await anyio.sleep(seconds)
        finally:
            with anyio.CancelScope(shield=True), suppress(LLMException):  # bounded: no transfer uses them
                for door, cache in filled:
                    await door.free(cache)

    @staticmethod
    async def _soft(fault: Fault) -> None:
        """Arm a fault of softnpu. At the end all faults are disarmed, including those that others armed meanwhile."""
        with ExitStack() as stack:
            stack.enter_context(soft_faults_cleared())
            soft_fault(fault.spec)
            await anyio.sleep(fault.seconds)


async def _fill(door: Door) -> list[Cache]:
    caches: list[Cache] = []
    with suppress(OutOfMemory):
        while True:
            usage = next(iter(door.figures().pools.values()))
            desc = CacheDesc(1, [1, max(usage.largest, 1)], DataType.DT_UINT8)
            caches.append(await door.allocate(desc))
    return caches


async def beside_others() -> None:
    """Imitate a process that also computes: a thread holds the interpreter, and the event loop is blocked now and then."""
    hog = Hog()
    hog.start()
    try:
        while True:
            await anyio.sleep(0.7)
            spin(0.3)
    finally:
        hog.over.set()


class Hog(threading.Thread):
    """A busy interpreter: pure Python that never waits, like a scheduler or a tokenizer, until ``over`` is set."""

    def __init__(self) -> None:
        super().__init__(name="hog", daemon=True)
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            sum(i * i for i in range(20_000))


def spin(seconds: float) -> None:
    """Keep the calling thread, and the interpreter, busy."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
