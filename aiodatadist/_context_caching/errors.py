"""Errors of ContextCaching: EMS's exception with EMS's codes, and a class for each code to catch by type.

A missing value is not an error: the cache may lose anything at any time, and a miss is a result.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Final

from aiodatadist._concurrency.resident import Misuse
from aiodatadist._context_caching.pools.contract import PoolTimeout, PoolUnreachable
from aiodatadist._context_caching.results import CcResult
from aiodatadist._counting.callbacks import shown
from aiodatadist.errors import LLMException, TransferTimeout


class EmsErrorCode(Enum):
    """The reason why a call failed. The numbers are ours; EMS's are not public."""

    EMS_INVALID_ARGUMENT = 1
    """An argument is wrong; the pool itself is fine."""
    EMS_IO_ERROR = 2
    """The pool does not answer: do not use it until its health check passes."""
    EMS_IO_TIMEOUT = 3
    """The deadline was reached: allow more time, or do not use the pool until its health check passes."""
    EMS_INTERNAL_ERROR = 4
    """A defect of this client, or memory that the device does not release."""
    EMS_RECOVERD_ERROR = 5
    """Only from ``Ems.init``: the pool is not there yet; call again later. Spelt as EMS spells it."""


class EmsException(RuntimeError):
    """Base of everything that ContextCaching raises on purpose.

    Attributes:
        partial: the result of a data call up to the failure, or None if nothing was started.
    """

    default_code: EmsErrorCode = EmsErrorCode.EMS_INTERNAL_ERROR

    def __init__(self, message: str, code: EmsErrorCode | None = None, *, partial: CcResult | None = None) -> None:
        super().__init__(message)
        self._message = message
        self._code = code or self.default_code
        self.partial = partial

    def status_code(self) -> EmsErrorCode:
        """Return the code of EMS."""
        return self._code

    def message(self) -> str:
        """Return the message without the code."""
        return self._message

    def __str__(self) -> str:
        return f"{self._message} [{self._code.name}]"


class EmsInvalidArgument(EmsException, ValueError):
    """An argument breaks a rule, or a call comes at the wrong time. Nothing was started."""

    default_code = EmsErrorCode.EMS_INVALID_ARGUMENT


class EmsIoError(EmsException, ConnectionError):
    """The pool does not answer."""

    default_code = EmsErrorCode.EMS_IO_ERROR


class EmsTimeout(EmsException, TimeoutError):
    """The deadline was reached. No more bytes of a load land, and no more bytes of a save are read."""

    default_code = EmsErrorCode.EMS_IO_TIMEOUT


class EmsInternalError(EmsException):
    """A defect of this client, or memory that the device does not release."""

    default_code = EmsErrorCode.EMS_INTERNAL_ERROR


class EmsForkError(EmsInternalError):
    """The cache, transfer or client was made before ``os.fork()`` and is used in the child.

    The message has the numbers of both processes. The parent's object is unaffected. Start processes with spawn. The
    counterpart for a cluster is :class:`aiodatadist.ForkError`.
    """


def fork_refusal(what: str, words: str) -> EmsForkError:
    """Return the error for use after a fork; ``words`` come from ``forks.since``."""
    return EmsForkError(f"{what} {words}; start processes with spawn")


_REFUSALS: Final[dict[Misuse, tuple[type[EmsException], str]]] = {
    Misuse.STOPPED: (EmsInvalidArgument, "this cache is closed"),
    Misuse.FAILED: (EmsInternalError, "this cache has ended: {reason}"),
    Misuse.LOOP_CLOSED: (
        EmsInvalidArgument,
        "this cache has ended with its event loop: open another one on this loop",
    ),
    Misuse.NO_LOOP: (
        EmsInvalidArgument,
        "there is no event loop here: call this on the event loop that opened the cache",
    ),
    Misuse.OTHER_LOOP: (
        EmsInvalidArgument,
        "this cache belongs to another event loop: call this on the event loop that opened the cache",
    ),
    Misuse.CANCELLED: (EmsInternalError, "this cache has ended: its task was cancelled"),
}


def refusal(misuse: Misuse, reason: str | None = None) -> EmsException:
    """Return the error for a cache that cannot be used, or not from here."""
    if misuse is Misuse.FORKED:
        return fork_refusal("this cache was opened", str(reason))
    kind, words = _REFUSALS[misuse]
    return kind(words.replace("{reason}", str(reason)))


def translated(problem: BaseException, where: str, seconds: float = math.inf) -> EmsException:
    """Return the error that callers get for an internal failure.

    If time ran out, it names the seconds that the caller had allowed.
    """
    if isinstance(problem, EmsException):
        return problem
    # shown(), because str() of a foreign exception may raise
    if not isinstance(problem, (PoolTimeout, PoolUnreachable, LLMException)):
        return EmsInternalError(f"{where or 'it failed'}: {shown(problem)}; please report it")
    if isinstance(problem, (PoolTimeout, TransferTimeout)) and seconds != math.inf:
        where = f"{where} within {seconds:g} s"
    words = f"{where}: {problem}" if where else str(problem)
    if isinstance(problem, (PoolTimeout, TransferTimeout)):
        return EmsTimeout(words)
    if isinstance(problem, PoolUnreachable):
        return EmsIoError(words)
    return EmsInternalError(words)
