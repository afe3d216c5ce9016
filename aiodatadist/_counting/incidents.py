"""Incidents that a peer, a client, a pool or a network can cause at any rate: counted, and logged at most once a second.

Otherwise each of them could fill the disk with log lines. The limit is one line of each kind, whatever number of
addresses, names or cluster ids is behind it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from time import monotonic
from typing import Final

SECONDS: Final = 1.0
"""Seconds until another line of the same kind may be logged."""


class Incident(StrEnum):
    """The kinds of incidents.

    Each has its own log line per second, and its own count. No text from outside decides the kind.
    """

    DEFECT = "defect"
    """An exception that was not foreseen. It ended the call, task or link in which it happened, and nothing else."""
    NO_THREADS = "no_threads"

    # ---- links ----
    CLIENT_REFUSED = "client_refused"
    ACCEPT_FAILED = "accept_failed"
    KEYS_UNUSABLE = "keys_unusable"
    KEYS_CHANGED = "keys_changed"
    KEYS_LATE = "keys_late"
    LINK_MADE = "link_made"
    LINK_FAILED = "link_failed"
    LINK_RETRIED = "link_retried"
    LINK_ENDED = "link_ended"
    LINK_LOST = "link_lost"
    FRAME_REPEATED = "frame_repeated"
    LINK_MADE_AGAIN = "link_made_again"
    RELINK_FAILED = "relink_failed"
    RELINK_GIVEN_UP = "relink_given_up"
    RIGHT_MISSING = "right_missing"
    """A peer asked for what the policy, or the cache that it named, does not let it do."""
    CHANNEL_FAILED = "channel_failed"
    CLOSE_FAILED = "close_failed"
    PEER_OUTDATED = "peer_outdated"
    TYPES_DIFFER = "types_differ"
    MEMORY_WITHHELD = "memory_withheld"
    MEMORY_RETURNED = "memory_returned"
    MEMORY_LOST = "memory_lost"

    # ---- requests of engines ----
    OFFER_UNREADABLE = "offer_unreadable"
    OFFER_ELSEWHERE = "offer_elsewhere"
    OFFER_INCOMPLETE = "offer_incomplete"
    MESSAGE_UNREADABLE = "message_unreadable"
    NAME_TAKEN = "name_taken"
    ORDER_REPEATED = "order_repeated"
    KEEP_FAILED = "keep_failed"
    PULL_FAILED = "pull_failed"
    PUSH_FAILED = "push_failed"
    PUSH_MISSED = "push_missed"
    PEER_SILENT = "peer_silent"
    RELEASE_FAILED = "release_failed"
    ANSWER_DROPPED = "answer_dropped"
    RANKS_UNKNOWN = "ranks_unknown"
    RANKS_DIFFER = "ranks_differ"
    RENDEZVOUS_REFUSED = "rendezvous_refused"

    # ---- values in pools ----
    LOOKUP_FAILED = "lookup_failed"
    LOAD_FAILED = "load_failed"
    SAVE_FAILED = "save_failed"
    CALL_FAILED = "call_failed"
    WRITE_REFUSED = "write_refused"
    NO_ROOM = "no_room"
    VALUE_DAMAGED = "value_damaged"
    VALUE_FORGED = "value_forged"


OF_POOLS: Final = frozenset(
    {
        Incident.LOOKUP_FAILED,
        Incident.LOAD_FAILED,
        Incident.SAVE_FAILED,
        Incident.CALL_FAILED,
        Incident.WRITE_REFUSED,
        Incident.NO_ROOM,
        Incident.VALUE_DAMAGED,
        Incident.VALUE_FORGED,
    }
)
"""The kinds that no cluster counts."""


class Incidents:
    """The incidents of one component. Any thread may add one, or read the counts.

    Attributes:
        counts: the number of incidents of each kind, logged or not.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self._lock = threading.RLock()  # reentrant: a finalizer that runs inside add() may add one, too
        self._logged: dict[Incident, float] = {}
        self._unsaid: Counter[Incident] = Counter()
        self._taken: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def take(self) -> Counter[str]:
        """Return the counts since the last call of this method. Only one caller may use it, on any thread."""
        counted = Counter(dict(self.counts))
        since, self._taken = counted - self._taken, counted
        return since

    def add(
        self,
        kind: Incident,
        logger: logging.Logger,
        words: str,
        *args: object,
        level: int = logging.WARNING,
        exc_info: bool = False,
    ) -> None:
        """Count an incident, and log it unless a line of the same kind was logged within this second.

        The next line of that kind says how many were not logged.

        Args:
            words: as for ``logger``; text from outside among ``args`` must be printable and short.
            exc_info: True to log the exception that is being handled, too.
        """
        with self._lock:
            self.counts[kind.value] += 1
            if not logger.isEnabledFor(level):
                return
            now = self.clock()
            if now - self._logged.get(kind, -math.inf) < SECONDS:
                self._unsaid[kind] += 1
                return
            self._logged[kind] = now
            unsaid = self._unsaid.pop(kind, 0)
        if unsaid:
            words, args = f"{words} (and %d more)", (*args, unsaid)
        logger.log(level, words, *args, exc_info=exc_info, stacklevel=2)


OF_PROCESS: Final = Incidents()
"""The incidents of code that serves no particular cluster or cache."""
