"""What a link has done: counted always, shown when asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from aiodatadist.device import TransferCompletion, TransferState


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """One link, since it was made.

    Attributes:
        cluster_id, state: the peer, and how the link is.
        pulled_bytes, pushed_bytes, served_bytes: that arrived here, that we wrote at the peer, that it asked us to write.
        transfers: that ended well.
        running: under way now.
        failures: of those that did not, how many by status; ``"CANCELLED"`` among them.
        transfer_seconds, longest_seconds: of those that ended well, in all and the longest.
        generation: how many times the link to this peer was made, this one included. What the peer said on an earlier link
            (ids and addresses of its caches, for instance) may stand for something else, if it was restarted since.
    """

    cluster_id: int
    state: str
    pulled_bytes: int
    pushed_bytes: int
    served_bytes: int
    transfers: int
    running: int
    failures: dict[str, int] = field(default_factory=dict)
    transfer_seconds: float = 0.0
    longest_seconds: float = 0.0
    generation: int = 1


class LinkCounters:
    """The counters behind :class:`LinkStatistics`."""

    def __init__(self) -> None:
        self._bytes = {"pulled": 0, "pushed": 0, "served": 0}
        self._failures: Counter[str] = Counter()
        self._transfers = 0
        self._running = 0
        self._seconds = 0.0
        self._longest = 0.0

    def started(self) -> None:
        self._running += 1

    def ran(self, what: str, nbytes: int, seconds: float) -> None:
        """As started and ended."""
        self._bytes[what] += nbytes
        self._transfers += 1
        self._seconds += seconds
        if seconds > self._longest:  # noqa: PLR1730 - a call costs as much as the rest of this
            self._longest = seconds

    def ended(self, what: str, completion: TransferCompletion) -> None:
        """``what``: pulled, pushed or served."""
        self._running -= 1
        self._bytes[what] += completion.nbytes
        if completion.state is TransferState.DONE:
            self._transfers += 1
            self._seconds += completion.transfer_seconds
            self._longest = max(self._longest, completion.transfer_seconds)
        elif completion.error is not None:
            self._failures[completion.error.status_code.name] += 1
        else:
            self._failures["CANCELLED"] += 1

    def snapshot(self, cluster_id: int, state: str, generation: int = 1) -> LinkStatistics:
        return LinkStatistics(
            cluster_id,
            state,
            self._bytes["pulled"],
            self._bytes["pushed"],
            self._bytes["served"],
            self._transfers,
            self._running,
            dict(self._failures),
            self._seconds,
            self._longest,
            generation,
        )
