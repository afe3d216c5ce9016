"""The orders that ended at a worker in one step, as vLLM is told."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiodatadist.adapters.ended import Ended


@dataclass
class Results:
    """The results of one step: requests that were sent and received, and those of them that failed."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class FailedBlocks:
    """Blocks of failed loads, until they are asked for."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def results(self, ended: Ended) -> Results:
        """Keep the failed blocks; return the results."""
        for blocks in ended.failed.values():
            self._blocks.update(blocks)
        return Results(ended.sent, ended.received, set(ended.failed))

    def take(self) -> set[int]:
        """Return the blocks that failed since the last call."""
        blocks, self._blocks = self._blocks, set()
        return blocks
