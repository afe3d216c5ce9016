"""The counted results of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from aiodatadist._cli.chaos.messages import Told

GOOD = "LLM_SUCCESS"


@dataclass
class Tally:
    """The counts of one process, or of all.

    :meth:`take` returns what was counted since the last time, and :meth:`add` adds it to another.

    Attributes:
        outcomes: counts by operation and status.
        moved, checked: bytes that transfers moved, and that were compared.
        recoveries: seconds from the end of each fault to the next successful transfer.
        seen, retired: see :class:`~aiodatadist._cli.chaos.messages.Told`.
    """

    outcomes: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    moved: int = 0
    checked: int = 0
    recoveries: list[tuple[str, float]] = field(default_factory=list)
    seen: dict[str, float] = field(default_factory=dict)
    retired: dict[str, float] = field(default_factory=dict)

    def ended(self, operation: str, status: str) -> None:
        self.outcomes[operation][status] += 1

    def saw(self, cluster: int, generation: int, began: float) -> None:
        """Note that a transfer that began at this time returned blocks of that generation."""
        key = f"{cluster}/{generation}"
        self.seen[key] = max(began, self.seen.get(key, began))

    def take(self) -> Told:
        told = Told(
            outcomes={operation: dict(statuses) for operation, statuses in self.outcomes.items()},
            moved=self.moved,
            checked=self.checked,
            recoveries=self.recoveries,
            seen=self.seen,
            retired=self.retired,
        )
        self.__dict__.update(vars(Tally()))
        return told

    def add(self, told: Told) -> None:
        for operation, statuses in told.outcomes.items():
            self.outcomes[operation].update(statuses)
        self.moved += told.moved
        self.checked += told.checked
        self.recoveries += told.recoveries
        for key, began in told.seen.items():
            self.seen[key] = max(began, self.seen.get(key, began))
        self.retired.update(told.retired)

    @property
    def good(self) -> int:
        return sum(statuses[GOOD] for statuses in self.outcomes.values())
