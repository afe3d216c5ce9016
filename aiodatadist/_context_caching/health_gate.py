"""The decision when to stop using a pool and when to come back: pure arithmetic on times passed in."""

from __future__ import annotations

import reprlib
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

from aiodatadist._context_caching.checks import integer
from aiodatadist._context_caching.errors import EmsInvalidArgument


@dataclass(frozen=True)
class HealthRules:
    """The numbers of a gate.

    Attributes:
        probe_every: seconds between two health checks, whether or not the pool is used.
        successes: consecutive successful health checks before the pool is used again.
        changes, window: the number of changes from good to bad or back that are allowed within ``window`` seconds. A
            pool that changes more often stays unused until the window contains fewer.

    Raises:
        EmsInvalidArgument: if a time is not a finite number of seconds above 0, or a count not an int of at least 1.
    """

    probe_every: float = 10.0
    successes: int = 3
    changes: int = 3
    window: float = 60.0

    def __post_init__(self) -> None:
        _check_seconds(self.probe_every, "probe_every")
        integer(self.successes, "successes", 1)
        integer(self.changes, "changes", 1)
        _check_seconds(self.window, "window")


def _check_seconds(value: Any, name: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        shown = f"{reprlib.repr(value)} of type {type(value).__name__}"
        raise EmsInvalidArgument(f"{name} is {shown}: must be a number of seconds above 0, and finite")


class HealthGate:
    """The switch of a pool: open while the pool is used. Closed, every call misses at once and waits for nothing.

    A gate counts what one cache finds out, so each cache needs its own. Once its cache has ended, the next cache may
    have the gate, and continues with its counts.

    Attributes:
        rules: the numbers of the gate.
        is_open: True if the pool may be used.

    Raises:
        EmsInvalidArgument: if ``rules`` are not HealthRules.
    """

    def __init__(self, rules: HealthRules | None = None) -> None:
        if rules is not None and not isinstance(rules, HealthRules):
            raise EmsInvalidArgument(
                f"rules is {reprlib.repr(rules)} of type {type(rules).__name__}: must be a HealthRules"
            )
        self.rules: HealthRules = HealthRules() if rules is None else rules
        self.is_open: bool = True
        self._is_taken = False
        self._good = 0
        self._changes: deque[float] = deque()

    def take(self) -> None:
        """Give the gate to a cache. Raises EmsInvalidArgument if another cache has it."""
        if self._is_taken:
            raise EmsInvalidArgument("this gate belongs to another cache that is open: each cache needs its own gate")
        self._is_taken = True

    def give(self) -> None:
        """Take the gate back: its cache has ended."""
        self._is_taken = False

    def failed(self, now: float) -> None:
        """Count a failed call or health check. All times are seconds of the same clock."""
        self._good = 0
        if self.is_open:
            self._change(now)

    def probed(self, healthy: bool, now: float) -> None:
        """Count a health check, and open or close the gate."""
        if not healthy:
            self.failed(now)
            return
        self._good += 1
        if not self.is_open and self._good >= self.rules.successes and not self._is_flapping(now):
            self._change(now)

    def _is_flapping(self, now: float) -> bool:
        while self._changes and self._changes[0] <= now - self.rules.window:
            self._changes.popleft()
        return len(self._changes) >= self.rules.changes

    def _change(self, now: float) -> None:
        self.is_open = not self.is_open
        self._good = 0
        self._changes.append(now)
