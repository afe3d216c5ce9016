"""What the transfers of a cluster came to, in numbers that can be added up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from aiodatadist.cache.task import CacheTask


@dataclass(frozen=True, slots=True)
class Stats:
    """Plain and picklable; ``+`` merges those of several ranks, ``sum(all_of_them, Stats())`` of all.

    Attributes:
        started, succeeded, failed, cancelled: transfers of this cluster's, whether called or submitted.
        bytes, ranges: of those that succeeded.
        queue_seconds, transfer_seconds, longest_seconds: of those that succeeded; the last one of a single transfer.
        failures: failed transfers by status, or by exception where it has none.
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
    """The numbers as they come, on the loop. Other threads read :attr:`now`, which is replaced as a whole."""

    def __init__(self) -> None:
        self.now = Stats()

    def watch(self, task: CacheTask) -> None:
        """A transfer began."""
        self.now += Stats(started=1)
        task.add_done_callback(self._ended)

    def refused(self, error: Exception) -> None:
        """A submitted one could not begin."""
        self.now += Stats(started=1, failed=1, failures={_name(error): 1})

    def _ended(self, task: CacheTask) -> None:
        error = task.exception()
        if error is not None:
            self.now += Stats(failed=1, failures={_name(error): 1})
        elif task.cancelled():
            self.now += Stats(cancelled=1)
        else:
            report = task.result()
            seconds = report.transfer_seconds
            self.now += Stats(
                succeeded=1, bytes=report.bytes, ranges=report.ranges, queue_seconds=report.queue_seconds,
                transfer_seconds=seconds, longest_seconds=seconds,
            )  # fmt: skip


def _name(error: Exception) -> str:
    status = getattr(error, "status_code", None)
    return type(error).__name__ if status is None else str(status.name)
