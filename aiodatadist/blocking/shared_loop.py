"""The process's loop thread for blocking clusters: started by the first that is initialised, ended with the last."""

from __future__ import annotations

import os
import threading
import warnings
from functools import partial

from aiodatadist.concurrency import forks
from aiodatadist.concurrency.loop_thread import LoopThread, Unusable
from aiodatadist.errors import DeviceError, ForkError, LLMException, LLMStatusCode, TransferError

LAST_CALLS_SECONDS = 30.0
"""Seconds that calls which are under way have for ending, when the last cluster is finalized."""


def _refusal(pid: int, why: Unusable) -> LLMException:
    """What is raised where a blocking call cannot be made, or did not end by itself."""
    match why:
        case Unusable.NOT_STARTED:
            return DeviceError(why.value, hint="a limit of processes or memory is reached")
        case Unusable.FORKED:
            return ForkError(f"this LLMDataDist was initialised {forks.since(pid)}", hint="start processes with spawn")
        case Unusable.OWN_THREAD:
            return LLMException(
                "a blocking call on the thread that would have to carry it out",
                hint="from an async LayerSynchronizer await aiodatadist's own calls, or make it a plain function",
            )
        case Unusable.OVER:
            return LLMException(
                "the last LLMDataDist of this process was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED
            )
    return TransferError(why.value)


class Warned:
    """Whether it has been said that a blocking call was made on an event loop."""

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
    """The thread of the process: there while a cluster uses it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: LoopThread | None = None
        self.users = 0


_shared = _Shared()
os.register_at_fork(after_in_child=_shared.__init__)  # type: ignore[misc]  # the child has no such thread, and an open lock


def separate(name: str) -> LoopThread:
    """Start a loop thread of this name, which its caller ends with ``join``."""
    return LoopThread(name, partial(_refusal, os.getpid()), _warn_on_event_loop, LAST_CALLS_SECONDS)


def acquire() -> LoopThread:
    """The process's loop thread, started if it is not running. Each caller gives it back with :func:`release`."""
    with _shared.lock:
        if _shared.thread is None:
            _shared.thread = separate("aiodatadist loop")
        _shared.users += 1
        return _shared.thread


def release(thread: LoopThread) -> None:
    """Give it back. The last one ends it, and waits for that."""
    with _shared.lock:
        _shared.users -= 1
        is_last = _shared.users == 0
        if is_last:
            _shared.thread = None
    if is_last:
        thread.join()
