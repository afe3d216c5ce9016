"""Bytes between caches and stages: grids on a stream, like every other transfer.

Loads and saves have a stream each, because a caller waits for a load. The kind of a copy follows from the place of the
memory: stages and values are in host memory, caches wherever they were made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import anyio

from aiodatadist._context_caching.errors import EmsInvalidArgument
from aiodatadist._context_caching.memory.copy_list import CopyStep, PlacementsOf
from aiodatadist._context_caching.transfer.loans import LoanSet
from aiodatadist._device import MAX_COPY_SECONDS, CopyKind, Device, Program, Stream, TransferState

StreamName = Literal["load", "save"]


class CopyStreams:
    """A device, opened when it is first needed, and its two streams."""

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id
        self._device: Device | None = None
        self._streams: dict[StreamName, Stream] = {}
        self._opening = anyio.Lock()
        self._is_closed = False

    async def open(self) -> Device:
        """Return the device; open it if necessary. Raises LLMException if there is no such device."""
        if self._device is None:
            async with self._opening:
                if self._is_closed:
                    raise EmsInvalidArgument("this cache is closed")
                if self._device is None:
                    self._device = await Device.open(self._device_id)
        return self._device

    async def move(self, name: StreamName, steps: Sequence[CopyStep], deadline: float, loans: LoanSet) -> None:
        """Copy, and return once the last byte has landed. If it raises, no more bytes land.

        Args:
            loans: marked as stuck if even that is uncertain, because the device does not release the memory.

        Raises:
            TransferTimeout: if it was not done by the deadline, counted from its start on the device.
            LLMException: if the device refused, for instance because memory is not where its placement says.
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
        """Return the function that tells the placements of addresses."""
        return (await self.open()).placements_of

    async def aclose(self) -> None:
        """Cancel remaining copies, and close the device.

        Raises:
            StuckError: if the device did not release memory.
        """
        self._is_closed = True
        async with self._opening:  # a call may be opening the device: it is closed below
            pass
        try:
            for stream in self._streams.values():
                await stream.aclose()
        finally:
            if self._device is not None:
                await self._device.aclose()
