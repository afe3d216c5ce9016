"""The place where a caller started something, for the message about it if the caller forgets it."""

from __future__ import annotations

import logging
import sys
import traceback
from asyncio import _get_running_loop  # get_running_loop() raises where there is none, which is fine here
from asyncio.constants import DEBUG_STACK_DEPTH
from types import CodeType, FrameType

_OURS = "aiodatadist."
_RUN_BY = frozenset({"asyncio", "uvloop", "anyio", "contextvars", "threading"})
"""Modules that run loops and threads: if one of them called us, there is no caller to name."""


class Origin:
    """The caller's line that led here; in asyncio's debug mode, the last ten that did. Keeps no frame alive."""

    __slots__ = ("_code", "_line", "_stack")

    def __init__(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
            frame = frame.f_back
        self._code: CodeType | None = None
        self._line = 0
        self._stack: traceback.StackSummary | None = None
        if frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] not in _RUN_BY:
            self._code, self._line = frame.f_code, frame.f_lineno
            loop = _get_running_loop()
            if loop is not None and loop.get_debug():
                self._stack = traceback.StackSummary.extract(
                    traceback.walk_stack(frame), limit=DEBUG_STACK_DEPTH, lookup_lines=False
                )

    def __str__(self) -> str:
        """Return words to append to a sentence; empty if no caller is known."""
        if self._code is None:
            return ""
        if self._stack is None:
            return f"; it was started at {self._code.co_filename}:{self._line}, in {self._code.co_qualname}"
        lines = "".join(traceback.format_list(self._stack[::-1])).rstrip()
        return f"; it was started at (most recent call last):\n{lines}"


def log_unretrieved(logger: logging.Logger, what: str, error: Exception, origin: Origin | None) -> None:
    """Log a failure that no caller asked for, together with its cause if that is known."""
    logger.error(
        "%s failed, and its exception was never retrieved: %s: %s%s",
        *(what, type(error).__name__, error, "" if origin is None else origin),
        exc_info=error if error.__cause__ is not None else None,
    )
