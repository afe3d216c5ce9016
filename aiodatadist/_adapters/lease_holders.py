"""The requests of other engines that want the blocks of one lease. Pure: an owner asks it when a lease may end.

Requests that wait hold the lease. The owner said how many may take the blocks, and each of them lets go at its end,
whatever that is. If the other engine has several workers that pull from one of the owner's, each of them lets go of a
share.
"""

from __future__ import annotations

from collections.abc import Hashable
from fractions import Fraction


class LeaseHolders:
    """The holders of one lease, each by its peer and the peer's number for the request.

    Args:
        takers: the number of requests that may take the blocks. A peer can have as many holders, and no more.
    """

    def __init__(self, takers: int) -> None:
        self._takers = takers
        self._holding: dict[tuple[Hashable, int], None] = {}
        self._gone: dict[tuple[Hashable, int], Fraction] = {}
        self._by_peer: dict[Hashable, int] = {}
        self.has_taken: bool = False

    def hold(self, peer: Hashable, holder: int) -> bool:
        """Note that a request waits. Return False if it has let go before, or its peer has too many."""
        key = peer, holder
        if key in self._holding:
            return True
        if not self._has_room(key):
            return False
        self._holding[key] = None
        return True

    def let_go(self, peer: Hashable, holder: int, share: int, *, has_taken: bool) -> bool:
        """Note the end of a request, or of one of the ``share`` workers that name it.

        Return True if all that may take the blocks have let go with it: once, whatever is said afterwards.
        """
        key, was_over = (peer, holder), self.is_over
        if key in self._gone or not (key in self._holding or self._has_room(key)):
            return False
        self._holding.pop(key, None)
        self._gone[key] = Fraction(1, share)
        self.has_taken |= has_taken
        return self.is_over and not was_over

    def _has_room(self, key: tuple[Hashable, int]) -> bool:
        """Count a new holder of a peer, if the peer may have another one."""
        count = self._by_peer.get(key[0], 0)
        if key in self._gone or count >= self._takers:
            return False
        self._by_peer[key[0]] = count + 1
        return True

    def lost(self, peer: Hashable) -> bool:
        """Note that a peer is gone. Return True if its requests were the last ones that waited."""
        mine = [key for key in self._holding if key[0] == peer]
        for key in mine:
            del self._holding[key]
        return bool(mine) and self.are_none

    @property
    def are_none(self) -> bool:
        """True if no request waits."""
        return not self._holding

    @property
    def is_over(self) -> bool:
        """True if all requests that may take the blocks have let go."""
        return sum(self._gone.values()) >= self._takers
