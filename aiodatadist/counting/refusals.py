"""Refusals of what comes from outside: counted one by one, and logged once per kind, address and second.

Otherwise a sender could make as many log lines as it sends messages.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from time import monotonic

MAX_PLACES = 256
"""Kinds and addresses that are remembered; the one that was refused longest ago is forgotten first."""
SECONDS = 1.0


class Refusals:
    """The refusals of one component, on one thread.

    Attributes:
        counts: how many there were of each kind.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._told: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        self.counts: Counter[str] = Counter()

    def take(self) -> Counter[str]:
        """Return the counts since the last time, and begin again."""
        taken, self.counts = self.counts, Counter()
        return taken

    def add(self, kind: str, address: str, text: str, *, level: int = logging.WARNING) -> None:
        """Count a refusal, and log its text unless one of the same kind and address was logged within this second.

        The next line of that kind and address says how many were not logged.

        Args:
            address: where it came from, or the empty text.
            text: one printable line.
        """
        self.counts[kind] += 1
        now, key = self._clock(), (kind, address)
        last, unsaid = self._told.pop(key, (-math.inf, 0))
        if now - last < SECONDS:
            self._told[key] = last, unsaid + 1
            return
        self._told[key] = now, 0
        while len(self._told) > MAX_PLACES:
            self._told.popitem(last=False)
        self._logger.log(level, "%s%s", text, f" ({unsaid} more like this since the last line)" if unsaid else "")
