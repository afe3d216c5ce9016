"""Memory that was lent to a call. It is released at the end, unless a device may still write into it."""

from __future__ import annotations

import logging
from typing import Protocol, TypeVar

logger = logging.getLogger(__name__)

_lost: list[object] = []
"""Loans that a device did not release. Never freed, because some are memory of the heap."""


class Lent(Protocol):
    """A stage, a value or a reservation."""

    def release(self) -> None: ...


T = TypeVar("T", bound=Lent)


class LoanSet:
    """A context that releases everything added to it at its end. Loans taken elsewhere meanwhile are unaffected.

    Attributes:
        is_stuck: True if the device did not release the memory. Then nothing is released: a byte may still land there.
    """

    def __init__(self) -> None:
        self.is_stuck = False
        self._lent: list[Lent] = []

    def add(self, lent: T) -> T:
        """Add a loan, and return it."""
        self._lent.append(lent)
        return lent

    def __enter__(self) -> LoanSet:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.is_stuck:
            _lost.extend(self._lent)
            logger.error("the device did not release %d stages and values: their memory is lost", len(self._lent))
            return
        for lent in self._lent:
            lent.release()
