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
from collections.abc import Callable, Sequence
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
        self._judge(spec, remote if spec.direction == "put" else spec.entry, grid.local_side, *sums)

    async def compare_answer(self, spec: TransferSpec, side: Side, sent: Sequence[int]) -> None:
        """What the peer wrote, which says what it sent. Raises as :meth:`compare`."""
        arrived = array("I")
        async with self._turns:
            with anyio.move_on_after(spec.seconds) as limit:
                arrived = await self._session.digester.digests(spec.entry, side)
        if limit.cancelled_caught:
            raise self._too_slow(spec.seconds)
        self._judge(spec, spec.entry, side, array("I", sent), arrived)

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
        mine, theirs = array("I"), array("I")
        for first in range(0, len(here.index), MAX_INDEXES):
            question = _question(spec, remote, there.blocks(first, MAX_INDEXES))
            asked = await self._ask(question, spec, here.blocks(first, MAX_INDEXES))
            mine.extend(asked[0])
            theirs.extend(asked[1])
        return mine, theirs

    async def _ask(
        self, message: Callable[[int], Digest], spec: TransferSpec, side: Side
    ) -> tuple[array[int], list[int]]:
        session = self._session
        with session.questions.open(message, Digests, checksums=len(side.index)) as question:
            try:
                mine = await session.digester.digests(spec.entry, side)
                await question.answered.wait()
            finally:
                if question.answer is None and session.is_open:
                    session.post(Stop(call=question.number))
        answer = question.answer
        assert isinstance(answer, Digests)
        if answer.status != LLMStatusCode.LLM_SUCCESS:
            raise status_error(answer, f"the bytes have arrived, but cluster {session.cluster_id} has no checksums: ")
        return mine, answer.checksums

    def _judge(self, spec: TransferSpec, target: Geometry, side: Side, sent: array[int], arrived: array[int]) -> None:
        """``side``: of the destination, in ``target``. Raises DataCorrupted: some of it is not what was sent."""
        if sent == arrived:
            return
        wrong = [i for i, (a, b) in enumerate(zip(sent, arrived, strict=True)) if a != b]
        blocks: dict[int, tuple[int, int]] = {}
        for i in wrong:
            blocks.setdefault(side.index[i] * side.stride // target.stride, (sent[i], arrived[i]))
        self._session.count_failure(*FAILURE_CAUSES)
        error = DataCorrupted(
            f"{len(wrong)} of {len(sent)} pieces are not what was sent: {_named(blocks)}",
            peer=self._session.cluster_id,
            blocks=list(blocks),
            digests=list(blocks.values()),
            hint="transfer these blocks again",
        )
        if spec.selection.parts is None:
            error.landed_blocks = wrong[0]
        raise error


def _question(spec: TransferSpec, remote: RemoteCache, side: Side) -> Callable[[int], Digest]:
    """What the peer is asked about its cache, once that has a number."""
    layers = spec.selection.layers
    tensors = layers.of_source(remote) if spec.direction == "get" else layers.of_target(remote)
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
        seconds=min(spec.seconds, MAX_SECONDS),
    )
    return lambda call: message(call=call)


def _named(blocks: dict[int, tuple[int, int]]) -> str:
    some = [
        f"block {block} (CRC-32C {sent:08x} at the source, {arrived:08x} at the destination)"
        for block, (sent, arrived) in list(blocks.items())[:NAMED]
    ]
    more = len(blocks) - len(some)
    return ", ".join(some) + (f", and {more} more" if more else "")
