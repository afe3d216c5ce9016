"""Counts of a cluster's transfers, which can be added up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from aiodatadist._cache.task import CacheTask


@dataclass(frozen=True, slots=True)
class Stats:
    """Plain counts, picklable. ``+`` merges those of two ranks, and ``sum(all_of_them, Stats())`` those of all.

    Attributes:
        started, succeeded, failed, cancelled: transfers of this cluster, whether called or submitted.
        bytes, ranges: of the transfers that succeeded.
        queue_seconds, transfer_seconds: sums over the transfers that succeeded.
        longest_seconds: the longest transfer that succeeded.
        failures: failed transfers by status, or by exception if that has no status.
    """

    started: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    bytes: int = 0
    ranges: int = 0
    queue_seconds: float = 0.0
    transfer_seconds: float = 0.0
    longest_seconds: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def running(self) -> int:
        """Transfers that have not ended."""
        return self.started - self.succeeded - self.failed - self.cancelled

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            self.started + other.started,
            self.succeeded + other.succeeded,
            self.failed + other.failed,
            self.cancelled + other.cancelled,
            self.bytes + other.bytes,
            self.ranges + other.ranges,
            self.queue_seconds + other.queue_seconds,
            self.transfer_seconds + other.transfer_seconds,
            max(self.longest_seconds, other.longest_seconds),
            dict(Counter(self.failures) + Counter(other.failures)),
        )


class Counters:
    """The counts as they grow, on the loop. They are replaced as a whole: other threads read those of one moment."""

    def __init__(self) -> None:
        self._all = _NOTHING

    @property
    def now(self) -> Stats:
        """The current counts, from any thread."""
        now = Stats(*self._all)
        return replace(now, failures=dict(now.failures))

    def watch(self, task: CacheTask) -> None:
        """Count a transfer that has started, and its outcome."""
        started, *rest = self._all
        self._all = (started + 1, *rest)
        task.add_done_callback(self._ended)

    def refused(self, error: Exception) -> None:
        """Count a submitted transfer that could not start."""
        started, *rest = self._all
        self._all = (started + 1, *rest)
        self._failed(error)

    def _failed(self, error: Exception) -> None:
        started, succeeded, failed, *rest, failures = self._all
        name = _name(error)
        self._all = (started, succeeded, failed + 1, *rest, {**failures, name: failures.get(name, 0) + 1})

    def _ended(self, task: CacheTask) -> None:
        error = task.exception()
        if error is not None:
            self._failed(error)
            return
        started, succeeded, failed, cancelled, nbytes, ranges, waited, moved, longest, failures = self._all
        if task.cancelled():
            cancelled += 1
        else:
            report = task.result()
            succeeded, nbytes, ranges = succeeded + 1, nbytes + report.bytes, ranges + report.ranges
            waited, moved = waited + report.queue_seconds, moved + report.transfer_seconds
            longest = max(longest, report.transfer_seconds)
        self._all = (started, succeeded, failed, cancelled, nbytes, ranges, waited, moved, longest, failures)


_NOTHING: tuple[Any, ...] = (0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, {})
"""Zero counts, in the order of the fields of :class:`Stats`."""


def _name(error: Exception) -> str:
    status = getattr(error, "status_code", None)
    return type(error).__name__ if status is None else str(status.name)
