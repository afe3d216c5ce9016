"""Transfers of byte ranges by address: each lies in one cache of this end, and in one that the peer registered.

The peer is asked once for each of its caches, by an address in it, and answers with the whole cache. So an address that it
did not register reaches nothing, and what it registers later is found when it is first named.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import anyio

from aiodatadist._cache.names import AddressKey
from aiodatadist._device import Program, StreamTransfer, TransferCompletion, TransferState
from aiodatadist._link.data.remote_operation import RemoteOperation, failed
from aiodatadist._link.transfers.running import LANES
from aiodatadist._values.grid import Grid
from aiodatadist._values.spans import Spans
from aiodatadist._values.transfer_priority import TransferPriority
from aiodatadist.errors import CacheNotFound, LLMException, ParamInvalid, TransferTimeout

if TYPE_CHECKING:
    from aiodatadist._cache.catalogue import RemoteCache
    from aiodatadist._cache.table import Entry
    from aiodatadist._link.transfers.requester import Requester


@dataclass(frozen=True, slots=True)
class RangeSpec:
    """The ranges that a caller wants to be moved. Range ``i`` is ``lengths[i]`` bytes at ``local[i]`` and at ``remote[i]``.

    Attributes:
        entries: the caches of this end that contain the local ranges, each once.
        direction: ``get`` reads the peer's memory, ``put`` writes it.
        seconds: the time limit of the transfer. Asking the peer first may take as long again.
    """

    entries: tuple[Entry, ...]
    local: array[int]
    remote: array[int]
    lengths: array[int]
    direction: Literal["get", "put"]
    seconds: float
    priority: TransferPriority = TransferPriority.NORMAL


def grids_of(local: array[int], remote: array[int], lengths: array[int]) -> list[Grid]:
    """Return ranges as grids, one for each length. Ranges that continue the one before at both ends are joined to it."""
    nbytes = lengths[0]
    # The usual case, found without a loop in Python: blocks of one size, none of which follows its neighbour.
    if lengths.count(nbytes) == len(lengths) and nbytes not in map(operator.sub, local[1:], local):
        zero = array("Q", [0])
        return [Grid(local, remote, zero, zero, nbytes, nbytes, nbytes, nbytes)]
    groups: dict[int, tuple[array[int], array[int]]] = {}
    start, there, total = local[0], remote[0], 0
    for mine, theirs, nbytes in zip(local, remote, lengths, strict=True):
        if mine == start + total and theirs == there + total:
            total += nbytes
            continue
        _add(groups, start, there, total)
        start, there, total = mine, theirs, nbytes
    _add(groups, start, there, total)
    zero = array("Q", [0])
    return [Grid(*group, zero, zero, nbytes, nbytes, nbytes, nbytes) for nbytes, group in groups.items()]


def _add(groups: dict[int, tuple[array[int], array[int]]], start: int, there: int, nbytes: int) -> None:
    group = groups.get(nbytes)
    if group is None:
        group = groups[nbytes] = array("Q"), array("Q")
    group[0].append(start)
    group[1].append(there)


class RangeTransfers:
    """The transfers of ranges of one link, and the caches of the peer that they have met."""

    def __init__(self, requester: Requester) -> None:
        self._requester = requester
        self._running = requester.running
        self._session = requester.session
        self._theirs: Spans[RemoteCache] = Spans()

    def begin(self, spec: RangeSpec, what: str) -> StreamTransfer | RemoteOperation:
        """Start a transfer. Never raises for what goes wrong with it: the completion reports that."""
        try:
            transfer = self._at_once(spec)
        except LLMException as error:
            error.peer = self._session.cluster_id
            return failed(what, error)
        if transfer is not None:
            return transfer
        operation = RemoteOperation(f"{what} of cluster {self._session.cluster_id}", 2 * self._running.quiesce_seconds)
        for entry in spec.entries:
            entry.lease()
        self._running.operations.add(operation)
        operation.add_done_callback(partial(self._ended, spec))
        self._session.spawn(lambda: operation.run(partial(self._arrange, operation, spec)))
        return operation

    def _ended(self, spec: RangeSpec, operation: RemoteOperation) -> None:
        session, is_stuck = self._session, operation.state is TransferState.STUCK
        self._running.operations.discard(operation)
        for entry in spec.entries:
            if is_stuck:
                self._running.lose(entry)
            else:
                entry.release()
        if session.life.failure is not None and operation.state is TransferState.CANCELLED:
            operation.replace_error(session.copy_of_failure())
        elif operation.error is not None:
            operation.error.peer = session.cluster_id
        self._running.check_idle()

    def _at_once(self, spec: RangeSpec) -> StreamTransfer | None:
        """Start a transfer if nothing must be asked first; return None otherwise."""
        if not self._theirs:
            return None
        remotes, missing = self._theirs.covering(spec.remote, spec.lengths)
        if missing or any(remote.is_withdrawn for remote in remotes):
            return None
        return self._submit(spec, list(remotes))

    def _submit(self, spec: RangeSpec, remotes: Sequence[RemoteCache]) -> StreamTransfer | None:
        """Hand the ranges to the device; return None if a further channel must be opened first.

        Raises:
            ParamInvalid: if the link does not reach a cache of the peer, or this end may not use it so.
        """
        session, running = self._session, self._running
        for remote in remotes:
            remote.check_access(spec.direction)
            for entry in spec.entries:
                session.channels.traits.check_reaches(remote, f"cluster {session.cluster_id}", entry)
        link_channel = session.channels.find(*_epochs(spec, remotes))
        if link_channel is None:
            return None
        program, add = Program(), link_channel.channel.add_get
        if spec.direction == "put":
            add = link_channel.channel.add_put
        for grid in grids_of(spec.local, spec.remote, spec.lengths):
            add(program, grid)
        priority = spec.priority
        transfer = running.launch(
            *(program, spec.direction, link_channel, spec.entries[0], remotes[0], spec.seconds),
            *(LANES["ours", priority], priority),
        )
        if transfer.state is TransferState.PENDING:
            running.also_uses(transfer, spec.entries[1:], remotes[1:])
        return transfer

    # ---- what the peer must be asked for ----

    async def _arrange(self, operation: RemoteOperation, spec: RangeSpec) -> None:
        transfer: TransferCompletion | None = None
        with anyio.move_on_after(spec.seconds):
            while transfer is None:
                remotes = await self._locate(spec)
                await self._session.channels.reach(*_epochs(spec, remotes))
                # The peer may have taken a cache back while a channel was opened. Then it is looked up again.
                if not any(remote.is_withdrawn for remote in remotes):
                    transfer = self._submit(spec, remotes)
        if transfer is None:
            words = f"did not say where its memory is, or open a channel to it, within {spec.seconds:g} s"
            raise TransferTimeout(f"cluster {self._session.cluster_id} {words}")
        operation.follow(transfer)

    async def _locate(self, spec: RangeSpec) -> list[RemoteCache]:
        """Return the peer's caches that contain the remote ranges. Ask for those that are not known.

        Raises:
            CacheNotFound: if the peer has registered no memory at an address.
            ParamInvalid: if a range leaves the memory that is registered there.
        """
        self._forget_withdrawn()
        while True:
            remotes, missing = self._theirs.covering(spec.remote, spec.lengths)
            if not missing:
                return list(remotes)
            await self._learn(spec.remote[missing[0]], spec.lengths[missing[0]])

    async def _learn(self, address: int, nbytes: int) -> None:
        session = self._session
        try:
            remote, _ = await self._requester.find(AddressKey(session.cluster_id, address))
        except CacheNotFound:
            raise ParamInvalid(
                f"{nbytes} bytes at {address:#x}: cluster {session.cluster_id} has no memory registered there for this end",
            ) from None
        if remote.room_at(address) < nbytes:
            raise ParamInvalid(
                f"{nbytes} bytes at {address:#x} leave the memory that cluster {session.cluster_id} registered: "
                f"{remote.room_at(address)} bytes are left there"
            )
        start, room = remote.addresses[remote.tensor_at(address)], remote.pieces * remote.stride
        other = self._theirs.overlapped(start, room)
        if other is remote:  # another transfer has asked, too
            return
        if other is not None:
            raise ParamInvalid(
                f"{nbytes} bytes at {address:#x} are in two caches of cluster {session.cluster_id}, {other.cache_id} and "
                f"{remote.cache_id}: ranges by address need memory that is registered once"
            )
        self._theirs.add(start, room, remote)

    def _forget_withdrawn(self) -> None:
        for remote in [remote for remote in self._theirs if remote.is_withdrawn]:
            for start in remote.addresses:
                self._theirs.remove(start)


def _epochs(spec: RangeSpec, remotes: Sequence[RemoteCache]) -> tuple[int, int]:
    """Return the epochs that a channel must reach at both ends."""
    return max(entry.epoch for entry in spec.entries), max(remote.epoch for remote in remotes)
