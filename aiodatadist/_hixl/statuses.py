"""HIXL's statuses, and which error has which."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from aiodatadist.errors import (
    CacheNotFound,
    FeatureNotEnabled,
    LinkClosed,
    LinkError,
    LLMException,
    LLMStatusCode,
    NotLinked,
    OutOfMemory,
    ParamInvalid,
    PeerLost,
)


class Status(IntEnum):
    """The status codes of HIXL, with its numbers."""

    SUCCESS = 0
    PARAM_INVALID = 103900
    TIMEOUT = 103901
    NOT_CONNECTED = 103902
    ALREADY_CONNECTED = 103903
    NOTIFY_FAILED = 103904
    UNSUPPORTED = 103905
    RESOURCE_EXHAUSTED = 203900
    FAILED = 503900


_BY_CLASS: Final[tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], Status], ...]] = (
    (TimeoutError, Status.TIMEOUT),
    ((NotLinked, PeerLost, LinkClosed), Status.NOT_CONNECTED),
    (LinkError, Status.FAILED),
    ((ParamInvalid, CacheNotFound, ValueError), Status.PARAM_INVALID),
    (FeatureNotEnabled, Status.UNSUPPORTED),
    (OutOfMemory, Status.RESOURCE_EXHAUSTED),
)
"""The first row that fits counts. Everything else is FAILED."""


def status_of(error: BaseException | None) -> Status:
    """Return the status that HIXL has for an error; SUCCESS for None."""
    if error is None:
        return Status.SUCCESS
    code = error.status_code if isinstance(error, LLMException) else None
    if code is LLMStatusCode.LLM_ALREADY_LINK:
        return Status.ALREADY_CONNECTED
    if code is LLMStatusCode.LLM_TIMEOUT:
        return Status.TIMEOUT
    return next((status for kinds, status in _BY_CLASS if isinstance(error, kinds)), Status.FAILED)
