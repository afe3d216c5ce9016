"""Staging buffers: memory of the host through which ranges travel that their caller has not registered.

A range goes through them if this end has not registered it; a range of the peer's never does, because a peer reaches
registered memory only. They are memory of the engine's own, which no peer can name. A range costs one more copy, by the
thread of a stream, and a call's buffers are filled one after the other.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import anyio

from aiodatadist._device import MAX_COPY_SECONDS, CopyKind, Program, TransferCompletion, TransferState
from aiodatadist._link import RangeSpec, RemoteOperation, failed, grids_of
from aiodatadist._values.descriptors import CacheDesc, DataType, Placement
from aiodatadist.errors import LinkClosed, StuckError, TransferError

if TYPE_CHECKING:
    from aiodatadist._cache.table import Entry
    from aiodatadist._device import Memory, Stream
    from aiodatadist._hixl.cluster import Ranges
    from aiodatadist._hixl.options import BufferPool
    from aiodatadist._link import Link


class Piece(NamedTuple):
    """A part of a range: bytes of the caller's, of the peer's, and their place in a buffer."""

    mine: int
    theirs: int
    offset: int
    nbytes: int


def pieces_of(local: Sequence[int], remote: Sequence[int], lengths: Sequence[int], room: int) -> Iterator[list[Piece]]:
    """Yield the ranges in loads of at most ``room`` bytes, which is a buffer's. Longer ranges are cut."""
    load: list[Piece] = []
    used = 0
    for mine, theirs, nbytes in zip(local, remote, lengths, strict=True):
        done = 0
        while done < nbytes:
            part = min(nbytes - done, room - used)
            load.append(Piece(mine + done, theirs + done, used, part))
            done, used = done + part, used + part
            if used == room:
                yield load
                load, used = [], 0
    if load:
        yield load


@dataclass(frozen=True, slots=True)
class StagedRanges:
    """The ranges of one call that go through buffers."""

    local: array[int]
    remote: array[int]
    lengths: array[int]
    direction: Literal["get", "put"]
    seconds: float


class Staging:
    """The staging buffers of one engine."""

    def __init__(self, ranges: Ranges, pool: BufferPool) -> None:
        self._ranges = ranges
        self._pool = pool
        self._free: list[Entry] = []
        self._memory: Memory | None = None
        self._turn = anyio.Semaphore(max(1, pool.count))
        self._stream: Stream | None = None

    @property
    def is_there(self) -> bool:
        """True if there are buffers."""
        return bool(self._pool.count)

    async def open(self) -> None:
        """Allocate the buffers, before the first link, so that each link reaches them."""
        if not self._pool.count:
            return
        engine, nbytes = self._ranges.engine, self._pool.nbytes
        self._memory = engine.device.allocate(self._pool.count * nbytes, Placement.HOST)
        desc = CacheDesc(1, [1, nbytes], DataType.DT_UINT8, Placement.HOST)
        for number in range(self._pool.count):
            cache = await self._ranges.register_cache(desc, [self._memory.address + number * nbytes])
            entry = engine.registry.local(cache, "buffer")
            await engine.registry.make_reachable(entry)
            self._free.append(entry)
        self._stream = engine.device.open_stream("hixl staging")

    async def aclose(self) -> None:
        """Stop the copies under way, and wait until the device has let go of their memory."""
        if self._stream is not None:
            await self._stream.aclose()

    def begin(self, link: Link, ranges: StagedRanges, what: str) -> RemoteOperation:
        """Start a transfer. Never raises for what goes wrong with it: the completion reports that."""
        engine = self._ranges.engine
        operation = RemoteOperation(what, 4 * link.transfers.running.quiesce_seconds)

        async def move() -> None:
            for load in pieces_of(ranges.local, ranges.remote, ranges.lengths, self._pool.nbytes):
                await self._move(link, ranges, load, what)
            operation.nbytes, operation.ranges = sum(ranges.lengths), len(ranges.lengths)
            operation.finish(TransferState.DONE)

        if not engine.spawn(lambda: operation.run(move)):
            return failed(what, LinkClosed(f"cluster {engine.cluster_id} is being finalized"))
        return operation

    async def _move(self, link: Link, ranges: StagedRanges, load: list[Piece], what: str) -> None:
        """Move a load through a free buffer. If cancelled, return once no byte of it can land."""
        await self._turn.acquire()
        entry = self._free.pop()
        try:
            await self._through(entry, link, ranges, load, what)
        finally:
            if not entry.is_poisoned:  # otherwise the device may touch it for ever
                self._free.append(entry)
                self._turn.release()

    async def _through(self, entry: Entry, link: Link, ranges: StagedRanges, load: list[Piece], what: str) -> None:
        start = entry.addresses[0]
        lengths = array("Q", [piece.nbytes for piece in load])
        mine, theirs = (array("Q", [piece[i] for piece in load]) for i in range(2))
        places = array("Q", [start + piece.offset for piece in load])
        spec = RangeSpec((entry,), places, theirs, lengths, ranges.direction, ranges.seconds)
        if ranges.direction == "get":
            await _ended(link.transfers.ranges.begin(spec, what))
            await self._copy(mine, places, lengths)
        else:
            await self._copy(places, mine, lengths)
            await _ended(link.transfers.ranges.begin(spec, what))

    async def _copy(self, to: array[int], fro: array[int], lengths: array[int]) -> None:
        """Copy ranges of the host's memory."""
        if self._stream is None:
            raise StuckError("the staging buffers are closed")
        program, device = Program(), self._ranges.engine.device
        for grid in grids_of(to, fro, lengths):
            program.copy(CopyKind.HOST_TO_HOST, grid)
        copy = self._stream.submit(program, MAX_COPY_SECONDS)

        def stuck(done: TransferCompletion) -> None:
            if done.state is TransferState.STUCK:
                for address, nbytes in (*zip(to, lengths, strict=True), *zip(fro, lengths, strict=True)):
                    device.mark_stuck(address, nbytes)

        copy.add_done_callback(stuck)
        await _ended(copy)


async def _ended(transfer: TransferCompletion) -> None:
    """Wait for a transfer, and raise why it failed."""
    await transfer.join()
    if transfer.error is not None:
        raise transfer.error
    if transfer.state is not TransferState.DONE:
        raise TransferError("a part of the transfer was cancelled")
