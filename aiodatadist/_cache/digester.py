"""Checksums of pieces of this cluster's caches, computed beside the event loop in bounded memory.

Host memory is read in place. Device memory is copied to the host through two windows of pinned memory: one is filled
while the other is summed. All transfers of a cluster share the windows and the summing threads. Peers take turns,
window by window and slice by slice: if one asks for too much, its own questions wait behind each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio

from aiodatadist._cache.table import Entry
from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._concurrency.fair_queue import FairQueue
from aiodatadist._device import (
    MAX_COPY_SECONDS,
    CopyKind,
    Device,
    Memory,
    Program,
    Stream,
    StreamTransfer,
    TransferState,
)
from aiodatadist._device.checksums import add_checksums
from aiodatadist._values.descriptors import Placement
from aiodatadist._values.grid import Grid, Side
from aiodatadist.errors import StuckError

WINDOW_BYTES = 8 << 20
"""Bytes of device memory that are copied, and then summed, at a time: the most that a stream submits at once."""
SLICE_BYTES = 16 << 20
"""Bytes of host memory summed between two checks for cancellation: 3 ms, while starting a thread takes 0.1 ms."""
SMALL_BYTES = 64 << 10
"""Bytes summed on the event loop, in 10 us (0.1 ms with tables): waking a thread and being woken takes as long."""
WINDOWS = 2
"""Windows of pinned memory: one is filled while the other is summed."""
THREADS = 2
"""Summing threads: the ends of a link are mostly on two machines, and one thread sums faster than a device copies."""


class _Staged:
    """A part of a side that is being copied into a window."""

    __slots__ = ("first", "side", "transfer", "window")

    def __init__(self, window: int, transfer: StreamTransfer, first: int, side: Side) -> None:
        self.window = window
        self.transfer = transfer
        self.first = first
        self.side = side


class Digester:
    """The checksums of one cluster, on its event loop. It allocates what it needs on first use."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._threads: ThreadPoolExecutor | None = None
        self._stream: Stream | None = None
        self._memory: Memory | None = None
        self._opening = anyio.Lock()
        self._free: list[int] = []  # addresses of free windows
        self._line = FairQueue()  # transfers that wait for a window
        self._idle = THREADS
        self._thread_line = FairQueue()
        self._stuck: StuckError | None = None

    async def digests(self, entry: Entry, side: Side, peer: Hashable = None) -> array[int]:
        """Return the CRC-32C of each block of a side of this cache, over all tensors in order.

        The caller has leased the cache. ``peer`` names the line in which this waits. If cancelled, this ends once
        nothing reads the memory any longer.

        Raises:
            LLMException: if the device could not copy, or there is no memory for a window.
            StuckError: if the device did not release the memory of a copy; the cache is poisoned.
        """
        sums = array("I", bytes(4 * len(side.index)))
        if entry.placement is Placement.HOST:
            for first, part in side.parts(SLICE_BYTES):
                await self._add(sums, first, part, peer)
        else:
            if self._memory is None:  # only then: the lock would put all peers into one line
                await self._open()
            await self._add_staged(sums, entry, side.parts(WINDOW_BYTES), peer)
        return sums

    def is_at_hand(self, entry: Entry, side: Side) -> bool:
        """Return True if :meth:`digests_now` can compute these checksums: the host can read the bytes, and they are few."""
        return side.total <= SMALL_BYTES and (entry.placement is Placement.HOST or self._device.runtime.is_soft)

    def digests_now(self, side: Side) -> array[int]:
        """Return the same checksums of bytes that are at hand, in this call."""
        sums = array("I", bytes(4 * len(side.index)))
        add_checksums(sums, 0, side)
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
        """Return True and take a thread if one is idle, otherwise None."""
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
        """Sum the parts; copy the next one meanwhile if there is a window that no other transfer waits for."""
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
        """Start to copy a part of a side. The cache stays leased until the device has released it."""
        assert self._stream is not None
        places = array("Q", range(window, window + len(side.addresses) * side.tensor_bytes, side.tensor_bytes))
        numbers = array("Q", range(len(side.index)))
        # The last block of each tensor is its tail, so in the window the next tensor follows without a gap.
        grid = Grid(places, side.addresses, numbers, side.index, side.nbytes, side.stride, side.nbytes, side.tail)
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
        """Free its window once the device has released it."""
        staged.transfer.add_done_callback(partial(self._let_go, staged.window))

    def _let_go(self, window: int, transfer: StreamTransfer) -> None:
        if transfer.state is TransferState.STUCK:
            self._stuck = StuckError("the device did not release a copy that was to be summed")
            self._device.mark_stuck(window, WINDOW_BYTES)
        else:
            self._free.append(window)
        self._line.call()

    # ---- the end ----

    async def aclose(self) -> None:
        """Wait until the device and the threads have released everything. The device frees the windows."""
        if self._threads is not None:
            await in_thread(self._threads.shutdown, gives_back=True)
        if self._stream is not None:
            await self._stream.aclose()
