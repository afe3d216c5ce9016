"""The terms of a transfer: its priority and its deadline."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from aiodatadist import TransferPriority
from aiodatadist._cli.chaos.profiles import Profile


@dataclass(frozen=True)
class Terms:
    """The terms of one transfer.

    Attributes:
        deadline: seconds from the call; None if there is none.
    """

    priority: TransferPriority = TransferPriority.NORMAL
    deadline: float | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for a call that moves blocks."""
        given = {"priority": self.priority} if self.priority is not TransferPriority.NORMAL else {}
        return given if self.deadline is None else {**given, "deadline": self.deadline}

    def named(self, operation: str) -> str:
        """Return the name of an operation's row. Each unusual priority has its own row."""
        return operation if self.priority is TransferPriority.NORMAL else f"{operation} {self.priority.name.lower()}"


NO_TERMS = Terms()


def some_terms(chance: random.Random, profile: Profile) -> Terms:
    """Return random terms.

    Half of them have the usual priority, two thirds no deadline. If nothing may fail, deadlines are long.
    """
    normal = TransferPriority.NORMAL
    priority = chance.choice((normal, normal, TransferPriority.CRITICAL, TransferPriority.BACKGROUND))
    deadline = chance.choice((0.002, 0.02, 0.2, 2.0)) if chance.random() < 0.3 else None
    return Terms(priority, None if deadline is None else 30.0 if profile.is_calm else deadline)
