"""What a call has been lent, and gives back in the end: except when a device will not let go of it."""

from __future__ import annotations

import logging
from typing import Protocol, TypeVar

logger = logging.getLogger(__name__)

_lost: list[object] = []
"""What a device did not let go of: never freed, since some of it is memory of the heap."""


class Lent(Protocol):
    """A stage, a value, a reservation."""

    def release(self) -> None: ...


T = TypeVar("T", bound=Lent)


class LoanSet:
    """``with LoanSet() as loans``: all that was added is released at the end. What was taken meanwhile is not affected.

    Attributes:
        is_stuck: the device did not let go. Nothing is released then: a byte may still land there.
    """

    def __init__(self) -> None:
        self.is_stuck = False
        self._lent: list[Lent] = []

    def add(self, lent: T) -> T:
        self._lent.append(lent)
        return lent

    def __enter__(self) -> LoanSet:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.is_stuck:
            _lost.extend(self._lent)
            logger.error("the device did not let go of %d stages and values: they are lost", len(self._lent))
            return
        for lent in self._lent:
            lent.release()
