"""Checksums that a peer asks for: of the caches that this end told it of, for several questions in turn."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from aiodatadist._concurrency.fair_queue import FairQueue
from aiodatadist._concurrency.scope import Scope
from aiodatadist._values.grid import Side
from aiodatadist._wire.messages import Digest, Digests
from aiodatadist._wire.reasons import reason_of, status_of
from aiodatadist.errors import (
    CacheNotFound,
    LLMException,
    LLMStatusCode,
    ParamInvalid,
    ProtocolError,
    TransferError,
    TransferTimeout,
)

if TYPE_CHECKING:
    from aiodatadist._cache.table import Entry
    from aiodatadist._link.session import Session

MAX_DIGESTED = 64
"""The most questions of one peer for checksums. Each may name as many blocks as a request, and costs memory and CPU time."""


class AskedChecksums:
    """The questions for checksums of one peer. They are none of its requests, and take no turn from those."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._quotas = session.host.peer_shares.quotas
        self._under_way: dict[int, Scope] = {}
        self._summing = 0  # bytes that are being summed, for all questions
        self._to_sum = FairQueue()

    def ask(self, message: Digest) -> None:
        """Answer a question for checksums, once if it comes twice.

        This works also while the link is being ended, because the peer's transfers end first.
        """
        if len(self._under_way) >= MAX_DIGESTED:
            raise ProtocolError(f"{MAX_DIGESTED} questions for checksums are under way")
        if message.call in self._under_way:
            return
        answer = self._answer_now(message)
        if answer is None:
            self._session.spawn(self._sum_up(message))
        else:
            self._session.post(answer)

    def _answer_now(self, message: Digest) -> Digests | None:
        """Return the answer if it takes neither a task nor anything that others wait for, otherwise None."""
        session = self._session
        entry = session.peer_leases.held(message.cache_id)
        if entry is None or self._summing:
            return None
        try:
            side = self._side_for_peer(message, entry)
        except LLMException as error:
            return _undigested(message.call, error)
        digester = session.host.digester
        if not digester.is_at_hand(entry, side):
            return None
        sums = digester.digests_now(side)
        return Digests.checked(call=message.call, status=int(LLMStatusCode.LLM_SUCCESS), checksums=sums.tolist())

    def stop(self, call: int) -> bool:
        """Stop a question that the peer gives up. Return False if none of this number is under way."""
        scope = self._under_way.get(call)
        if scope is not None:
            scope.cancel()
        return scope is not None

    def _take(self, nbytes: int) -> bool | None:
        """Count bytes that are summed up from now on, and return True.

        Return None if there is no room for them beside earlier questions of this peer. A question that is alone always has
        room.
        """
        limit = self._quotas.checksum_caches * self._session.peer_leases.held_bytes
        if self._summing and self._summing + nbytes > limit:
            return None
        self._summing += nbytes
        return True

    def _sum_up(self, message: Digest) -> Callable[[], Coroutine[Any, Any, None]]:
        scope = self._under_way[message.call] = Scope()
        # before the task runs: the peer's next message may release the cache
        entry = self._session.peer_leases.held(message.cache_id)

        async def run() -> None:
            answer: Digests | None = None
            try:
                with scope:
                    answer = await self._digests(message, entry)
            finally:
                del self._under_way[message.call]
            self._session.post(answer or _undigested(message.call, TransferError("the question was stopped")))

        return run

    async def _digests(self, message: Digest, entry: Entry | None) -> Digests:
        try:
            if entry is None:
                raise CacheNotFound(f"cache {message.cache_id} was never announced, or has been revoked")
            side = self._side_for_peer(message, entry)
            entry.lease()
            try:
                sums = await self._sum_in_turn(message, entry, side)
            finally:
                entry.release()
        except LLMException as error:
            return _undigested(message.call, error)
        return Digests(call=message.call, status=int(LLMStatusCode.LLM_SUCCESS), checksums=sums)

    def _side_for_peer(self, message: Digest, entry: Entry) -> Side:
        """Return what is to be summed. Raises ParamInvalid if the peer may not know it, or it is not in the cache."""
        check_reader(self._session, entry)  # checksums of single bytes would tell what they are
        side = _side(message, entry)
        if not self._session.host.one_sided:  # otherwise the peer can read the slots itself
            check_key(self._session, entry, not entry.slots_of_others(self._session.cluster_id))
        return side

    async def _sum_in_turn(self, message: Digest, entry: Entry, side: Side) -> list[int]:
        """Compute checksums, as :meth:`of` does, when earlier questions of this peer leave room for the bytes."""
        nbytes = message.tensors * ((len(message.indexes) - 1) * message.nbytes + message.tail)
        deadline = anyio.current_time() + message.seconds
        try:
            await self._to_sum.take(partial(self._take, nbytes), deadline)
        except TimeoutError as error:
            raise _not_summed(message.seconds) from error
        try:
            return await self.of(entry, side, deadline - anyio.current_time())
        finally:
            self._summing -= nbytes
            self._to_sum.call()

    async def of(self, entry: Entry, side: Side, seconds: float) -> list[int]:
        """Return the checksums of a cache that the caller has leased.

        Raises LLMException if it cannot be read, and TransferTimeout if that takes longer than ``seconds``.
        """
        with anyio.move_on_after(seconds):
            return (await self._session.host.digester.digests(entry, side, self._session.cluster_id)).tolist()
        raise _not_summed(seconds)


def check_reader(session: Session, entry: Entry) -> None:
    """Raise ParamInvalid if the peer may not read a cache."""
    may_read, _ = session.may_use(entry)
    if not may_read:
        session.lacks_right("read", f"its request for cache {entry.cache_id} is refused")
        raise ParamInvalid(
            f"cluster {session.cluster_id} may not read cache {entry.cache_id}",
            hint="its owner's policy.json, or the cache's readers, must allow it",
        )


def check_key(session: Session, entry: Entry, is_for_peer: bool) -> None:
    """Raise ParamInvalid if what the peer asks for has a key for another cluster."""
    if not is_for_peer:
        session.lacks_right("read", f"its request for a key of cache {entry.cache_id} is refused")
        raise ParamInvalid("the key is for another cluster", hint="its owner bound it with for_cluster")


def _side(message: Digest, entry: Entry) -> Side:
    """Return where the pieces of a question are. Raises ParamInvalid if one of them is not in the cache."""
    first, stop = message.first_tensor, message.first_tensor + message.tensors
    if stop > len(entry.addresses):
        raise ParamInvalid(f"tensors {first} to {stop - 1}: cache {entry.cache_id} has {len(entry.addresses)}")
    if message.tail > message.nbytes:
        raise ParamInvalid(f"tail is {message.tail}: must be at most {message.nbytes}, the bytes of a piece")
    *others, last = message.indexes
    ends = [last * message.step + message.tail]
    if others:
        ends.append(max(others) * message.step + message.nbytes)
    end, limit = message.offset + max(ends), entry.pieces * entry.stride
    if end > limit:
        raise ParamInvalid(f"a piece ends at byte {end}: a tensor of cache {entry.cache_id} has {limit}")
    starts = array("Q", [address + message.offset for address in entry.addresses[first:stop]])
    return Side(starts, array("Q", message.indexes), message.step, message.nbytes, message.tail)


def _not_summed(seconds: float) -> TransferTimeout:
    return TransferTimeout(f"the checksums were not computed within {seconds:g} s")


def _undigested(call: int, error: LLMException) -> Digests:
    return Digests(call=call, status=status_of(error), reason=reason_of(error))
