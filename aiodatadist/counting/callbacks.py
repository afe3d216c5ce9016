"""Functions of the caller's, called on the event loop in the middle of our own work: whatever they raise ends none of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def guarded(call: Callable[[], T], logger: logging.Logger, words: str, *args: object) -> T | None:
    """What it returns; None where it raises, which is logged with these words: its own affair, also that it asked what was
    cancelled for its result. An interrupt is raised by the event loop, a moment later, and ends that."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit) as error:
        asyncio.get_running_loop().call_soon(_raise, error)
    except BaseException:  # CancelledError, too: that of a callback must not cancel the link that calls it
        logger.exception(words, *args)
    return None


def _raise(error: BaseException) -> None:
    raise error
