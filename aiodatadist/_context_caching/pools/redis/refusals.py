"""Refused commands: counted by kind, and logged once per server and kind, then at most once a minute.

A read-only replica, a full disk or a missing permission refuses each write and answers everything else. Without a word
in the log a cache would store nothing for days.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from aiodatadist._values.foreign import printable

logger = logging.getLogger(__name__)

REPEAT_SECONDS: Final = 60.0
"""Seconds before a refusal of the same kind by the same server is logged again."""
SHOWN_KIND: Final = 32
"""Most characters of a kind; Redis's own have at most 14."""
KINDS: Final = 64
"""Most kinds that are told apart; a server that invents more of them shares the last count."""
OTHERS: Final = "others"


class Refusals:
    """The refusals of a pool's servers.

    Attributes:
        counts: refused commands, by request (``put``, ``get``) and the first word of the refusal.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._told: dict[tuple[str, str, str], float] = {}

    def note(self, what: str, server: str, words: str, now: float) -> None:
        """Count a refusal, and log it if it is due."""
        kind = printable(words.partition(" ")[0], SHOWN_KIND)
        if (what, kind) not in self.counts and len(self.counts) >= KINDS:
            kind = OTHERS
        self.counts[what, kind] += 1
        told = self._told.get((what, server, kind))
        if told is not None and now < told + REPEAT_SECONDS:
            return
        if len(self._told) >= KINDS * KINDS:
            self._told.clear()
        self._told[what, server, kind] = now
        logger.warning(
            "redis at %s refuses %s: %s (%d commands so far; logged again after %g s at the earliest)",
            printable(server),
            what,
            printable(words),
            self.counts[what, kind],
            REPEAT_SECONDS,
        )
