"""Observers, which are notified of each call, for instance to make a span of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from aiodatadist._counting.callbacks import guarded

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A call that has begun.

    Attributes:
        kind: the kind of call.
        operation: its name, for instance ``"pull_blocks"``.
        cluster_id: the cluster that was called; None for a context cache.
        peer: the other cluster, or the same one for copies; None if there is none, or several.
        keys: for a context cache, the number of keys or hashes that the call is about.
        age_seconds: the time since it began: a small transfer has ended before the observer is called.
    """

    kind: Literal["transfer", "link", "context_cache"]
    operation: str
    cluster_id: int | None = None
    peer: int | None = None
    keys: int | None = None
    age_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a call.

    Attributes:
        status: ``LLM_SUCCESS``, ``CANCELLED``, or the reason of the failure: the name of an ``LLMStatusCode``, or EMS's
            name for a context cache.
        error: the exception that the caller gets.
        bytes, ranges, queue_seconds, transfer_seconds: for a transfer, as in :class:`~aiodatadist.TransferReport`.
        hits: for a context cache, the number of keys that it served, from the first without a gap.
    """

    status: str
    error: Exception | None = None
    bytes: int | None = None
    ranges: int | None = None
    queue_seconds: float | None = None
    transfer_seconds: float | None = None
    hits: int | None = None


Tell = Callable[[Ended], object]


class Observer(Protocol):
    """The interface of ``LLMDataDist.observer`` and ``ContextCache.observer``."""

    def began(self, call: Call) -> Tell | None:
        """Note that a call has begun. Called in the caller's context, on the event loop, so it must return at once.

        Returns:
            A function to be called once, on the event loop, when the call has ended; or None. An exception in either is
                logged, and affects no call.
        """


def tell(observer: Observer, call: Call) -> Tell:
    """Notify an observer that a call has begun; return a function that notifies it of the end. Neither raises."""
    ended = guarded(lambda: observer.began(call), logger, "%r failed at the beginning of %s", observer, call.operation)

    def end(what: Ended) -> None:
        if ended is not None:
            guarded(lambda: ended(what), logger, "%r failed at the end of %s", observer, call.operation)

    return end
