"""Rows from samples. Names contain the unit, and rates are medians and quartiles over windows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from pydantic import BaseModel, ConfigDict

from aiodatadist._cli.bench.workload import Case
from aiodatadist._cli.kit.numbers import percentile

OURS = "aiodatadist"
MEMCPY = "memcpy"


class Spread(BaseModel):
    """Median and quartiles of repeats."""

    model_config = ConfigDict(frozen=True)

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}..{self.high:.2f})"

    def times(self, factor: float) -> Spread:
        """Return the same spread in another unit."""
        return Spread(median=factor * self.median, low=factor * self.low, high=factor * self.high)

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(median=values[0], low=values[0], high=values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high)


class Latencies(BaseModel):
    """The latencies of single transfers, in microseconds."""

    model_config = ConfigDict(frozen=True)

    average: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latencies:
        us = sorted(1e6 * value for value in seconds)
        at = {f"p{percent}": us[min(len(us) - 1, len(us) * percent // 100)] for percent in (50, 90, 99)}
        return cls(average=statistics.fmean(us), max=us[-1], **at)


@dataclass
class Window:
    """A period in which only transfers ran.

    Attributes:
        seconds: length of the window.
        cpu_seconds: CPU time of this process, all threads.
        post: seconds until each call returned its task.
        latency: seconds from each call until its task was done.
        transfer: seconds from the first piece to the last byte, from each report.
        late: seconds by which the event loop was late for each millisecond.
        untimed: transfers that were timed only together.

    A list is empty if it was not measured.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    post: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    untimed: int = 0

    @property
    def transfers(self) -> int:
        return len(self.latency) + self.untimed


class Row(BaseModel):
    """The figures of one case.

    Attributes:
        by, what: the library that moved the blocks, this one or another that took turns with it, and its version.
        bytes: bytes of one transfer, which has ``pieces`` blocks.
        transfers: number that was measured, in ``windows`` windows.
        gigabytes_per_second: in units of 10**9 bytes, all concurrent transfers together.
        memcpy_gigabytes_per_second: the same ranges copied by one thread of this process, in turns with the transfers.
        of_memcpy: the ratio of the two, window by window.
        post_us, latency_us, transfer_us: time until the call returned a task; until the task was done; on the device in
            between. None, here and below: not measured, because another library reports less.
        p50_us, p99_us: percentiles of ``latency_us``, window by window; None if the report does not have them.
        cpu_seconds_per_gigabyte: CPU time of both processes.
        loop_late_p99_us: lateness of the initiator's event loop.
        wrong: blocks with wrong contents at the end; None if they were not checked.
    """

    model_config = ConfigDict(frozen=True)

    by: str = OURS
    what: str = ""
    case: Case
    bytes: int
    pieces: int
    transfers: int
    windows: int
    gigabytes_per_second: Spread
    transfers_per_second: Spread
    memcpy_gigabytes_per_second: Spread | None
    of_memcpy: Spread | None
    post_us: Latencies | None
    latency_us: Latencies | None
    transfer_us: Latencies | None
    p50_us: Spread | None = None
    p99_us: Spread | None = None
    cpu_seconds_per_gigabyte: float
    loop_late_p99_us: float | None
    wrong: list[str] | None

    @classmethod
    def of(
        cls,
        case: Case,
        windows: Sequence[Window],
        limits: Sequence[float],
        peer_cpu_seconds: float,
        wrong: list[str] | None,
        by: tuple[str, str] = (OURS, ""),
    ) -> Row:
        """Return the row of a case.

        ``limits`` are the bytes per second of the memcpy after each window; empty if there is none.
        """
        counts = [window.transfers for window in windows]
        rates = [count / window.seconds for count, window in zip(counts, windows, strict=True)]
        speeds = [rate * case.nbytes / 1e9 for rate in rates]
        moved = sum(counts) * case.nbytes / 1e9
        late = [value for window in windows for value in window.late]
        latencies = [Latencies.of(window.latency) for window in windows if window.latency]
        cpu = sum(window.cpu_seconds for window in windows) + peer_cpu_seconds
        limited = Spread.of([limit / 1e9 for limit in limits]) if limits else None
        share = [1e9 * speed / limit for speed, limit in zip(speeds, limits, strict=True)] if limits else []
        return cls(
            by=by[0],
            what=by[1],
            case=case,
            bytes=case.nbytes,
            pieces=case.pieces,
            transfers=sum(counts),
            windows=len(windows),
            gigabytes_per_second=Spread.of(speeds),
            transfers_per_second=Spread.of(rates),
            memcpy_gigabytes_per_second=limited,
            of_memcpy=Spread.of(share) if share else None,
            post_us=_latencies([window.post for window in windows]),
            latency_us=_latencies([window.latency for window in windows]),
            transfer_us=_latencies([window.transfer for window in windows]),
            p50_us=Spread.of([each.p50 for each in latencies]) if latencies else None,
            p99_us=Spread.of([each.p99 for each in latencies]) if latencies else None,
            cpu_seconds_per_gigabyte=cpu / moved,
            loop_late_p99_us=1e6 * percentile(late, 99) if late else None,
            wrong=wrong,
        )


def _latencies(windows: Sequence[Sequence[float]]) -> Latencies | None:
    """Return the latencies of all windows, or None if none were measured."""
    seconds = list(chain.from_iterable(windows))
    return Latencies.of(seconds) if seconds else None
