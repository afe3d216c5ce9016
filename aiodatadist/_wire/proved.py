"""The credential with which the two ends of a connection have proved themselves, and what it says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiodatadist._config.trust import Key
from aiodatadist._wire.messages import Hello


@dataclass(frozen=True)
class Proved:
    """The credential of a link.

    Attributes:
        credential: the name of the key, or the name in the peer's certificate that stands for the peer.
        heartbeats: the key of the second connection, for this link's heartbeats. It has the link's name.
        key_hash: a hash of the key, which tells it from another one of its name; empty if it is none of this end's own keys.
        expires: the time at which the peer's certificate expires, in seconds since the epoch; None for a key.
    """

    credential: str
    heartbeats: Key
    expires: float | None = None
    key_hash: bytes = b""

    @property
    def by_key(self) -> bool:
        """True if the peer has proved a key, and no certificate."""
        return self.expires is None


Vouch = Callable[[Hello, Hello], Proved]
"""Returns a peer's credential, from its hello and this end's. Raises IncompatiblePeer if the hello contradicts the proof."""
