"""Bytes between caches and stages: grids on a stream, as every other transfer.

Loads and saves have a stream each, because somebody waits for a load. Which kind of copy it is follows from where the memory
is: stages and values are the host's, caches are wherever they were made.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import anyio

from aiodatadist.context_caching.errors import EmsInvalidArgument
from aiodatadist.context_caching.transfer.loans import LoanSet
from aiodatadist.device import CopyKind, Device, Program, Stream, TransferState
from aiodatadist.values.descriptors import Placement
from aiodatadist.values.grid import Grid

MAX_COPY_SECONDS = 86400.0
"""Seconds for copies that no deadline limits."""

StreamName = Literal["load", "save"]
PlacementsOf = Callable[[Iterable[int]], list[Placement | None]]


class CopyStep(NamedTuple):
    """Ranges to copy. ``grid.local`` is the side that is written."""

    to: Placement
    source: Placement
    grid: Grid


class CopyList(NamedTuple):
    """Where values are in the caller's memory: ``grid.local`` is that, ``grid.remote`` is the values' own."""

    placement: Placement
    grid: Grid

    def gathered(self) -> CopyStep:
        """Into the values."""
        return CopyStep(Placement.HOST, self.placement, self.grid.mirrored())

    def scattered(self) -> CopyStep:
        """Out of the values."""
        return CopyStep(self.placement, Placement.HOST, self.grid)


def copies(pairs: Sequence[tuple[int, int, int]]) -> list[CopyStep]:
    """From value to value: (destination, source, bytes)."""
    by_size: dict[int, list[tuple[int, int]]] = {}
    for to, source, nbytes in pairs:
        by_size.setdefault(nbytes, []).append((to, source))
    return [
        CopyStep(Placement.HOST, Placement.HOST, at_addresses([a for a, _ in ends], [b for _, b in ends], nbytes))
        for nbytes, ends in by_size.items()
    ]


def at_addresses(local: Sequence[int], remote: Sequence[int], nbytes: int) -> Grid:
    """Ranges of equal length, each at an address of its own on both sides."""
    origin = array("Q", [0])
    return Grid(origin, origin, array("Q", local), array("Q", remote), 1, 1, nbytes, nbytes)


class CopyStreams:
    """A device, opened when it is first needed, and its two streams."""

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id
        self._device: Device | None = None
        self._streams: dict[StreamName, Stream] = {}
        self._opening = anyio.Lock()
        self._is_closed = False

    async def open(self) -> Device:
        """Raises LLMException: there is no such device."""
        if self._device is None:
            async with self._opening:
                if self._is_closed:
                    raise EmsInvalidArgument("this cache is closed")
                if self._device is None:
                    self._device = await Device.open(self._device_id)
        return self._device

    async def move(self, name: StreamName, steps: Sequence[CopyStep], deadline: float, loans: LoanSet) -> None:
        """Copy, and return when the last byte has landed; or, if it raises, when no byte lands any more.

        Args:
            hold: told when not even that is sure, because the device does not let go.

        Raises:
            TransferTimeout: it took longer than until the deadline, counted from when it began to run.
            LLMException: the device refused, for instance because memory is not the device's that its placement says to be.
        """
        if not steps:
            return
        device = await self.open()
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = device.open_stream(f"context cache {name}")
        program = Program()
        for step in steps:
            program.copy(CopyKind(2 * step.source + step.to), step.grid)
        left = deadline - anyio.current_time() if deadline != math.inf else MAX_COPY_SECONDS
        transfer = stream.submit(program, max(left, 0.001))
        try:
            await transfer.wait()
        finally:
            loans.is_stuck |= transfer.state is TransferState.STUCK

    async def placements(self) -> PlacementsOf:
        """What says where addresses are."""
        return (await self.open()).placements_of

    async def aclose(self) -> None:
        """Cancel what is left, and give the device back.

        Raises:
            StuckError: the device did not let go.
        """
        self._is_closed = True
        async with self._opening:  # somebody may be opening the device: it is closed below
            pass
        try:
            for stream in self._streams.values():
                await stream.aclose()
        finally:
            if self._device is not None:
                await self._device.aclose()
