"""Copies between caches of this cluster, on their own streams."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from aiodatadist._cache.table import Entry
from aiodatadist._device import MAX_COPY_SECONDS, CopyKind, Device, Program, Stream, StreamTransfer, TransferState
from aiodatadist._values.grid import Grid
from aiodatadist._values.transfer_priority import TransferPriority


class LocalCopies:
    """The copies of one cluster. They run one after the other, critical ones beside them.

    Each leases both of its caches.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams: dict[bool, Stream] = {}

    def _stream(self, is_critical: bool) -> Stream:
        if is_critical not in self._streams:
            self._streams[is_critical] = self._device.open_stream("copies, critical" if is_critical else "copies")
        return self._streams[is_critical]

    def start(
        self,
        source: Entry,
        target: Entry,
        grids: Sequence[Grid],
        seconds: float = MAX_COPY_SECONDS,
        priority: TransferPriority = TransferPriority.NORMAL,
    ) -> StreamTransfer:
        """Copy the grids' remote sides, in ``source``, to their local sides, in ``target``, within ``seconds``."""
        program = Program()
        for grid in grids:
            program.copy(CopyKind(2 * source.placement + target.placement), grid)
        stream = self._stream(priority is TransferPriority.CRITICAL)
        transfer = stream.submit(program, seconds, priority=priority)
        # a set, because a cache that is copied within itself is leased once
        entries = {source, target}
        for entry in entries:
            entry.lease()

        def ended(done: StreamTransfer) -> None:
            for entry in entries:
                self._settle(done, entry)

        transfer.add_done_callback(ended)
        return transfer

    def _settle(self, transfer: StreamTransfer, entry: Entry) -> None:
        if transfer.state is not TransferState.STUCK:
            entry.release()
            return
        entry.poison()
        for region in entry.regions():
            self._device.mark_stuck(region.address, region.nbytes)

    async def aclose(self) -> None:
        """Cancel remaining copies, and wait until the device has released the memory."""
        async with AsyncExitStack() as stack:
            for stream in self._streams.values():
                stack.push_async_callback(stream.aclose)
