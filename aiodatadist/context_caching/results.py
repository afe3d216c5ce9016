"""What a call tells: how many keys from the first one without a gap, and what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class CcStatus(Enum):
    """What became of one key.

    ``OK``: it was read, written, or found; also when it was there already. ``MISS``: it is not there. ``TIMEOUT``,
    ``IO_ERROR``: no answer for it, or a fault. ``REJECTED``: there was no room for it, or it is larger than a value may be.
    ``SKIPPED``: not tried, because a key before it was missed, or the pool is not used just now (:class:`HealthGate`).
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
        success: keys that were read, written or found, counted without a gap from the first one: the usable prefix.
        total: keys in the request.
        details: what became of each key. No part of equality and ``repr``.
    """

    success: int
    total: int
    details: tuple[CcStatus, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, details: Sequence[CcStatus]) -> CcResult:
        ok = CcStatus.OK
        success = next((i for i, status in enumerate(details) if status is not ok), len(details))
        return cls(success, len(details), tuple(details))


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a :class:`~aiodatadist.context_caching.ContextCache` did so far. A value is of one hash and layer group, or a key.

    Attributes:
        saved, saved_bytes: values that were stored, payloads only.
        present: values that were stored before; nothing was moved for them.
        rejected: values for which there was no room.
        failed: values with which the pool had a fault; what a call that raised did not come to is not counted.
        loaded, loaded_bytes: values that were read into the caller's memory.
        local: of those, from the local read cache.
        missed: values that were asked for and not there.
        damaged: values that were there, but stale, foreign or not whole; they count as missed, too.
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
    bytes_in_flight: int
    most_bytes_in_flight: int
