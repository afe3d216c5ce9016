"""Statistics of a link: they are always counted, and shown on request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from aiodatadist._device import TransferCompletion, TransferState


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """The statistics of one link, since it was made.

    Attributes:
        cluster_id: the peer.
        state: the state of the link.
        pulled_bytes: bytes that this end read from the peer.
        pushed_bytes: bytes that this end wrote into the peer's caches.
        served_bytes: bytes that this end wrote because the peer asked for them.
        transfers: transfers that succeeded.
        running: transfers under way now.
        failures: transfers that did not succeed, by status; cancelled ones are under ``"CANCELLED"``.
        transfer_seconds: seconds of the transfers that succeeded, in total.
        longest_seconds: seconds of the longest transfer that succeeded.
        generation: how many times the link to this peer has been made, this one included. What the peer said on an earlier
            link (ids and addresses of its caches, for instance) may stand for something else if it was restarted since.
        credential: the name of the key that both ends proved: its name in the folder of trust, ``"auth_key"``,
            ``"user"`` for the user's own key, or ``"communicator"`` for one that HCCL carried. With certificates, the
            name in the peer's that stands for the peer. Empty if the ends have none.
        certificate_seconds: seconds until the certificate expires that the peer proved when the link was made; negative
            if it has expired since, which does not end the link. None if the peer proved a key, or nothing.
        transport: how its bytes travel: ``"hccl"``, which is memory that the two ends share if they are on softnpu;
            ``"tcp"`` or ``"loopback"``.
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
    credential: str = ""
    certificate_seconds: float | None = None
    transport: str = ""


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
        """Count a transfer that starts."""
        self._running += 1

    def ran(self, what: str, nbytes: int, seconds: float) -> None:
        """Count a transfer that started and finished in one call."""
        self._bytes[what] += nbytes
        self._transfers += 1
        self._seconds += seconds
        if seconds > self._longest:  # noqa: PLR1730 - a call costs as much as the rest of this
            self._longest = seconds

    def ended(self, what: str, completion: TransferCompletion) -> None:
        """Count the end of a transfer. ``what`` is pulled, pushed or served."""
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

    def snapshot(
        self,
        cluster_id: int,
        state: str,
        generation: int = 1,
        credential: str = "",
        certificate_seconds: float | None = None,
        transport: str = "",
    ) -> LinkStatistics:
        """Return the statistics as they are now."""
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
            credential,
            certificate_seconds,
            transport,
        )
