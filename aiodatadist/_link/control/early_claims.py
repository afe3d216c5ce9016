"""Claims and releases of leases that do not exist yet. Each peer has its own share of the room.

Everything is found by key, so a message costs the same however many came before it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from aiodatadist._link.control.peer_claim import PeerClaim
from aiodatadist._values import peer_budget

Known = TypeVar("Known", bound=Hashable)


class EarlyClaims:
    """The claims that wait for their lease. ``len()`` is their number.

    Args:
        most: the largest number of claims of one peer.
    """

    def __init__(self, most: int = peer_budget.EARLY_CLAIMS) -> None:
        self._most = most
        self._claims: dict[object, OrderedDict[int, tuple[str, PeerClaim]]] = {}  # by peer and number
        self._by_name: dict[str, dict[PeerClaim, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._claims.values()))

    def is_known(self, claim: PeerClaim) -> bool:
        """Return True if a claim of the same peer and number waits."""
        return claim.call in self._claims.get(claim.peer, ())

    def make_room(self, peer: object) -> PeerClaim | None:
        """Forget the peer's oldest claim if its share is full, and return that claim for the caller to answer."""
        claims = self._claims.get(peer)
        if claims is None or len(claims) < self._most:
            return None
        call, (_, oldest) = next(iter(claims.items()))
        self.drop(peer, call)
        return oldest

    def add(self, name: str, claim: PeerClaim, patience: float) -> None:
        """Keep a claim for ``patience`` seconds, at most ``EARLY_CLAIM_SECONDS``; then answer that there is no lease."""

        def too_early() -> None:
            self.drop(claim.peer, claim.call)
            claim.answer(False)

        self._claims.setdefault(claim.peer, OrderedDict())[claim.call] = name, claim
        self._by_name.setdefault(name, {})[claim] = None
        claim.within(min(patience, peer_budget.EARLY_CLAIM_SECONDS), too_early)

    def take(self, name: str) -> list[PeerClaim]:
        """Remove and return the claims that wait for a lease of this name, in the order in which they came."""
        claims = list(self._by_name.get(name, ()))
        for claim in claims:
            self.drop(claim.peer, claim.call)
        return claims

    def drop(self, peer: object, call: int) -> None:
        """Forget a claim, if there is one, without an answer."""
        claims = self._claims.get(peer)
        if claims is None or call not in claims:
            return
        name, claim = claims.pop(call)
        claim.settled()
        if not claims:
            del self._claims[peer]
        del self._by_name[name][claim]
        if not self._by_name[name]:
            del self._by_name[name]

    def peer_gone(self, peer: object) -> None:
        """Forget the claims of a peer whose link has ended."""
        for call in list(self._claims.get(peer, ())):
            self.drop(peer, call)

    def end(self) -> None:
        """Forget all claims, without an answer."""
        for peer in list(self._claims):
            self.peer_gone(peer)


class ReleasedNames(Generic[Known]):
    """The leases that peers released before they existed. ``len()`` is their number.

    The youngest ones of each linked peer are kept, and the youngest ``RELEASED_BY_GONE`` of all other peers together.

    Args:
        most: the largest number for one linked peer.
    """

    def __init__(self, most: int = peer_budget.RELEASED_NAMES) -> None:
        self._most = most
        self._of_peers: dict[object, OrderedDict[Known, None]] = {}  # None: of those that are no longer linked
        self._times: Counter[Known] = Counter()  # how many peers released it

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, known: Known) -> bool:
        return known in self._times

    def add(self, peer: object, known: Known) -> None:
        """Remember that a peer released a lease. None stands for the peers that are no longer linked."""
        names = self._of_peers.setdefault(peer, OrderedDict())
        if known not in names:
            names[known] = None
            self._times[known] += 1
        if len(names) > (peer_budget.RELEASED_BY_GONE if peer is None else self._most):
            self._forget(names.popitem(last=False)[0])

    def _forget(self, known: Known) -> None:
        self._times[known] -= 1
        if not self._times[known]:
            del self._times[known]

    def peer_gone(self, peer: object) -> None:
        """Move what a peer released to the share of those that are no longer linked."""
        for known in self._of_peers.pop(peer, ()):
            self.add(None, known)
            self._forget(known)
