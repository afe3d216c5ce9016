"""Checksums: those of the source are compared with those of the destination, to find damaged bytes.

In one-sided mode the end that moved the bytes asks the other end for checksums once the bytes have arrived::

    puller, or pusher                            owner of the other cache
    the bytes have arrived
    digest: these pieces of your cache     ->    computes the checksums of what is there now
    computes those of its own side meanwhile
                                           <-    digests

In request/response mode the end that wrote sends the checksums of what it read with its answer, before a key is consumed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio

from aiodatadist._link.control.questions import Answer
from aiodatadist._link.data.remote_operation import TransferSpec
from aiodatadist._link.transfers.responder import status_error
from aiodatadist._values.grid import Grid, Side
from aiodatadist._wire.messages import MAX_INDEXES, MAX_SECONDS, PLAIN_PROTOCOL, Digest, Digests, Stop
from aiodatadist.errors import (
    DataCorrupted,
    FeatureNotEnabled,
    IncompatiblePeer,
    LLMStatusCode,
    TransferTimeout,
)

if TYPE_CHECKING:
    from aiodatadist._cache.catalogue import RemoteCache
    from aiodatadist._cache.table import Entry
    from aiodatadist._link.session import Session
    from aiodatadist._values.selection import Geometry

AT_A_TIME = 16
"""The number of a link's transfers that are compared at a time. The time limit of a comparison starts when its turn comes."""
FAILURE_CAUSES = ("checksum",)
"""Causes of failed transfers that their status does not tell."""
NAMED = 8
"""The most damaged blocks that a message names."""


def check_peer(minor: int, me: int, peer: int) -> None:
    """Raise IncompatiblePeer if the peer is too old for a link on which every transfer is checked."""
    if minor < Digest.since:
        raise IncompatiblePeer(
            f"transfer_checksum is on at cluster {me}, and {_too_old(peer, minor)}",
            hint="update that cluster, or switch transfer_checksum off",
        )


def _too_old(peer: int, minor: int) -> str:
    return (
        f"cluster {peer} knows no checksums: its protocol has version {PLAIN_PROTOCOL}.{minor}, and they came with "
        f"{PLAIN_PROTOCOL}.{Digest.since}"
    )


