"""What peers dropped before this engine named it: each peer has its own share, and everything is found by key. No I/O."""

from __future__ import annotations

from collections import OrderedDict

from aiodatadist.adapters.push_messages import TransferKey
from aiodatadist.values import peer_budget


class DroppedTransfers:
    """How they ended, by peer. Of each peer the youngest ``DROPPED_NAMES`` are kept, and of all peers that are gone together
    the youngest ``DROPPED_BY_GONE``. ``len()`` is how many."""

    def __init__(self) -> None:
        self._of_peers: dict[int | None, OrderedDict[TransferKey, str]] = {}  # None: of those gone
        self._peers_of: dict[TransferKey, dict[int | None, None]] = {}

    def __len__(self) -> int:
        return len(self._peers_of)

    def add(self, peer: int | None, key: TransferKey, how: str) -> None:
        """``peer``: None if its link is over."""
        theirs = self._of_peers.setdefault(peer, OrderedDict())
        theirs[key] = how
        theirs.move_to_end(key)
        self._peers_of.setdefault(key, {})[peer] = None
        if len(theirs) > (peer_budget.DROPPED_BY_GONE if peer is None else peer_budget.DROPPED_NAMES):
            self._forget(peer, theirs.popitem(last=False)[0])

    def take(self, key: TransferKey) -> str | None:
        """Forget a transfer, and return how it ended; None if no peer dropped it."""
        how = None
        for peer in self._peers_of.pop(key, ()):
            theirs = self._of_peers[peer]
            how = theirs.pop(key)
            if not theirs:
                del self._of_peers[peer]
        return how

    def peer_gone(self, peer: int) -> None:
        """Keep its transfers among those of peers that are gone."""
        for key, how in self._of_peers.pop(peer, OrderedDict()).items():
            self._forget(peer, key)
            self.add(None, key, how)

    def _forget(self, peer: int | None, key: TransferKey) -> None:
        peers = self._peers_of[key]
        del peers[peer]
        if not peers:
            del self._peers_of[key]
