"""Seals of messages: a counter and a keyed BLAKE2b behind each one. Without the key, none can be added or changed.

A counter is accepted once. So a repeated message is recognised, and one that comes late is not mistaken for it.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from enum import Enum
from hashlib import blake2b
from typing import Final

SEAL_BYTES: Final = 16
COUNTER: Final = struct.Struct(">Q")
TRAILER: Final = COUNTER.size + SEAL_BYTES
"""Bytes behind the content of a sealed message."""
WINDOW: Final = 1024
"""Counters behind the highest one that are still accepted, each once."""
_MASK: Final = (1 << WINDOW) - 1


class ByTls(Enum):
    """The place of a sealer or an opener on a connection over TLS, which seals all bytes itself."""

    SEALED = "sealed by TLS"


class Sealer:
    """Seals what this end sends. Each counter is used once."""

    def __init__(self, key: bytes) -> None:
        self._keyed = blake2b(key=key, digest_size=SEAL_BYTES)  # copied for each message, which saves reading the key
        self._next = 0

    def sealed(self, data: bytes) -> bytes:
        """Return these bytes with a counter and the seal behind them."""
        counted = data + COUNTER.pack(self._next)
        self._next += 1
        seal = self._keyed.copy()
        seal.update(counted)
        return counted + seal.digest()


class Opener:
    """Checks the seals of what the peer sends.

    Attributes:
        due: the counter that comes next, unless a message is missing or repeated.
        on_repeated: called for each message that must be ignored. Its counter was accepted before, or is too old to tell.
    """

    def __init__(self, key: bytes) -> None:
        self._keyed = blake2b(key=key, digest_size=SEAL_BYTES)
        self.due: int = 0
        self._missing = 0  # bit i: the counter i below the highest, within the window, was not accepted yet
        self.on_repeated: Callable[[], object] = lambda: None

    def counter_of(self, data: bytes) -> int | None:
        """Return the counter of a message with its trailer; None if the seal is wrong."""
        seal = self._keyed.copy()
        seal.update(data[:-SEAL_BYTES])
        if not hmac.compare_digest(seal.digest(), data[-SEAL_BYTES:]):
            return None
        return int(COUNTER.unpack_from(data, len(data) - TRAILER)[0])

    def accept(self, counter: int) -> bool:
        """Accept a message with this counter. Return False if it must be ignored."""
        if counter == self.due:  # nothing is missing between the two, so the window needs no work
            self.due = counter + 1
            if self._missing:
                self._missing = self._missing << 1 & _MASK
            return True
        ahead = counter - self.due + 1  # of the highest
        if ahead > 0:
            skipped = (1 << min(ahead, WINDOW)) - 2
            self._missing = (self._missing << ahead if ahead < WINDOW else 0) & _MASK | skipped
            self.due = counter + 1
            return True
        if not self._missing >> -ahead & 1:
            self.on_repeated()
            return False
        self._missing ^= 1 << -ahead
        return True
