"""The limit on waiting wants: each peer has its own share, and everything is found by key. No I/O.

A peer is a decode engine with all of its clients, and one of them can want what this engine never computes. So only
wants whose request is unknown count towards ``WANTS``, and the oldest of them gives way to the next one: an honest want
only needs to outlast the delay of its own request. A want whose request is known never gives way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from aiodatadist._config.quotas import Quotas
from aiodatadist._values import peer_budget
from aiodatadist._values.peer_budget import Budget

Asked = TypeVar("Asked", bound=Hashable)


@dataclass(slots=True)
class _Share(Generic[Asked]):
    """Numbers of blocks by want. ``waiting`` has those whose requests are unknown, the oldest first."""

    waiting: OrderedDict[Asked, int] = field(default_factory=OrderedDict)
    known: dict[Asked, int] = field(default_factory=dict)
    waiting_blocks: int = 0
    known_blocks: int = 0

    def excess(self, wants: int, blocks: int) -> Budget | None:
        """Return the limit that is exceeded; None if neither is."""
        if len(self.waiting) > wants:
            return Budget.WANTS
        return Budget.WANT_BLOCKS if self.waiting_blocks + self.known_blocks > blocks else None


class WantShares(Generic[Asked]):
    """The waiting wants of each peer. ``len()`` is the number of peers.

    Args:
        quotas: the limits; the defaults if it is None.
    """

    def __init__(self, quotas: Quotas | None = None) -> None:
        self._quotas = quotas
        self._shares: dict[int, _Share[Asked]] = {}

    def __len__(self) -> int:
        return len(self._shares)

    def limit(self, of: Budget) -> int:
        """Return the limit of a peer's wants, or of the block numbers in them."""
        if of is Budget.WANTS:
            return peer_budget.WANTS if self._quotas is None else self._quotas.wants
        return peer_budget.WANT_BLOCKS if self._quotas is None else self._quotas.want_blocks

    def fits(self, peer: int, asked: Asked | None, blocks: int) -> bool:
        """Return True if ``blocks`` more fit once all other wants that may give way have done so."""
        share = self._shares.get(peer)
        if share is not None:
            blocks += share.known_blocks + (0 if asked is None else share.waiting.get(asked, 0))
        return blocks <= self.limit(Budget.WANT_BLOCKS)

    def add(self, peer: int, asked: Asked, blocks: int, is_known: bool = False) -> dict[Asked, Budget]:
        """Count ``blocks`` more, which must fit, and return the wants that gave way for them, with the limit."""
        share = self._shares.setdefault(peer, _Share())
        if is_known:
            share.known[asked] = blocks
            share.known_blocks += blocks
        else:
            share.waiting[asked] = share.waiting.pop(asked, 0) + blocks  # moved to the end: it is the youngest
            share.waiting_blocks += blocks
        gone: dict[Asked, Budget] = {}
        limits = self.limit(Budget.WANTS), self.limit(Budget.WANT_BLOCKS)
        while (limit := share.excess(*limits)) is not None:
            oldest, numbers = share.waiting.popitem(last=False)
            share.waiting_blocks -= numbers
            gone[oldest] = limit
        return gone

    def is_known(self, peer: int, asked: Asked) -> None:
        """Note that the request of a want has come: the want no longer gives way."""
        share = self._shares.get(peer)
        if share is not None and asked in share.waiting:
            blocks = share.known[asked] = share.waiting.pop(asked)
            share.waiting_blocks -= blocks
            share.known_blocks += blocks

    def remove(self, peer: int, asked: Asked) -> None:
        """Forget what has ended, if it has not given way."""
        share = self._shares.get(peer)
        if share is None:
            return
        share.waiting_blocks -= share.waiting.pop(asked, 0)
        share.known_blocks -= share.known.pop(asked, 0)
        if not share.waiting and not share.known:
            del self._shares[peer]
