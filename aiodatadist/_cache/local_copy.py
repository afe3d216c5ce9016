"""Copies between caches of this cluster, on their own streams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from aiodatadist._cache.names import Form
from aiodatadist._cache.seen_once import SeenOnce
from aiodatadist._cache.table import Entry
from aiodatadist._cache.task import AtOnce
from aiodatadist._counting import Flow, Totals
from aiodatadist._device import (
    MAX_COPY_SECONDS,
    BlockRun,
    CopyKind,
    Device,
    Program,
    Stream,
    StreamTransfer,
    TransferReport,
    TransferState,
)
from aiodatadist._values.grid import Grid
from aiodatadist._values.transfer_priority import TransferPriority

MOST_WAYS = 256
"""The most short ways that are remembered. Each keeps two addresses for each tensor."""


@dataclass(frozen=True, slots=True)
class CopyWay:
    """A short way for copies of one form between two caches, each time of other blocks.

    Attributes:
        copies: the copies of its cluster.
        blocks: runs them.
        flow: counts them.
        common: what their tasks have in common.
    """

    copies: LocalCopies
    source: Entry
    target: Entry
    blocks: BlockRun
    flow: Flow
    common: AtOnce

    def run(self, numbers: bytes, count: int, notify: bytes | None = None) -> TransferReport | StreamTransfer | None:
        """Copy ``count`` blocks, whose packed numbers are those of the target, then those of the source.

        There is no peer to notify. Most copies have ended when this returns. They lease nothing, because nothing else
        happens meanwhile. Return None if nothing was done. Then the copy takes the long way, which also reports what is
        wrong with it.
        """
        done = self.blocks.run(numbers, count)
        if type(done) is TransferReport:
            nbytes, ranges, _, seconds = done
            self.flow.ran(nbytes, ranges, seconds)
        elif type(done) is StreamTransfer:
            self.copies.ways.clear()  # this one is spent
            self.copies.lease(self.source, self.target, done)
        return done


class LocalCopies:
    """The copies of one cluster. They run one after the other, critical ones beside them.

    Each leases both of its caches.

    Attributes:
        ways: the short ways, by the call's words, the ids of target and source, and if they are critical.
    """

    def __init__(self, device: Device, cluster_id: int, check_here: Callable[[], None], totals: Totals) -> None:
        self._device = device
        self._cluster_id = cluster_id
        self._check_here = check_here
        self._totals = totals
        self._streams: dict[bool, Stream] = {}
        self.ways: dict[Any, CopyWay] = {}
        self._parts = SeenOnce()

    def _stream(self, is_critical: bool) -> Stream:
        if is_critical not in self._streams:
            self._streams[is_critical] = self._device.open_stream("copies, critical" if is_critical else "copies")
        return self._streams[is_critical]

    def start(
        self,
        source: Entry,
        target: Entry,
        grid: Grid,
        seconds: float = MAX_COPY_SECONDS,
        priority: TransferPriority = TransferPriority.NORMAL,
        form: Form | None = None,
    ) -> StreamTransfer:
        """Copy a grid's remote side, in ``source``, to its local side, in ``target``, within ``seconds``.

        Args:
            form: the call's name, and its words that the next call may have in common with it; or None.
        """
        program = Program().copy(CopyKind(2 * source.placement + target.placement), grid)
        is_critical = priority is TransferPriority.CRITICAL
        transfer = self._stream(is_critical).submit(program, seconds, priority=priority)
        self.lease(source, target, transfer)
        # background work has no short way: its windows are smaller than those of one
        if form is not None and priority is not TransferPriority.BACKGROUND and transfer.state is TransferState.DONE:
            self._learn(form, source, target, grid, seconds, is_critical)
        return transfer

    def lease(self, source: Entry, target: Entry, transfer: StreamTransfer) -> None:
        """Lease both caches until the device has let go of them."""
        # a set, because a cache that is copied within itself is leased once
        entries = {source, target}
        for entry in entries:
            entry.lease()

        def ended(done: StreamTransfer) -> None:
            for entry in entries:
                self._settle(done, entry)

        transfer.add_done_callback(ended)

    def _learn(
        self, form: Form, source: Entry, target: Entry, grid: Grid, seconds: float,
        is_critical: bool,
    ) -> None:  # fmt: skip
        """Make a short way of a copy that ended at once. Of the grid, everything but the numbers of the blocks is kept."""
        key = form, target.cache_id, source.cache_id, is_critical
        old = self.ways.get(key)
        if not (source.is_usable and target.is_usable) or (old and (old.source, old.target) == (source, target)):
            return  # memory of the caller's, or a call that could not take the way
        if grid.nbytes != target.stride and not self._parts.has_seen(key):
            return
        if len(self.ways) >= MOST_WAYS:
            self.ways.clear()
        program, stream = (
            Program().copy(CopyKind(2 * source.placement + target.placement), grid),
            self._stream(is_critical),
        )
        blocks = BlockRun(stream, program, target.pieces, source.pieces, max(1, round(seconds * 1000)))
        about = f"{{1}} blocks of {len(grid.local)} tensors"
        common = AtOnce(form[0], self._cluster_id, self._check_here, stream.loop_time, about)
        self.ways[key] = CopyWay(self, source, target, blocks, self._totals.transfers[form[0]], common)

    def _settle(self, transfer: StreamTransfer, entry: Entry) -> None:
        if transfer.state is not TransferState.STUCK:
            entry.release()
            return
        entry.poison()
        for region in entry.regions():
            self._device.mark_stuck(region.address, region.nbytes)

    async def aclose(self) -> None:
        """Cancel remaining copies, and wait until the device has released the memory."""
        self.ways.clear()
        async with AsyncExitStack() as stack:
            for stream in self._streams.values():
                stack.push_async_callback(stream.aclose)
