"""The release of a cache's memory: what it waits for, and what freed memory is filled with."""

from __future__ import annotations

import os
from typing import Protocol

from aiodatadist._cache.table import Entry
from aiodatadist._concurrency.signal import Signal
from aiodatadist.errors import LLMException, ParamInvalid

DEBUG_VARIABLE = "AIODATADIST_DEBUG_MEMORY"
FREED_BYTE = 0xFF
"""The byte with which freed memory is filled on request: each float16, bfloat16 and float32 made of it is a NaN."""


class Writes(Protocol):
    """The writes of a peer that was stopped while it wrote."""

    async def wait_let_go(self) -> None:
        """Wait until no more of their bytes can land. Raises LLMException if that can never be known."""

    def abandon(self) -> None:
        """Stop waiting for them."""


class Deallocation:
    """A cache whose memory is being released."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.settled = Signal()
        self.error: LLMException | None = None

    def is_set(self) -> bool:
        """Return True if it has ended successfully."""
        return self.settled.is_set() and self.error is None

    async def wait(self) -> None:
        """Wait for its end. Raises its error."""
        await self.settled.wait()
        if self.error is not None:
            raise self.error


def fills_freed() -> bool:
    """Return True if freed memory of pools is filled. Raises ParamInvalid if the variable is neither 0 nor 1."""
    value = os.environ.get(DEBUG_VARIABLE, "")
    if value not in {"", "0", "1"}:
        raise ParamInvalid(f"{DEBUG_VARIABLE} is {value!r}: must be 1, 0 or empty")
    return value == "1"