class Checks:
    """The comparisons of one link."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._turns = anyio.Semaphore(AT_A_TIME)

    def want_peer(self) -> None:
        """Raise FeatureNotEnabled if the peer is too old to be asked for checksums."""
        session = self._session
        if session.peer_minor < Digest.since:
            raise FeatureNotEnabled(
                _too_old(session.cluster_id, session.peer_minor),
                peer=session.cluster_id,
                hint="update that cluster, or transfer without checksum",
            )

    # ---- without a task ----

    def take_turn(self) -> bool:
        """Take a turn for a comparison, which :meth:`end_turn` ends. Return False if it must wait for one."""
        try:
            self._turns.acquire_nowait()
        except anyio.WouldBlock:
            return False
        return True

    def end_turn(self) -> None:
        """End a turn."""
        self._turns.release()

    def question(self, spec: TransferSpec, remote: RemoteCache, side: Side) -> Callable[[int], Digest]:
        """Return a function that makes the question about the peer's side, given the question's number."""
        layers = spec.selection.layers
        tensors = layers.of_source(remote) if spec.direction == "get" else layers.of_target(remote)
        return _question(remote, tensors, spec.seconds, side)

    def judge_answer(
        self, spec: TransferSpec, remote: RemoteCache, grid: Grid, mine: array[int], answer: Answer | None
    ) -> None:
        """Compare this end's checksums with the peer's answer. Raises what :meth:`compare` raises."""
        theirs = array("I", self._sums_of(answer))
        sums = (theirs, mine) if spec.direction == "get" else (mine, theirs)
        target: Geometry = remote if spec.direction == "put" else spec.entry
        self._judge(target, grid.local_side, *sums, has_parts=spec.selection.parts is not None)

    # ---- in a task ----

    async def compare(self, spec: TransferSpec, remote: RemoteCache, grid: Grid) -> None:
        """Compare what has arrived with what was sent, for a transfer that this end carried out.

        Raises:
            DataCorrupted: if they differ.
            TransferTimeout: if an end took too long to compute its checksums. The bytes may be intact.
            LLMException: if an end could not compute its checksums.
        """
        mine = theirs = array("I")
        async with self._turns:
            with anyio.move_on_after(spec.seconds) as limit:
                mine, theirs = await self._both(spec, remote, grid)
        if limit.cancelled_caught:
            raise self.too_slow(spec.seconds)
        sums = (theirs, mine) if spec.direction == "get" else (mine, theirs)
        target: Geometry = remote if spec.direction == "put" else spec.entry
        self._judge(target, grid.local_side, *sums, has_parts=spec.selection.parts is not None)

    async def compare_layer(self, name: str, entry: Entry, remote: RemoteCache, grid: Grid, seconds: float) -> None:
        """Compare a layer that has arrived in the peer's cache with this end's, which is the local side of the grid.

        The addresses of the remote side say where in that cache the tensors are. Raises what :meth:`compare` raises.

        Args:
            name: names the layer in the error.
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
            raise self.too_slow(seconds)
        self._judge(remote, grid.remote_side, mine, theirs, name=f"{name}: ")

    async def compare_answer(self, spec: TransferSpec, side: Side, sent: Sequence[int]) -> None:
        """Compare what the peer wrote with the checksums that it ``sent``. Raises what :meth:`compare` raises."""
        arrived = array("I")
        async with self._turns:
            with anyio.move_on_after(spec.seconds) as limit:
                arrived = await self._session.host.digester.digests(spec.entry, side, self._session.cluster_id)
        if limit.cancelled_caught:
            raise self.too_slow(spec.seconds)
        self._judge(spec.entry, side, array("I", sent), arrived, has_parts=spec.selection.parts is not None)

    def too_slow(self, seconds: float) -> TransferTimeout:
        """Return the error of a comparison that took longer than ``seconds``."""
        return TransferTimeout(
            f"the bytes have arrived, but their checksums were not compared within {seconds:g} s",
            peer=self._session.cluster_id,
        )

    async def _both(self, spec: TransferSpec, remote: RemoteCache, grid: Grid) -> tuple[array[int], array[int]]:
        """Return the checksums of this end's side and of the peer's, which are computed at the same time."""
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
        """Compute the checksums of both sides, and append them to ``mine`` and ``theirs``.

        The blocks are taken in portions. Each is small enough for one question, and for the bytes that the peer sums up for
        one link at a time.

        Args:
            what: the peer's cache, and the pieces at this end and at the peer.
        """
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
                mine = await session.host.digester.digests(entry, side, session.cluster_id)
                await question.answered.wait()
            finally:
                # cancelled or late: the peer need not sum up any further
                if question.answer is None and session.is_open:
                    session.post(Stop(call=question.number))
        return mine, self._sums_of(question.answer)

    def _sums_of(self, answer: Answer | None) -> list[int]:
        """Return the checksums of an answer. Raises LLMException if the peer has none."""
        name = f"cluster {self._session.cluster_id}"
        if not isinstance(answer, Digests):
            raise FeatureNotEnabled(
                f"the bytes have arrived, but {name} refuses to be asked for checksums",
                hint="update that cluster, or transfer without checksum",
            )
        if answer.status != LLMStatusCode.LLM_SUCCESS:
            raise status_error(answer, f"the bytes have arrived, but {name} has no checksums: ")
        return answer.checksums

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
        """Raise DataCorrupted if some of the bytes are not what was sent.

        Args:
            side: the pieces of the destination, in ``target``. A block may occur several times, each time with some of the
                tensors.
        """
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
        # One checksum for each block, in the order of the call: all before the first wrong one are intact. Parts of a block
        # have several.
        if not name and not has_parts:
            error.landed_blocks = wrong[0]
        raise error


def _neighbours(remote: RemoteCache, side: Side) -> Iterator[range]:
    """Yield the tensors of a side in portions that follow each other in the cache, at the same offset."""
    first, place = 0, (-1, -1)
    for i, address in enumerate(side.addresses):
        tensor = remote.tensor_at(address)
        before, place = place, (tensor, address - remote.addresses[tensor])
        if i and place != (before[0] + 1, before[1]):
            yield range(first, i)
            first = i
    yield range(first, len(side.addresses))


def _question(remote: RemoteCache, tensors: range, seconds: float, side: Side) -> Callable[[int], Digest]:
    """Return a function that makes the question about these tensors of the peer's cache, given the question's number."""
    message = partial(
        Digest.checked,
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
