"""Checksums of pieces of this cluster's caches, beside the event loop and in bounded memory.

Host memory is read where it is. Device memory is copied to the host through two windows of pinned memory, one of which is
copied into while the other is summed; all transfers of a cluster share them, and the threads that sum. Peers take turns,
window by window and slice by slice: the questions of one that asks for too much wait behind each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio

from aiodatadist.cache.table import Entry
from aiodatadist.concurrency.blocking_calls import in_thread
from aiodatadist.concurrency.fair_queue import FairQueue
from aiodatadist.device import (
    MAX_COPY_SECONDS,
    CopyKind,
    Device,
    Memory,
    Program,
    Stream,
    StreamTransfer,
    TransferState,
)
from aiodatadist.device.checksums import add_checksums
from aiodatadist.errors import StuckError
from aiodatadist.values.descriptors import Placement
from aiodatadist.values.grid import Grid, Side

WINDOW_BYTES = 8 << 20
"""Of device memory that is copied, and then summed, at a time: as much as a stream hands to its device at a time."""
SLICE_BYTES = 16 << 20
"""Of host memory that is summed between two looks at whether that is still wanted: 3 ms, where a thread's start takes 0.1."""
SMALL_BYTES = 64 << 10
"""That are summed where they are asked for, in 10 us, or 0.1 ms by tables: to wake a thread and be woken takes as long."""
WINDOWS = 2
THREADS = 2
"""That sum: the two ends of a link are mostly two machines, and one thread sums faster than one device copies."""


class _Staged:
    """A part of a side that is on its way into a window."""

    __slots__ = ("first", "side", "transfer", "window")

    def __init__(self, window: int, transfer: StreamTransfer, first: int, side: Side) -> None:
        self.window = window
        self.transfer = transfer
        self.first = first
        self.side = side


class Digester:
    """Of one cluster, on its event loop. What it needs it takes when it is first asked."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._threads: ThreadPoolExecutor | None = None
        self._stream: Stream | None = None
        self._memory: Memory | None = None
        self._opening = anyio.Lock()
        self._free: list[int] = []  # windows, by their addresses
        self._line = FairQueue()  # for windows
        self._idle = THREADS
        self._thread_line = FairQueue()
        self._stuck: StuckError | None = None

    async def digests(self, entry: Entry, side: Side, peer: Hashable = None) -> array[int]:
        """CRC-32C of each block of a side of this cache, over all its tensors in their order. ``peer``: in whose line.

        The caller has leased the cache. If cancelled, this ends when nothing reads the memory any more.

        Raises:
            LLMException: the device could not copy, or there is no memory for a window.
            StuckError: the device did not let go of a copy; the cache is poisoned.
        """
        sums = array("I", bytes(4 * len(side.index)))
        if entry.placement is Placement.HOST:
            for first, part in side.parts(SLICE_BYTES):
                await self._add(sums, first, part, peer)
        else:
            if self._memory is None:  # else there is nothing to wait for: the lock would be a line for all peers
                await self._open()
            await self._add_staged(sums, entry, side.parts(WINDOW_BYTES), peer)
        return sums

    async def _add(self, sums: array[int], first: int, side: Side, peer: Hashable) -> None:
        if len(side.addresses) * side.tensor_bytes <= SMALL_BYTES:
            add_checksums(sums, first, side)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "aiodatadist checksums")
        await self._thread_line.take(self._thread, line=peer)
        try:
            await in_thread(add_checksums, sums, first, side, threads=self._threads)
        finally:
            self._idle += 1
            self._thread_line.call()

    def _thread(self) -> bool | None:
        """One of the threads, if one is idle."""
        if not self._idle:
            return None
        self._idle -= 1
        return True

    # ---- memory that the host cannot read ----

    async def _open(self) -> None:
        async with self._opening:
            if self._stream is None:
                self._stream = self._device.open_stream("checksums")
            if self._memory is None:
                nbytes = WINDOWS * WINDOW_BYTES
                memory = await in_thread(self._device.allocate, nbytes, Placement.HOST, undo=self._free_memory)
                self._free.extend(range(memory.address, memory.address + nbytes, WINDOW_BYTES))
                self._memory = memory

    def _free_memory(self, memory: Memory) -> None:
        with self._device.current():
            memory.free()

    async def _add_staged(
        self, sums: array[int], entry: Entry, parts: Iterator[tuple[int, Side]], peer: Hashable
    ) -> None:
        """While one part is summed, the next one is copied, if there is a window that no other transfer waits for."""
        ahead: _Staged | None = None
        try:
            while (staged := ahead or await self._stage_next(entry, parts, peer)) is not None:
                ahead = None
                try:
                    await staged.transfer.wait()
                    ahead = self._stage_ahead(entry, parts)
                    await self._add(sums, staged.first, staged.side, peer)
                finally:
                    self._give_back(staged)
        finally:
            if ahead is not None:
                ahead.transfer.cancel()
                self._give_back(ahead)

    async def _stage_next(self, entry: Entry, parts: Iterator[tuple[int, Side]], peer: Hashable) -> _Staged | None:
        part = next(parts, None)
        return None if part is None else self._stage(await self._line.take(self._window, line=peer), entry, *part)

    def _stage_ahead(self, entry: Entry, parts: Iterator[tuple[int, Side]]) -> _Staged | None:
        if len(self._line) or not self._free or (part := next(parts, None)) is None:
            return None
        return self._stage(self._free.pop(), entry, *part)

    def _window(self) -> int | None:
        if self._stuck is not None:
            raise StuckError(*self._stuck.args)
        return self._free.pop() if self._free else None

    def _stage(self, window: int, entry: Entry, first: int, side: Side) -> _Staged:
        """Start to copy a part of a side; the cache is leased until the device let go."""
        assert self._stream is not None
        places = array("Q", range(window, window + len(side.addresses) * side.tensor_bytes, side.tensor_bytes))
        numbers = array("Q", range(len(side.index)))
        grid = Grid(
            places, side.addresses, numbers, side.index, side.nbytes, side.stride, side.nbytes, side.tail
        )  # the tail is the last of each tensor: those behind it follow without a gap
        entry.lease()
        try:
            transfer = self._stream.submit(Program().copy(CopyKind.DEVICE_TO_HOST, grid), MAX_COPY_SECONDS)
        except BaseException:
            entry.release()
            self._free.append(window)
            raise
        transfer.add_done_callback(partial(self._settle, entry))
        return _Staged(window, transfer, first, grid.local_side)

    def _settle(self, entry: Entry, transfer: StreamTransfer) -> None:
        if transfer.state is not TransferState.STUCK:
            entry.release()
            return
        entry.poison()
        for region in entry.regions():
            self._device.mark_stuck(region.address, region.nbytes)

    def _give_back(self, staged: _Staged) -> None:
        """Its window, when the device let go of it."""
        staged.transfer.add_done_callback(partial(self._let_go, staged.window))

    def _let_go(self, window: int, transfer: StreamTransfer) -> None:
        if transfer.state is TransferState.STUCK:
            self._stuck = StuckError("the device did not let go of a copy that was to be summed")
            self._device.mark_stuck(window, WINDOW_BYTES)
        else:
            self._free.append(window)
        self._line.call()

    # ---- the end ----

    async def aclose(self) -> None:
        """Nothing is asked any more: wait until the device and the threads let go. The device frees the windows."""
        if self._threads is not None:
            await in_thread(self._threads.shutdown, gives_back=True)
        if self._stream is not None:
            await self._stream.aclose()
