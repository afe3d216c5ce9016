"""The ids of the clusters of this process, and what is said of a cluster that is used in the wrong place."""

from __future__ import annotations

import threading
import weakref

from aiodatadist._concurrency.resident import Misuse, Resident
from aiodatadist.errors import ForkError, InternalError, LLMException, ParamInvalid

_live: weakref.WeakValueDictionary[int, Resident] = weakref.WeakValueDictionary()
"""The initialised clusters of this process, by id, and those of processes from which this one was forked."""
_live_lock = threading.Lock()


def claim_id(cluster_id: int, resident: Resident) -> None:
    """Take a cluster id. Raises ParamInvalid if a live cluster of this process has it."""
    with _live_lock:
        other = _live.get(cluster_id)
        if other is not None and other.is_alive:
            raise ParamInvalid(
                f"cluster {cluster_id} is initialised in this process already: ids must be unique",
                hint="finalize() the other one first, or choose another id",
            )
        _live[cluster_id] = resident


def refusal(name: str, misuse: Misuse, reason: str | None) -> LLMException:
    """Return the error for a cluster that is used in the wrong process, thread or event loop."""
    match misuse:
        case Misuse.FORKED:
            return ForkError(f"this LLMDataDist was initialised {reason}", hint="start processes with spawn")
        case Misuse.LOOP_CLOSED:
            return LLMException(
                f"the event loop on which {name} was initialised is closed",
                hint="init() and use it under one asyncio.run(), and finalize() before that ends",
            )
        case Misuse.OTHER_LOOP:
            return LLMException(f"{name} belongs to another event loop", hint="use it where it was initialised")
        case Misuse.NO_LOOP:
            return LLMException(
                f"no event loop runs in this thread: {name} can be used only on the event loop where it was initialised",
                hint="from another thread use asyncio.run_coroutine_threadsafe() and that loop, or aiodatadist.blocking",
            )
    return InternalError(f"{name} cannot be used: {misuse.value}{'' if reason is None else f': {reason}'}")
