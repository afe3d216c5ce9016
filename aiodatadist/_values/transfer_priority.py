"""The order of transfers on a link."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from aiodatadist._values import checks
from aiodatadist._values.durations import check_seconds


class TransferPriority(IntEnum):
    """The priority of a transfer among those of one link, in one direction. Equal ones run in the order of their calls.

    A transfer does not wait for the end of a less urgent one, which gives way between two windows and continues
    afterwards.

    Attributes:
        CRITICAL: a request waits for it, for instance for a few blocks that a decode step needs. Runs beside everything
            else; over RDMA it passes everything else instead.
        NORMAL: the default. Passes BACKGROUND transfers.
        BACKGROUND: nothing waits for it: eviction, migration, filling a cache in advance.
    """

    CRITICAL = 0
    NORMAL = 1
    BACKGROUND = 2

    def __str__(self) -> str:
        return self.name


def check_priority(value: Any) -> TransferPriority:
    """Return the priority. Raises TypeError if it is not one."""
    if isinstance(value, TransferPriority):
        return value
    return checks.instance(value, "priority", TransferPriority)


def check_deadline(value: Any) -> float | None:
    """Return the seconds from now, or None. Raises TypeError or ParamInvalid if it is not such a duration."""
    if value is None:
        return None
    return check_seconds(value, "deadline")
