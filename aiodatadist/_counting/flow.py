"""Counters of calls of one kind, as cheap as possible: they are always on, beside transfers of ten microseconds.

Only the event loop writes them. Any thread may read them: values are copied in single steps of the interpreter. So a
reader in another thread may see a call in one number and not yet in the next, but never a broken number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

from aiodatadist._counting.figures import SUCCESS, FlowFigures

SECONDS: Final = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
)  # fmt: skip
"""Upper bounds by which durations are counted."""


class Done(Protocol):
    """The figures of a transfer that has ended."""

    nbytes: int
    ranges: int
    queue_seconds: float
    transfer_seconds: float

    @property
    def status(self) -> str:
        """The status: ``LLM_SUCCESS``, ``CANCELLED``, or the reason of the failure."""


class Flow:
    """The counters of calls of one kind.

    Attributes:
        running: calls under way now.
        when_ended: the bound method :meth:`ended`, which callers leave with each transfer. It is made once, because
            each access to the method would make another object.
    """

    __slots__ = ("_by_bytes", "_by_queue", "_by_seconds", "_bytes", "_failed_bytes", "_failures", "_queue_seconds", "_ran",
                 "_ranges", "_seconds", "running", "when_ended")  # fmt: skip

    def __init__(self) -> None:
        self.running: int = 0
        self.when_ended: Callable[[Done], None] = self.ended
        self._ran = 0
        self._failures: Counter[str] = Counter()
        self._bytes = self._failed_bytes = 0
        self._ranges = 0
        self._seconds = 0.0
        self._queue_seconds = 0.0
        self._by_seconds = [0] * (len(SECONDS) + 1)
        self._by_queue = [0] * (len(SECONDS) + 1)
        self._by_bytes = [0] * 65

    def ran(self, nbytes: int, ranges: int, seconds: float) -> None:
        """Count a call that had succeeded before its caller got it, and waited for nothing. Takes 0.25 us."""
        self._ran += 1
        self._bytes += nbytes
        self._ranges += ranges
        self._seconds += seconds
        self._by_seconds[bisect_left(SECONDS, seconds)] += 1
        self._by_bytes[(nbytes - 1).bit_length()] += 1

    def ended(self, done: Done) -> None:
        """Count the end of a call that was running."""
        self.running -= 1
        if done.status == SUCCESS:
            self.ran(done.nbytes, done.ranges, done.transfer_seconds)
            self._ran -= 1
            self._waited(done.queue_seconds)
        else:
            self.failed(done.status, done.nbytes)

    def _waited(self, seconds: float) -> None:
        self._queue_seconds += seconds
        self._by_queue[bisect_left(SECONDS, seconds)] += 1

    def took(self, seconds: float) -> None:
        """Count a call that succeeded and moved no bytes itself."""
        self._seconds += seconds
        self._by_seconds[bisect_left(SECONDS, seconds)] += 1
        self._waited(0.0)

    def failed(self, status: str, nbytes: int = 0) -> None:
        """Count a call that did not succeed."""
        self._failures[status] += 1
        self._failed_bytes += nbytes

    def figures(self) -> FlowFigures:
        """Return the current figures. Any thread may call it."""
        ran, by_queue, by_seconds = self._ran, self._by_queue.copy(), self._by_seconds.copy()
        by_queue[0] += ran
        statuses = dict(self._failures)
        if succeeded := sum(by_seconds):
            statuses[SUCCESS] = succeeded
        return FlowFigures(
            self.running,
            statuses,
            self._bytes,
            self._ranges,
            self._seconds,
            self._queue_seconds,
            self._failed_bytes,
            tuple(by_seconds),
            tuple(by_queue),
            tuple(self._by_bytes),
        )


def figures_of(flows: dict[str, Flow]) -> dict[str, FlowFigures]:
    """Return the figures of each operation. Any thread may call it.

    The dictionary is copied in one step of C. A list of its items would not be one: in Python 3.11 each tuple in it may
    start a garbage collection, during which other threads run and may add an operation.
    """
    return {operation: flow.figures() for operation, flow in dict(flows).items()}
