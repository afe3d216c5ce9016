"""Whether a pool takes writes, as far as its answers tell.

A read-only replica, a full disk or a missing permission refuses each write and answers all else. Its health check is good,
and without a rule about writes a cache stores nothing for days.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aiodatadist.context_caching.pools.contract import PoolKey, PutStatus

PROBE: Final = "?writes"
"""Behind a key that was refused: no value has that name, and it has the same place under the same rules."""


class WriteWatch:
    """Hears the answers to all writes of one cache."""

    def __init__(self) -> None:
        self._refused: PoolKey | None = None

    def heard(self, keys: Sequence[PoolKey], statuses: Sequence[PutStatus]) -> int:
        """Take note of one call's answers, and return the number of values that failed.

        No room is no refusal: a full pool has what it has. A value that was there already says nothing.
        """
        failed = [key for key, status in zip(keys, statuses, strict=True) if status is PutStatus.FAILED]
        if failed:
            self._refused = failed[0]
        elif PutStatus.STORED in statuses or PutStatus.REJECTED in statuses:
            self._refused = None
        return len(failed)

    @property
    def probe(self) -> PoolKey | None:
        """The key to try a write with; None unless the last writes failed."""
        refused = self._refused
        return None if refused is None else refused._replace(attribute_key=f"{refused.attribute_key}{PROBE}")
