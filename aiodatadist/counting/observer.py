"""Who wants to be told of each call, for instance to make a span of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from aiodatadist.counting.callbacks import guarded

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A call that has begun.

    Attributes:
        kind: what it is one of.
        operation: its name, for instance ``"pull_blocks"``.
        cluster_id: the cluster that was called; None for a context cache.
        peer: the other cluster, or the same for copies; None where there is none, or several.
        keys: of a context cache, how many keys or hashes it is about.
        age_seconds: how long ago it began: small transfers are over before they can be told of.
    """

    kind: Literal["transfer", "link", "context_cache"]
    operation: str
    cluster_id: int | None = None
    peer: int | None = None
    keys: int | None = None
    age_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of it.

    Attributes:
        status: ``LLM_SUCCESS``, ``CANCELLED``, or why it failed: an ``LLMStatusCode``, of a context cache EMS's name for it.
        error: what its caller gets.
        bytes, ranges, queue_seconds, transfer_seconds: of a transfer, as :class:`~aiodatadist.TransferReport` has them.
        hits: of a context cache, how many keys it served, from the first without a gap.
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
    """What ``LLMDataDist.observer`` and ``ContextCache.observer`` may be."""

    def began(self, call: Call) -> Tell | None:
        """A call has begun. Called in the context of its caller, on the event loop, so it has to return at once.

        Returns:
            What is to be called, once and on the event loop, when it has ended; None: nothing. Where either raises, that is
            logged, and concerns no call.
        """


def tell(observer: Observer, call: Call) -> Tell:
    """Tell an observer that a call has begun; what is returned tells it of the end. Neither raises."""
    ended = guarded(lambda: observer.began(call), logger, "%r failed at the beginning of %s", observer, call.operation)

    def end(what: Ended) -> None:
        if ended is not None:
            guarded(lambda: ended(what), logger, "%r failed at the end of %s", observer, call.operation)

    return end
