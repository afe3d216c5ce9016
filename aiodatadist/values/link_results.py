"""What became of each peer that was to be linked, or unlinked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from aiodatadist.errors import LLMException, LLMStatusCode


class LinkResults(tuple[LLMStatusCode, list[LLMStatusCode]]):
    """What ``link_clusters`` and ``unlink_clusters`` return: a tuple of two as LLM-DataDist's, the status of all and a list
    with that of each peer. It has the reasons besides.

    Attributes:
        errors: for each peer, in order, why it has its status; None where that is success.
    """

    errors: tuple[LLMException | None, ...]

    def __new__(
        cls, status: LLMStatusCode, statuses: Iterable[LLMStatusCode], errors: Iterable[LLMException | None] = ()
    ) -> Self:
        results = super().__new__(cls, (status, list(statuses)))
        results.errors = tuple(errors)
        return results

    @classmethod
    def of(cls, errors: Iterable[LLMException | None]) -> Self:
        """The status of all is that of the last failure, or success."""
        errors = tuple(errors)
        statuses = [LLMStatusCode.LLM_SUCCESS if error is None else error.status_code for error in errors]
        failures = [status for status in statuses if status is not LLMStatusCode.LLM_SUCCESS]
        return cls(failures[-1] if failures else LLMStatusCode.LLM_SUCCESS, statuses, errors)

    def __getnewargs__(self) -> tuple[LLMStatusCode, list[LLMStatusCode], tuple[LLMException | None, ...]]:
        return (*self, self.errors)

    @property
    def status(self) -> LLMStatusCode:
        """Of all: a failure, or success."""
        return self[0]

    @property
    def statuses(self) -> list[LLMStatusCode]:
        """Of each peer, in order."""
        return self[1]
