"""Copies between caches of this cluster, on a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence

from aiodatadist.cache.table import Entry
from aiodatadist.device import MAX_COPY_SECONDS, CopyKind, Device, Program, Stream, StreamTransfer, TransferState
from aiodatadist.values.grid import Grid


class LocalCopies:
    """Copies run one after the other; each leases both of its caches."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream: Stream | None = None

    def start(
        self, source: Entry, target: Entry, grids: Sequence[Grid], seconds: float = MAX_COPY_SECONDS
    ) -> StreamTransfer:
        """Copy the grids' remote sides, in ``source``, to their local sides, in ``target``, within so many seconds."""
        program = Program()
        for grid in grids:
            program.copy(CopyKind(2 * source.placement + target.placement), grid)
        if self._stream is None:
            self._stream = self._device.open_stream("copies")
        transfer = self._stream.submit(program, seconds)
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
        """Cancel what is left and wait until the device let go."""
        if self._stream is not None:
            await self._stream.aclose()
