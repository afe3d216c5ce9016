"""The process's loop thread for blocking clusters: started by the first that is initialised, ended with the last."""

from __future__ import annotations

import os
import threading
import warnings
from functools import partial

from aiodatadist._concurrency import forks
from aiodatadist._concurrency.loop_thread import LoopThread, Unusable
from aiodatadist.errors import DeviceError, ForkError, LLMException, LLMStatusCode, TransferError

LAST_CALLS_SECONDS = 30.0
"""Seconds in which running calls must end when the last cluster is finalized."""


def _refusal(pid: int, why: Unusable) -> LLMException:
    """Return the error for a blocking call that cannot be made, or that was ended from outside."""
    match why:
        case Unusable.NOT_STARTED:
            return DeviceError(why.value, hint="a limit of processes or memory is reached")
        case Unusable.FORKED:
            return ForkError(f"this LLMDataDist was initialised {forks.since(pid)}", hint="start processes with spawn")
        case Unusable.OWN_THREAD:
            return LLMException(
                "a blocking call on the thread that must carry it out",
                hint="from an async LayerSynchronizer await aiodatadist's own calls, or make it a plain function",
            )
        case Unusable.OVER:
            return LLMException(
                "the last LLMDataDist of this process was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED
            )
    return TransferError(why.value)


class Warned:
    """A note that the warning about a blocking call on an event loop has been given."""

    once = False


def _warn_on_event_loop() -> None:
    if not Warned.once:
        Warned.once = True
        warnings.warn(
            "a blocking call of aiodatadist stops the event loop of this thread until it returns: "
            "here aiodatadist.LLMDataDist can be awaited instead",
            RuntimeWarning,
            stacklevel=5,
        )


class _Shared:
    """The thread of the process, which exists while a cluster uses it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: LoopThread | None = None
        self.users = 0


_shared = _Shared()
os.register_at_fork(after_in_child=_shared.__init__)  # type: ignore[misc]  # a child has no such thread, and needs an open lock


def separate(name: str) -> LoopThread:
    """Start a loop thread of this name, which its caller ends with ``join``."""
    return LoopThread(name, partial(_refusal, os.getpid()), _warn_on_event_loop, LAST_CALLS_SECONDS)


def acquire() -> LoopThread:
    """Return the process's loop thread; start it if necessary. Each caller must :func:`release` it."""
    with _shared.lock:
        if _shared.thread is None:
            _shared.thread = separate("aiodatadist loop")
        _shared.users += 1
        return _shared.thread


def release(thread: LoopThread) -> None:
    """Release the thread. The last call ends the thread, and waits for its end."""
    with _shared.lock:
        _shared.users -= 1
        is_last = _shared.users == 0
        if is_last:
            _shared.thread = None
    if is_last:
        thread.join()
