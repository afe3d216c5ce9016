"""The result for each peer that was to be linked or unlinked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from aiodatadist.errors import LLMException, LLMStatusCode


class LinkResults(tuple[LLMStatusCode, list[LLMStatusCode]]):
    """The result of ``link_clusters`` and ``unlink_clusters``: a tuple of two, as LLM-DataDist returns, and the reasons.

    The tuple has the overall status and a list with the status of each peer.

    Attributes:
        errors: for each peer, in order, the reason for its status; None if that is success.
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
        """Return results whose overall status is that of the last failure, or success."""
        errors = tuple(errors)
        statuses = [LLMStatusCode.LLM_SUCCESS if error is None else error.status_code for error in errors]
        failures = [status for status in statuses if status is not LLMStatusCode.LLM_SUCCESS]
        return cls(failures[-1] if failures else LLMStatusCode.LLM_SUCCESS, statuses, errors)

    def __getnewargs__(self) -> tuple[LLMStatusCode, list[LLMStatusCode], tuple[LLMException | None, ...]]:
        return (*self, self.errors)

    @property
    def status(self) -> LLMStatusCode:
        """The overall status: a failure, or success."""
        return self[0]

    @property
    def statuses(self) -> list[LLMStatusCode]:
        """The status of each peer, in order."""
        return self[1]
