"""A peer's claim of a lease of blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiodatadist.values.digests import UNSAID, LeaseDigests, Refusal


class PeerClaim:
    """A peer that pulls, or wants to.

    Args:
        peer, call: its link, and its number for this.
        seconds: that its pull may take; the owner's limit, from when that is known and less.
        answer: is told whether the blocks are kept for it.
        takers: peers that share the blocks.
        is_limited: it can be told that they are not kept as long as it asked.
        digests: of the blocks that it was told of, and of its prompt.

    Attributes:
        why: set before the answer if the digests are not the lease's.
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
        self.peer, self.call, self.seconds, self.answer, self.takers = peer, call, seconds, answer, takers
        self.is_limited = is_limited
        self.digests = digests
        self.why: Refusal | None = None
        self.timer: asyncio.TimerHandle | None = None

    def within(self, seconds: float, then: Callable[[], object]) -> None:
        """``then`` is called after so long, unless it is settled, or there is another limit."""
        self.settled()
        self.timer = asyncio.get_running_loop().call_later(seconds, then)

    def settled(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
