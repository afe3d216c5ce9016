"""The decision, from a pool's answers, that the pool refuses writes.

A read-only replica, a full disk or a missing permission refuses each write and answers everything else. Its health
check succeeds, and without a rule about writes a cache would store nothing for days.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aiodatadist._context_caching.pools.contract import PoolKey, PutStatus

PROBE: Final = "?writes"
"""Suffix of a refused key for the probe: no value has that name, and it has the same place under the same rules."""


class WriteWatch:
    """The watch over all writes of one cache."""

    def __init__(self) -> None:
        self._refused: PoolKey | None = None

    def heard(self, keys: Sequence[PoolKey], statuses: Sequence[PutStatus]) -> int:
        """Note one call's answers, and return the number of values that failed.

        A lack of room is no refusal: a full pool keeps what it has. A value that was there already says nothing.
        """
        failed = [key for key, status in zip(keys, statuses, strict=True) if status is PutStatus.FAILED]
        if failed:
            self._refused = failed[0]
        elif PutStatus.STORED in statuses or PutStatus.REJECTED in statuses:
            self._refused = None
        return len(failed)

    @property
    def probe(self) -> PoolKey | None:
        """The key of a trial write, or None unless the last writes failed."""
        refused = self._refused
        return None if refused is None else refused._replace(attribute_key=f"{refused.attribute_key}{PROBE}")
