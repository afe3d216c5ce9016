"""What goes first on a link."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

from aiodatadist.errors import ParamInvalid
from aiodatadist.values import checks


class TransferPriority(IntEnum):
    """Which transfers of one link, in one direction, go first. Within a priority they run in the order of their calls.

    A transfer does not wait for the end of a less urgent one: that one gives way between two windows, and goes on afterwards.

    Attributes:
        CRITICAL: a request waits for it: a few blocks that a decode step needs. Beside all else, but over RDMA, where it
            passes all else.
        NORMAL: the default. Passes what is BACKGROUND.
        BACKGROUND: nothing waits for it: eviction, migration, filling a cache in advance.
    """

    CRITICAL = 0
    NORMAL = 1
    BACKGROUND = 2

    def __str__(self) -> str:
        return self.name


def check_priority(value: Any) -> TransferPriority:
    """Raises TypeError: it is none."""
    return checks.instance(value, "priority", TransferPriority)


MAX_DEADLINE = 864_000.0
"""Seconds: ten days."""


def check_deadline(value: Any) -> float | None:
    """Seconds from now, or None. Raises TypeError, ParamInvalid: it is no such duration."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"deadline is {value!r} of type {type(value).__name__}: must be seconds, or None")
    if not 0 < value <= MAX_DEADLINE or math.isnan(value):
        raise ParamInvalid(f"deadline is {value}: must be above 0 seconds, and at most {MAX_DEADLINE:g}")
    return float(value)
