"""Durations: seconds wherever the name is ours, and milliseconds in the vendor's parameters."""

from __future__ import annotations

import math
from typing import Any, Final

from aiodatadist._values import checks
from aiodatadist.errors import ParamInvalid

MAX_SECONDS: Final = 864_000.0
"""The longest duration in seconds: ten days."""
FEW_MILLISECONDS: Final = 50
"""Below this a vendor's time limit in milliseconds was probably meant in seconds."""


def check_seconds(value: Any, name: str, *, may_be_zero: bool = False) -> float:
    """Return a duration in seconds. Raises TypeError if it is not a number, and ParamInvalid if it is out of range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}: must be a number of seconds")
    if math.isnan(value) or not 0 <= value <= MAX_SECONDS or not (value or may_be_zero):
        least = "at least 0" if may_be_zero else "above 0"
        raise ParamInvalid(f"{name} is {value}: must be {least} seconds, and at most {MAX_SECONDS:g}")
    return float(value)


def check_milliseconds(value: Any, name: str) -> float:
    """Return a vendor's time limit in seconds. Raises TypeError, ValueError or ParamInvalid if it is not an int32 above 0."""
    if checks.integer(value, name, checks.INT32) <= 0:
        raise ParamInvalid(f"{name} is {value}: must be above 0 milliseconds")
    return float(value / 1000)


def suspicion(milliseconds: int, name: str) -> str | None:
    """Return a sentence for the log if a vendor's time limit is so short that seconds were probably meant; else None."""
    if milliseconds >= FEW_MILLISECONDS:
        return None
    return (
        f"{name} is {milliseconds}, which is {milliseconds} ms: the vendor's time limits are in milliseconds; "
        f"if {milliseconds} seconds are meant, pass {milliseconds * 1000}"
    )
