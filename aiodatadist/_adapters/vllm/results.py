"""The orders that ended at a worker in one step, as vLLM is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from aiodatadist._adapters.ended import Ended
from aiodatadist._adapters.vllm.stats import TransferStats


@dataclass
class Results:
    """The results of one step: requests that were sent and received, and those of them that failed."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class Reports:
    """The orders that a worker's service has ended, until vLLM asks for them.

    Args:
        take: returns what ended since the last call.
    """

    def __init__(self, take: Callable[[], Ended]) -> None:
        self._take = take
        self._blocks: set[int] = set()
        self._stats = TransferStats()

    def take_results(self) -> Results:
        """Return what ended since the last step."""
        ended = self._take()
        self._stats.add(ended)
        for blocks in ended.failed.values():
            self._blocks.update(blocks)
        return Results(ended.sent, ended.received, set(ended.failed))

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks of failed loads among those reported as received."""
        blocks, self._blocks = self._blocks, set()
        return blocks

    def take_stats(self) -> TransferStats | None:
        """Return the figures of the last interval, or None if nothing happened."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, TransferStats()
        return stats
