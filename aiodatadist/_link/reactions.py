"""Reactions: what this end does, without waiting, about each message of a ready link. One table has them all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiodatadist._concurrency.alarms import Alarms
from aiodatadist._counting import Incident
from aiodatadist._link.control.block_leases import LeaseEnd
from aiodatadist._link.control.peer_claim import PeerClaim
from aiodatadist._link.control.served_requests import KNOWN
from aiodatadist._link.lifecycle import LinkState
from aiodatadist._values.digests import LeaseDigests, Refusal
from aiodatadist._wire.frames import Unknown
from aiodatadist._wire.messages import (
    DIGESTS_SINCE,
    PLAIN_PROTOCOL,
    Broken,
    Claim,
    Claimed,
    Digest,
    Digests,
    Found,
    Grant,
    Landed,
    Lookup,
    Message,
    Note,
    Outdated,
    Own,
    Owned,
    Ping,
    Pong,
    Pull,
    Pulled,
    Renew,
    Renewed,
    Retire,
    Revoke,
    Revoked,
    Stop,
    Taken,
    Unclaim,
    Unsupported,
    Watch,
)

if TYPE_CHECKING:
    from aiodatadist._cache.catalogue import RemoteCache
    from aiodatadist._link.control.notifications import IncomingNotifications
    from aiodatadist._link.control.questions import Answer, Question
    from aiodatadist._link.ownership import Owners
    from aiodatadist._link.session import Session
    from aiodatadist._link.transfers.transfers import Transfers

logger = logging.getLogger(__name__)


class _Withdrawal:
    """A cache that the peer revokes, and this end may still use. It has no task, because a peer may have thousands.

    Attributes:
        cache_id: the number of the cache.
        number: the number of the revocation.
        remote: the cache; None if this end does not know it.
        alarm: the number of the alarm at which transfers that still use the cache are stopped; 0 if there is none.
    """

    __slots__ = ("alarm", "cache_id", "number", "remote")

    def __init__(self, cache_id: int, number: int, remote: RemoteCache | None) -> None:
        self.cache_id = cache_id
        self.number = number
        self.remote = remote
        self.alarm = 0


AT_ONCE = Lookup, Found, Pull, Pulled, Digest, Digests
"""Messages that a transfer waits for."""


class Reactions:
    """The reactions of one link to what its peer says."""

    def __init__(
        self,
        session: Session,
        owners: Owners,
        transfers: Transfers,
        incoming: IncomingNotifications,
    ) -> None:
        self.session = session
        self.owners = owners
        self.responder = transfers.responder
        self.incoming = incoming
        self._transfers = transfers
        self._given_back: dict[int, None] = {}  # numbers of the peer's latest revocations
        self._withdrawing: dict[int, _Withdrawal] = {}  # by cache
        self._alarms = Alarms(self._take_back)

    def at_once(self, message: Message | Unknown) -> bool:
        """React to a message that a transfer waits for, if no task is needed. Return False if it is another message."""
        if self.session.life.state is not LinkState.READY or not isinstance(message, AT_ONCE):
            return False
        REACTIONS[type(message)](self, message)
        return True

    def on_claim(self, message: Claim) -> None:
        """Keep blocks for the peer, if they can be kept, and tell it."""
        session = self.session

        def answer(is_kept: bool) -> None:
            if session.is_open:
                seconds = claim.seconds if is_kept and claim.seconds < message.seconds else 0.0
                session.post(Claimed(call=message.call, kept=is_kept, seconds=seconds, why=claim.why or ""))

        leases = self.session.host.block_leases
        digests = LeaseDigests(message.blocks_digest, message.prompt_digest)
        claim = PeerClaim(
            session, message.call, message.seconds, answer, message.takers, session.peer_minor >= 1, digests=digests
        )
        if not session.rights.claim:
            session.lacks_right("claim", "its claim of a lease is refused")
            claim.why = Refusal.NO_RIGHT
            leases.count(claim.why)
            answer(False)
            return
        if session.peer_minor < DIGESTS_SINCE:
            leases.warn_of(session.cluster_id, f"{PLAIN_PROTOCOL}.{session.peer_minor}")
        leases.claim(message.lease, claim, message.patience)

    def on_unclaim(self, message: Unclaim) -> None:
        """End the peer's claim. A peer that may not claim ends no lease either."""
        if not self.session.rights.claim:
            return
        why = None if message.end == "failed" else LeaseEnd(message.end)
        digests = LeaseDigests(message.blocks_digest, message.prompt_digest)
        self.session.host.block_leases.unclaim(self.session, message.call, message.lease, why, digests)

    def on_answer(self, message: Answer) -> None:
        """Settle the question.

        Caches are learnt at once, in the order in which the peer speaks: its next message may take one back.
        """
        question = self.session.questions.find(message)
        if question is not None and question.answer is None:  # the first one counts
            if isinstance(message, Found) and message.cache is not None:
                self._learn(question, message)
            question.settle(message)
        else:  # a repeated answer, or one that is no longer awaited
            self.session.totals.answers_late += 1

    def on_owned(self, message: Owned) -> None:
        """Settle the question, and note who owns the link."""
        question = self.session.questions.find(message)
        self.owners.on_owned(message, question is not None)
        if question is not None and question.answer is None:
            question.settle(message)

    def on_pulled(self, message: Pulled) -> None:
        """Settle the question of each request that the message answers."""
        for each in message.each():
            self.on_answer(each)

    def on_unsupported(self, message: Unsupported) -> None:
        """Fail the question, if there is one: the peer's version is older than the message that it does not know."""
        session = self.session
        if not session.questions.refused(message.call):
            told = "cluster %d does not know %r: it is of an older version", session.cluster_id, message.kind
            session.incidents.add(Incident.PEER_OUTDATED, logger, *told)

    def _learn(self, question: Question, found: Found) -> None:
        """Remember a cache, unless the peer has revoked it since it sent the answer. Transfers that need it ask again."""
        cache = found.cache
        if cache is not None and not self.session.questions.is_revoked_since(question, cache.cache_id):
            self.session.catalogue.learn(cache, question.name, found.slot, found.access)

    def on_revoke(self, message: Revoke) -> None:
        """Forget a cache that the peer revokes, and answer once no transfer of this end uses it.

        If the peer repeats the message, only the answer is repeated: the peer may have told of the cache again since.
        """
        session = self.session
        session.share.inflow.revoked()
        if message.number in self._given_back:
            session.post(Revoked(cache_id=message.cache_id, number=message.number))
        if message.cache_id in self._withdrawing or message.number in self._given_back:
            return
        session.questions.revoked(message.cache_id)
        remote = session.catalogue.withdraw(message.cache_id)
        if remote is not None:
            self._transfers.withdrawn(remote)
        withdrawal = _Withdrawal(message.cache_id, message.number, remote)
        self._withdrawing[message.cache_id] = withdrawal
        if remote is not None and remote.uses:
            withdrawal.alarm = self._alarms.set(asyncio.get_running_loop().time() + message.seconds, withdrawal)
            remote.when_idle(partial(self._idle, withdrawal))
        else:
            self._idle(withdrawal)

    def _take_back(self, withdrawal: _Withdrawal) -> None:
        """Stop the transfers that still use the cache."""
        if withdrawal.remote is not None:
            self._transfers.take_back(withdrawal.remote)

    def _idle(self, withdrawal: _Withdrawal) -> None:
        """Answer, unless a transfer that had found the cache before the revocation has begun to use it."""
        cache_id, number, remote = withdrawal.cache_id, withdrawal.number, withdrawal.remote
        self._take_back(withdrawal)
        if remote is not None and remote.uses:
            remote.when_idle(partial(self._idle, withdrawal))
            return
        self._alarms.drop(withdrawal.alarm)
        self._withdrawing.pop(cache_id, None)
        if number:
            self._given_back[number] = None
            if len(self._given_back) > KNOWN:
                del self._given_back[next(iter(self._given_back))]
        self.session.post_if_open(Revoked(cache_id=cache_id, number=number))

    def end(self) -> None:
        """Forget the revocations and early notifications, because the link has ended."""
        self.incoming.end()
        for withdrawal in self._withdrawing.values():
            self._alarms.drop(withdrawal.alarm)
        self._withdrawing.clear()


