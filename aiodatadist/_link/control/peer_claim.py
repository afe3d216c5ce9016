"""A peer's claim of a lease of blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiodatadist._values.digests import UNSAID, LeaseDigests, Refusal


class PeerClaim:
    """The claim of a peer that pulls leased blocks, or is about to.

    Args:
        peer: the link to the peer.
        call: the peer's number for the claim.
        seconds: how long the pull may take. If the owner's limit is less, the lease sets it once it accepts the claim.
        answer: called with True if the blocks are kept for the peer, otherwise with False.
        takers: the number of peers that share the blocks.
        is_limited: True if the peer's version can be told that the blocks are kept for less time than it asked.
        digests: digests of the blocks that the peer was told of, and of its prompt.

    Attributes:
        why: the reason if the digests are not the lease's, set before the answer; otherwise None.
    """

    def __init__(
        self,
        peer: object,
        call: int,
        seconds: float,
        answer: Callable[[bool], object],
        takers: int = 1,
        is_limited: bool = True,
        digests: LeaseDigests = UNSAID,
    ) -> None:
        self.peer: object = peer
        self.call: int = call
        self.seconds: float = seconds
        self.answer: Callable[[bool], object] = answer
        self.takers: int = takers
        self.is_limited = is_limited
        self.digests = digests
        self.why: Refusal | None = None
        self.timer: asyncio.TimerHandle | None = None

    def within(self, seconds: float, then: Callable[[], object]) -> None:
        """Call ``then`` after ``seconds``, unless the claim is settled or gets another limit first."""
        self.settled()
        self.timer = asyncio.get_running_loop().call_later(seconds, then)

    def settled(self) -> None:
        """Stop the timer: the claim has ended, or no longer waits."""
        if self.timer is not None:
            self.timer.cancel()
