"""Transfers that peers dropped before this engine named them: each peer has its own share, found by key. No I/O."""

from __future__ import annotations

from collections import OrderedDict

from aiodatadist._adapters.push_messages import TransferKey
from aiodatadist._values import peer_budget


class DroppedTransfers:
    """The outcome of dropped transfers, by peer. ``len()`` is their number.

    For each peer the youngest ``DROPPED_NAMES`` are kept, and for all lost peers together the youngest
    ``DROPPED_BY_GONE``.
    """

    def __init__(self) -> None:
        self._of_peers: dict[int | None, OrderedDict[TransferKey, str]] = {}  # None: all lost peers
        self._peers_of: dict[TransferKey, dict[int | None, None]] = {}

    def __len__(self) -> int:
        return len(self._peers_of)

    def add(self, peer: int | None, key: TransferKey, how: str) -> None:
        """Add a transfer. ``peer`` is None if its link has ended."""
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
        """Move a peer's transfers to those of lost peers."""
        for key, how in self._of_peers.pop(peer, OrderedDict()).items():
            self._forget(peer, key)
            self.add(None, key, how)

    def _forget(self, peer: int | None, key: TransferKey) -> None:
        peers = self._peers_of[key]
        del peers[peer]
        if not peers:
            del self._peers_of[key]
