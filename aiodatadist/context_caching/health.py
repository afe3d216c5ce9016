"""When to stop using a pool, and when to come back: pure arithmetic on times that it is told."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class HealthRules:
    """The numbers of a gate.

    Attributes:
        probe_every: seconds between two health checks while the pool is not used, and while it is.
        successes: health checks in a row that have to be good before it is used again.
        changes, window: so many changes from good to bad or back within so many seconds are allowed; a pool that changes more
            often stays unused until fewer lie in the window.
    """

    probe_every: float = 10.0
    successes: int = 3
    changes: int = 3
    window: float = 60.0


class HealthGate:
    """Open while the pool is used. Closed, every call counts as a miss at once, and nobody waits for a pool that is gone.

    Attributes:
        rules: its numbers.
        is_open: the pool may be used.
    """

    def __init__(self, rules: HealthRules | None = None) -> None:
        self.rules = rules or HealthRules()
        self.is_open = True
        self._good = 0
        self._changes: deque[float] = deque()

    def failed(self, now: float) -> None:
        """A call or a health check failed. Times are of any one clock, in seconds."""
        self._good = 0
        if self.is_open:
            self._change(now)

    def probed(self, healthy: bool, now: float) -> None:
        """A health check ended."""
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
