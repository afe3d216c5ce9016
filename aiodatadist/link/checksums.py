"""Whether what arrived is what was sent: checksums of the source are compared with those of the destination.

One-sided, the end that moved the bytes asks the other one, whose CPU took no part in that, when they have arrived::

    puller, or pusher                            owner of the other cache
    the bytes have arrived
    digest: these pieces of your cache     ->    sums up what is there now
    sums up its own side meanwhile
                                           <-    digests

In request/response mode the end that wrote sends the checksums of what it read with its answer, before a key is consumed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio

from aiodatadist.errors import (
    DataCorrupted,
    FeatureNotEnabled,
    IncompatiblePeer,
    LLMStatusCode,
    TransferTimeout,
)
from aiodatadist.link.remote_operation import TransferSpec
from aiodatadist.link.responder import status_error
from aiodatadist.values.grid import Grid, Side
from aiodatadist.wire.messages import MAX_INDEXES, MAX_SECONDS, PROTOCOL, Digest, Digests, Stop

if TYPE_CHECKING:
    from aiodatadist.cache.catalogue import RemoteCache
    from aiodatadist.cache.table import Entry
    from aiodatadist.link.session import Session
    from aiodatadist.values.selection import Geometry

AT_A_TIME = 16
"""Transfers of a link that are compared at a time; each has its time from then on."""
FAILURE_CAUSES = ("checksum",)
"""What transfers fail of that their status does not tell."""
NAMED = 8
"""Damaged blocks that a message names."""


def check_peer(minor: int, me: int, peer: int) -> None:
    """Raises IncompatiblePeer: the peer is too old for a link on which everything is to be checked."""
    if minor < Digest.since:
        raise IncompatiblePeer(
            f"transfer_checksum is on at cluster {me}, and {_too_old(peer, minor)}",
            hint="update it, or switch transfer_checksum off",
        )


def _too_old(peer: int, minor: int) -> str:
    return (
        f"cluster {peer} knows no checksums: its protocol has version {PROTOCOL}.{minor}, and they came with "
        f"{PROTOCOL}.{Digest.since}"
    )


class Checks:
    """Transfers of one link that are compared, and who may be asked for it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._turns = anyio.Semaphore(AT_A_TIME)

    def want_peer(self) -> None:
        """Raises FeatureNotEnabled: the peer is too old to be asked for checksums."""
        session = self._session
        if session.peer_minor < Digest.since:
            raise FeatureNotEnabled(
                _too_old(session.cluster_id, session.peer_minor),
                peer=session.cluster_id,
                hint="update it, or transfer without checksum",
            )

    async def compare(self, spec: TransferSpec, remote: RemoteCache, grid: Grid) -> None:
        """What this end moved has arrived: is it what was sent?

        Raises:
            DataCorrupted: it is not.
            TransferTimeout: neither end is to blame for bytes, but one took too long to sum them up.
            LLMException: an end could not sum them up.
        """
        mine = theirs = array("I")
        async with self._turns:
            with anyio.move_on_after(spec.seconds) as limit:
                mine, theirs = await self._both(spec, remote, grid)
        if limit.cancelled_caught:
            raise self._too_slow(spec.seconds)
        sums = (theirs, mine) if spec.direction == "get" else (mine, theirs)
        target: Geometry = remote if spec.direction == "put" else spec.entry
        self._judge(target, grid.local_side, *sums, has_parts=spec.selection.parts is not None)

    async def compare_layer(self, name: str, entry: Entry, remote: RemoteCache, grid: Grid, seconds: float) -> None:
        """A layer of this end's cache, the local side of a grid, has arrived in the peer's: is it what was sent?

        Its tensors may lie anywhere in that cache, as addresses say. Raises as :meth:`compare`; ``name`` says which layer.
        """
        mine, theirs = array("I"), array("I")
        async with self._turns:
            with anyio.move_on_after(seconds) as limit:
                for tensors in _neighbours(remote, grid.remote_side):
                    here, there = grid.local_side.tensors(tensors), grid.remote_side.tensors(tensors)
                    first = remote.tensor_at(there.addresses[0])
                    question = partial(_question, remote, range(first, first + len(tensors)), seconds)
                    await self._add(mine, theirs, entry, (remote, here, there), question)
        if limit.cancelled_caught:
            raise self._too_slow(seconds)
        self._judge(remote, grid.remote_side, mine, theirs, name=f"{name}: ")

    async def compare_answer(self, spec: TransferSpec, side: Side, sent: Sequence[int]) -> None:
        """What the peer wrote, which says what it sent. Raises as :meth:`compare`."""
        arrived = array("I")
        async with self._turns:
            with anyio.move_on_after(spec.seconds) as limit:
                arrived = await self._session.digester.digests(spec.entry, side, self._session.cluster_id)
        if limit.cancelled_caught:
            raise self._too_slow(spec.seconds)
        self._judge(spec.entry, side, array("I", sent), arrived, has_parts=spec.selection.parts is not None)

    def _too_slow(self, seconds: float) -> TransferTimeout:
        return TransferTimeout(
            f"the bytes have arrived, but their checksums were not compared within {seconds:g} s",
            peer=self._session.cluster_id,
        )

    async def _both(self, spec: TransferSpec, remote: RemoteCache, grid: Grid) -> tuple[array[int], array[int]]:
        """The checksums of this end's side, and of the peer's, which sums up at the same time."""
        here, there = grid.local_side, grid.remote_side
        if spec.direction == "put":
            here, there = there, here
        layers = spec.selection.layers
        tensors = layers.of_source(remote) if spec.direction == "get" else layers.of_target(remote)
        mine, theirs = array("I"), array("I")
        question = partial(_question, remote, tensors, spec.seconds)
        await self._add(mine, theirs, spec.entry, (remote, here, there), question)
        return mine, theirs

    async def _add(
        self,
        mine: array[int],
        theirs: array[int],
        entry: Entry,
        what: tuple[RemoteCache, Side, Side],
        question: Callable[[Side], Callable[[int], Digest]],
    ) -> None:
        """As many blocks at a time as a question names, and as the peer sums up for one link. ``what``: the peer's cache, and
        the pieces here and there."""
        remote, here, there = what
        nbytes = len(there.addresses) * there.nbytes
        count = min(MAX_INDEXES, max(1, remote.summing.limit // nbytes))
        for first in range(0, len(here.index), count):
            part = there.blocks(first, count)
            wanted = nbytes * len(part.index)
            await remote.summing.take(wanted)
            try:
                asked = await self._ask(question(part), entry, here.blocks(first, count))
            finally:
                remote.summing.give(wanted)
            mine.extend(asked[0])
            theirs.extend(asked[1])

    async def _ask(self, message: Callable[[int], Digest], entry: Entry, side: Side) -> tuple[array[int], list[int]]:
        session = self._session
        with session.questions.open(message, Digests, checksums=len(side.index)) as question:
            try:
                mine = await session.digester.digests(entry, side, session.cluster_id)
                await question.answered.wait()
            finally:
                if question.answer is None and session.is_open:
                    session.post(Stop(call=question.number))
        answer = question.answer
        assert isinstance(answer, Digests)
        if answer.status != LLMStatusCode.LLM_SUCCESS:
            raise status_error(answer, f"the bytes have arrived, but cluster {session.cluster_id} has no checksums: ")
        return mine, answer.checksums

    def _judge(
        self,
        target: Geometry,
        side: Side,
        sent: array[int],
        arrived: array[int],
        *,
        name: str = "",
        has_parts: bool = False,
    ) -> None:
        """``side``: of the destination, in ``target``; its blocks may have been summed several times, over some tensors
        each. Raises DataCorrupted: some of it is not what was sent."""
        if sent == arrived:
            return
        wrong = [i for i, (a, b) in enumerate(zip(sent, arrived, strict=True)) if a != b]
        blocks: dict[int, tuple[int, int]] = {}
        for i in wrong:
            block = side.index[i % len(side.index)]
            blocks.setdefault(block * side.stride // target.stride, (sent[i], arrived[i]))
        self._session.totals.failure_causes[FAILURE_CAUSES[0]] += 1
        error = DataCorrupted(
            f"{name}{len(wrong)} of {len(sent)} pieces are not what was sent: {_named(blocks)}",
            peer=self._session.cluster_id,
            blocks=list(blocks),
            digests=list(blocks.values()),
            hint="transfer these blocks again",
        )
        if not name and not has_parts:
            error.landed_blocks = wrong[0]
        raise error


def _neighbours(remote: RemoteCache, side: Side) -> Iterator[range]:
    """The tensors of a side in portions that follow each other in the cache, from the same offset on."""
    first, place = 0, (-1, -1)
    for i, address in enumerate(side.addresses):
        tensor = remote.tensor_at(address)
        before, place = place, (tensor, address - remote.addresses[tensor])
        if i and place != (before[0] + 1, before[1]):
            yield range(first, i)
            first = i
    yield range(first, len(side.addresses))


def _question(remote: RemoteCache, tensors: range, seconds: float, side: Side) -> Callable[[int], Digest]:
    """What the peer is asked about these tensors of its cache, once that has a number."""
    message = partial(
        Digest,
        cache_id=remote.cache_id,
        first_tensor=tensors.start,
        tensors=len(tensors),
        offset=side.addresses[0] - remote.addresses[tensors.start],
        step=side.stride,
        nbytes=side.nbytes,
        tail=side.tail,
        indexes=side.index.tolist(),
        seconds=min(seconds, MAX_SECONDS),
    )
    return lambda call: message(call=call)


def _named(blocks: dict[int, tuple[int, int]]) -> str:
    some = [
        f"block {block} (CRC-32C {sent:08x} at the source, {arrived:08x} at the destination)"
        for block, (sent, arrived) in list(blocks.items())[:NAMED]
    ]
    more = len(blocks) - len(some)
    return ", ".join(some) + (f", and {more} more" if more else "")
