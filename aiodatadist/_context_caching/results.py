"""Results of calls: the number of served keys from the first one without a gap, and a status for each key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class CcStatus(Enum):
    """The outcome for one key.

    ``OK``: read, written or found, also if it was there already. ``MISS``: not there. ``TIMEOUT``, ``IO_ERROR``: no
    answer for it, or a fault. ``REJECTED``: no room for it, or larger than a value may be. ``SKIPPED``: not tried,
    because an earlier key was missing, or the pool is not used now (:class:`HealthGate`).
    """

    OK = "ok"
    MISS = "miss"
    TIMEOUT = "timeout"
    IO_ERROR = "io error"
    REJECTED = "rejected"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class CcResult:
    """Result of a data call and of ``exists``.

    Attributes:
        success: keys read, written or found, counted from the first one without a gap: the usable prefix.
        total: keys in the request.
        details: the status of each key. Not part of equality and ``repr``.
    """

    success: int
    total: int
    details: tuple[CcStatus, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, details: Sequence[CcStatus]) -> CcResult:
        """Return the result for these statuses."""
        ok = CcStatus.OK
        success = next((i for i, status in enumerate(details) if status is not ok), len(details))
        return cls(success, len(details), tuple(details))


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of a :class:`~aiodatadist.context_caching.ContextCache`. A value belongs to a hash and group, or to a key.

    Attributes:
        saved, saved_bytes: values that were stored, payloads only.
        present: values that were stored before, so that nothing was moved for them.
        rejected: values for which there was no room.
        failed: values for which the pool reported a fault. Values that a failed call did not reach are not counted.
        loaded, loaded_bytes: values that were read into the caller's memory.
        local: of those, the values from the local read cache.
        missed: values that were asked for and not there.
        damaged: values that were there, but stale, foreign or incomplete. They count as missed, too.
        forged: values that were there, but not as a member of the group had sealed them, in a sealed pool. They count as
            missed, too.
        bytes_in_flight, most_bytes_in_flight: host memory that calls hold now, and the most that they ever held.
    """

    saved: int
    saved_bytes: int
    present: int
    rejected: int
    failed: int
    loaded: int
    loaded_bytes: int
    local: int
    missed: int
    damaged: int
    forged: int
    bytes_in_flight: int
    most_bytes_in_flight: int