REACTIONS: dict[type, Callable[[Reactions, Any], object]] = {
    Lookup: lambda here, message: here.responder.find(message),
    Found: lambda here, message: here.on_answer(message),
    Pulled: lambda here, message: here.on_pulled(message),
    Pong: lambda here, message: here.on_answer(message),
    Own: lambda here, message: here.owners.on_own(message),
    Owned: lambda here, message: here.on_owned(message),
    Claim: lambda here, message: here.on_claim(message),
    Claimed: lambda here, message: here.on_answer(message),
    Digest: lambda here, message: here.responder.checksums.ask(message),
    Digests: lambda here, message: here.on_answer(message),
    Unclaim: lambda here, message: here.on_unclaim(message),
    Grant: lambda here, message: here.session.catalogue.learn(message.cache, access=message.access),
    Revoke: lambda here, message: here.on_revoke(message),
    Revoked: lambda here, message: here.session.peer_leases.on_revoked(message.cache_id, message.number),
    Pull: lambda here, message: here.responder.begin_each(message),
    Stop: lambda here, message: here.responder.stop(message.call),
    Note: lambda here, message: here.incoming.on_note(message),
    Watch: lambda here, message: here.session.layer_events.on_watch(message),
    Landed: lambda here, message: here.session.layer_events.on_landed(message),
    Taken: lambda here, message: here.session.notification_queue.on_taken(message),
    Ping: lambda here, message: here.session.post(Pong(call=message.call)),
    Renew: lambda here, message: here.session.channels.on_renew(message),
    Renewed: lambda here, message: here.session.channels.on_renewed(message),
    Retire: lambda here, message: here.session.channels.on_retire(message),
    Broken: lambda here, message: here.session.channels.on_broken(message),
    Outdated: lambda here, message: here.session.channels.on_outdated(message),
    Unknown: lambda here, message: here.session.post(Unsupported(kind=message.type, call=message.call)),
    Unsupported: lambda here, message: here.on_unsupported(message),
}
