"""The share of one peer, over all of its links: its messages in a second, and its notifications. No I/O, no timers.

A peer that breaks its link and makes another one has the same share: so what it may send, and what waits here to be taken,
does not grow with the number of its links.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

from aiodatadist._config.quotas import Quotas
from aiodatadist._values.peer_budget import Budget

WINDOW_SECONDS: Final = 1.0
"""The length of a window."""
SLICE_SECONDS: Final = 0.001
"""The time that reading a peer may take before others have their turn."""
OTHERS: Final = 3
"""The turn of the others, as a multiple of that time. So most of their requests meet none of a peer's large messages."""
MOST_SECONDS: Final = 0.1
"""The longest turn. If the process did not run for a while, the measured time means nothing."""
ACTIVE_SECONDS: Final = 0.1
"""The time for which a peer counts as active after it was heard."""
MAX_SHARES: Final = 4096
"""The number of peers whose shares are remembered after their links have ended: those that were linked last."""


class Window:
    """A limit on what may come in a window of time. The clock is read only when the limit is reached.

    If the time of a window is over before its limit is reached, nothing waits, so a slow sender never does.

    Args:
        limit: the amount for one window.
        clock: returns the time in seconds.
    """

    __slots__ = ("_began", "_clock", "left", "limit")

    def __init__(self, limit: float, clock: Callable[[], float]) -> None:
        self.limit: Final = limit
        self.left: float = limit
        self._clock = clock
        self._began = clock()

    def wait(self) -> float:
        """Return the seconds until more may come: 0 if the limit is not reached, or its window is over.

        What came beyond the limit counts towards the next window.
        """
        if self.left > 0:
            return 0.0
        now = self._clock()
        rest = self._began + WINDOW_SECONDS - now
        if rest > 0:
            return rest
        self._began = now
        self.left = min(self.limit, self.left + self.limit * int((-rest) // WINDOW_SECONDS + 1))
        return 0.0 if self.left > 0 else WINDOW_SECONDS


class Floor:
    """The peers that were heard last, of all peers of a cluster.

    Attributes:
        clock: returns the time in seconds.
        last: the peer that was heard last.
        at: when it was heard.
        other_at: when another peer was heard last.
    """

    __slots__ = ("at", "clock", "last", "other_at")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock: Callable[[], float] = clock
        self.last: object = None
        self.at: float = -math.inf
        self.other_at: float = -math.inf

    def has_others(self, peer: object) -> bool:
        """Return True if another peer was heard a moment ago."""
        at = self.other_at if peer is self.last else self.at
        return self.clock() - at <= ACTIVE_SECONDS


class Inflow:
    """The messages that a peer sends, with their bytes, and revocations among them.

    While other peers are active, reading one peer takes at most a quarter of the time. A large message is read in one go
    and holds up the event loop for some milliseconds. Otherwise several in a row would delay the messages of others.

    Attributes:
        windows: the windows by the name of their limit.
        waits: counts the waits by limit.
    """

    def __init__(self, quotas: Quotas, clock: Callable[[], float], waits: Counter[str], floor: Floor) -> None:
        self.waits = waits
        self._floor = floor
        self._work = 0.0
        self._frames = Window(quotas.frames, clock)
        self._bytes = Window(quotas.frame_bytes, clock)
        self._revocations = Window(quotas.revocations, clock)
        self.windows: Final = {
            Budget.FRAMES: self._frames,
            Budget.FRAME_BYTES: self._bytes,
            Budget.REVOCATIONS: self._revocations,
        }

    def received(self, nbytes: int) -> None:
        """Count bytes."""
        self._bytes.left -= nbytes

    def heard(self, nbytes: int = 0) -> None:
        """Count a message, and its bytes unless they have been counted as received."""
        self._frames.left -= 1
        self._bytes.left -= nbytes
        floor = self._floor
        if floor.last is not self:
            floor.last, floor.other_at = self, floor.at
        floor.at = floor.clock()

    def worked(self, seconds: float) -> None:
        """Count the time that reading the peer's messages has taken."""
        self._work += seconds

    def turn(self) -> float:
        """Return the seconds for which the others have their turn; 0 if reading took little time, or no other is heard."""
        if self._work < SLICE_SECONDS:
            return 0.0
        work, self._work = self._work, 0.0
        return min(OTHERS * work, MOST_SECONDS) if self._floor.has_others(self) else 0.0

    def revoked(self) -> None:
        """Count a revocation."""
        self._revocations.left -= 1

    @property
    def is_spent(self) -> bool:
        """True if a limit is reached, though its window may be over."""
        return self._frames.left <= 0 or self._bytes.left <= 0 or self._revocations.left <= 0

    def wait(self) -> float:
        """Return the seconds for which the peer must not be read, and count the wait; 0 if it may be read."""
        longest = 0.0
        for limit, window in self.windows.items():
            seconds = window.wait()
            if seconds > 0:
                self.waits[limit.value] += 1
            longest = max(longest, seconds)
        return longest


class NoteRoom:
    """Room for the notifications of a peer that were not taken."""

    def __init__(self, quotas: Quotas, waits: Counter[str]) -> None:
        self.notes: int = 0
        self.nbytes: int = 0
        self._quotas = quotas
        self._waits = waits

    def take(self, nbytes: int) -> bool:
        """Count a notification of this size and return True, unless there is no room for it: then count a wait."""
        quotas = self._quotas
        if self.notes >= quotas.notes:
            self._waits[Budget.NOTES.value] += 1
            return False
        if self.nbytes + nbytes > quotas.note_bytes:
            self._waits[Budget.NOTE_BYTES.value] += 1
            return False
        self.notes += 1
        self.nbytes += nbytes
        return True

    def free(self, nbytes: int) -> None:
        """Release the room of a notification."""
        self.notes -= 1
        self.nbytes -= nbytes


class CriticalShare:
    """The critical requests of a peer that are served: how many at a time, and for how long in each second."""

    def __init__(self, quotas: Quotas, clock: Callable[[], float], waits: Counter[str]) -> None:
        self.requests: int = 0
        self._most = quotas.critical_requests
        self._time = Window(quotas.critical_share * WINDOW_SECONDS, clock)
        self._waits = waits

    def begin(self) -> bool:
        """Count a request and return True, unless it must be served as a normal one. Count that otherwise."""
        if self.requests >= self._most:
            self._waits[Budget.CRITICAL_REQUESTS.value] += 1
            return False
        if self._time.wait() > 0:
            self._waits[Budget.CRITICAL_SHARE.value] += 1
            return False
        self.requests += 1
        return True

    def end(self, seconds: float = 0.0) -> None:
        """Note that a request has ended, after a transfer of this duration."""
        self.requests -= 1
        self._time.left -= seconds


class PeerShare:
    """The share of one peer.

    Attributes:
        inflow: the messages that it sends.
        notes: room for its notifications.
        critical: its critical requests.
    """

    def __init__(self, quotas: Quotas, clock: Callable[[], float], waits: Counter[str], floor: Floor) -> None:
        self.inflow: Final = Inflow(quotas, clock, waits, floor)
        self.notes: Final = NoteRoom(quotas, waits)
        self.critical: Final = CriticalShare(quotas, clock, waits)


class PeerShares:
    """The shares of all peers, by cluster id. ``len()`` is their number.

    Args:
        clock: returns the time in seconds.
        waits: counts waits by limit.
    """

    def __init__(self, quotas: Quotas, clock: Callable[[], float], waits: Counter[str]) -> None:
        self.quotas: Final = quotas
        self._clock = clock
        self._waits = waits
        self._floor = Floor(clock)
        self._shares: OrderedDict[int, PeerShare] = OrderedDict()  # the one that was linked last at the end

    def __len__(self) -> int:
        return len(self._shares)

    def unknown(self) -> PeerShare:
        """Return a share for a link whose peer is not known yet."""
        return PeerShare(self.quotas, self._clock, self._waits, self._floor)

    def of(self, cluster_id: int) -> PeerShare:
        """Return the share of a peer. Its links keep it; so do those that have ended, as long as it is remembered."""
        share = self._shares.pop(cluster_id, None)
        if share is None:
            share = self.unknown()
        self._shares[cluster_id] = share
        while len(self._shares) > MAX_SHARES:
            self._shares.popitem(last=False)
        return share
