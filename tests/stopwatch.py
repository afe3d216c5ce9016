"""Time limits of tests, on a machine that stands still now and then."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, process_time
from types import TracebackType
from typing import Self

PAUSE = 0.005
STILL = 0.02
"""Seconds late from which it was the machine: a loop of Python's, however busy, lets other threads run every 5 ms."""
CLOCK = 0.002
"""Seconds by which a loop's clock, which may count whole milliseconds, can be ahead of this one."""


class Stopwatch:
    """Measures itself, from its beginning as a context manager. Until it stops nothing is garbage collected: that takes 0.1 s
    with the heap of a whole test run.

    Attributes:
        seconds: that it lasted.
        stood_still: those of them in which no thread of this process ran, nor used a processor.
    """

    def __init__(self) -> None:
        self.seconds = self.stood_still = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_out, name="stopwatch")

    def __enter__(self) -> Self:
        self._thread.start()
        self._collects = gc.isenabled()
        gc.disable()
        self._start = monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Only the first time counts."""
        if not self._over.is_set():
            self.seconds = monotonic() - self._start
            self._over.set()
            self._thread.join()
            if self._collects:
                gc.enable()

    def _look_out(self) -> None:
        last = monotonic(), process_time()
        while not self._over.wait(PAUSE):
            last = self._look(*last)
        self._look(*last)

    def _look(self, last: float, last_used: float) -> tuple[float, float]:
        now, used = monotonic(), process_time()
        late = now - last - PAUSE
        if late >= STILL:  # else, or as far as a thread of this process worked, it was not the machine
            self.stood_still += max(0.0, late - (used - last_used))
        return now, used


@contextmanager
def lasting(at_most: float, at_least: float = 0.0) -> Iterator[Stopwatch]:
    """What is done here takes less than so many seconds, but for those in which the machine stood still."""
    with Stopwatch() as watch:
        yield watch
    assert watch.seconds >= at_least - CLOCK, f"{watch.seconds:.3f} s: that is less than {at_least}"
    assert watch.seconds - watch.stood_still < at_most, (
        f"{watch.seconds:.3f} s, {watch.stood_still:.3f} of which the machine stood still: that is not less than {at_most}"
    )
