"""Checks of arguments. Each raises :class:`EmsInvalidArgument` with the value, the limit and the rule."""

from __future__ import annotations

import math
import re
import reprlib
from array import array
from asyncio import _get_running_loop  # get_running_loop() raises where there is none, which is fine here
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

from aiodatadist._context_caching.errors import EmsInvalidArgument
from aiodatadist._values.sizes import read_size

T = TypeVar("T")

MAX_LEASE_SECONDS = 86_400
"""The longest time for which a pool is asked to keep what was found: a day."""

_FIELD_NAME = re.compile(":[^:]*:")
_REFERENCE = re.compile("[O&PXz]|Z(?![fdg])")
"""Marks of references in a buffer's format: objects and all pointers. ``Z`` before a letter is a complex number."""


def on_a_loop(what: str) -> None:
    """Raise EmsInvalidArgument if no event loop runs in this thread: what is opened belongs to the running loop."""
    if _get_running_loop() is None:
        raise EmsInvalidArgument(
            f"no event loop runs in this thread: {what} is opened on the event loop that will use it"
        )


def integer(value: Any, name: str, least: int, most: int | None = None) -> int:
    """Return the value if it is a whole number, not a ``bool``, at least ``least`` and at most ``most``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise EmsInvalidArgument(f"{name} is {_shown(value)}: must be an int")
    if value < least or (most is not None and value > most):
        rule = f"at least {least}" if most is None else f"in [{least}, {most}]"
        raise EmsInvalidArgument(f"{name} is {value}: must be {rule}")
    return value


def size(value: Any, name: str, least: int) -> int:
    """Return the bytes of a number, or of a text like ``"64MiB"``, if they are at least ``least``."""
    try:
        nbytes = read_size(value)
    except ValueError as error:
        raise EmsInvalidArgument(f"{name} is {_shown(value)}: {error}") from None
    return integer(nbytes, name, least)


def flag(value: Any, name: str) -> bool:
    """Return the value if it is True or False; other values that count as true are refused."""
    if not isinstance(value, bool):
        raise EmsInvalidArgument(f"{name} is {_shown(value)}: must be True or False")
    return value


def text(value: Any, name: str, least: int, most: int) -> str:
    """Return the value if it is a printable string of ``least`` to ``most`` characters."""
    if not isinstance(value, str):
        raise EmsInvalidArgument(f"{name} is {_shown(value)}: must be a str")
    if not least <= len(value) <= most:
        raise EmsInvalidArgument(f"{name} has {len(value)} characters: must have {least} to {most}")
    if not value.isprintable():
        raise EmsInvalidArgument(f"{name} is {value!r}: must not have control characters")
    return value


def seconds(value: Any, name: str = "timeout") -> float:
    """Return the value if it is a time of at least 0 seconds; None, no limit, becomes ``math.inf``."""
    if value is None:
        return math.inf
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise EmsInvalidArgument(f"{name} is {_shown(value)}: must be seconds, or None")
    if not value >= 0:
        raise EmsInvalidArgument(f"{name} is {value}: must be at least 0")
    return math.inf if value > 1e300 else float(value)


def lease(value: Any) -> float:
    """Return the value if it is a time of 0 to a day in seconds."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise EmsInvalidArgument(f"lease is {_shown(value)}: must be a number of seconds")
    if not 0 <= value <= MAX_LEASE_SECONDS:
        raise EmsInvalidArgument(f"lease is {value}: must be in [0, {MAX_LEASE_SECONDS}] seconds")
    return float(value)


def some(values: Any, name: str) -> Sequence[Any]:
    """Return the values as a sequence if they are a non-empty list, tuple or numpy array."""
    listed = values.tolist() if hasattr(values, "tolist") and not isinstance(values, array) else values
    if not isinstance(listed, (list, tuple, range, array)):
        raise EmsInvalidArgument(f"{name} is {_shown(values)}: must be a list or tuple")
    if not len(listed):
        raise EmsInvalidArgument(f"{name} is empty: must have at least one entry")
    return listed


def whole_numbers(values: Sequence[Any], name: str) -> array[int]:
    """Return the values as a C array; floats, ``bool`` and numbers outside int64 are refused."""
    if not isinstance(values, (array, range)) and bool in set(map(type, values)):
        at = next(i for i, value in enumerate(values) if isinstance(value, bool))
        raise EmsInvalidArgument(f"{name}[{at}] is {_shown(values[at])}: must be an int")
    try:
        return array("q", values)
    except TypeError:
        at = next(i for i, value in enumerate(values) if not hasattr(value, "__index__"))
        raise EmsInvalidArgument(f"{name}[{at}] is {_shown(values[at])}: must be an int") from None
    except OverflowError:
        at = next(i for i, value in enumerate(values) if not -(2**63) <= value < 2**63)
        raise EmsInvalidArgument(f"{name}[{at}] is {values[at]}: it does not fit 64 bits") from None


@lru_cache
def _refers(layout: str) -> bool:
    """Return True if a buffer's format contains references."""
    return _REFERENCE.search(_FIELD_NAME.sub("", layout)) is not None


def plain(array: Any, name: str) -> None:
    """Raise EmsInvalidArgument if the items of a numpy array or memoryview are references, not values."""
    dtype = getattr(array, "dtype", None)
    if _refers(array.format) if dtype is None else getattr(dtype, "hasobject", False):
        kind = f"format {array.format}" if dtype is None else f"dtype {dtype}"
        raise EmsInvalidArgument(f"{name} has the {kind}: its items must be values, not references")


def distinct(values: Sequence[T], name: str) -> None:
    """Raise EmsInvalidArgument if two values are equal."""
    if len(set(values)) == len(values):
        return
    seen: dict[T, int] = {}
    for at, value in enumerate(values):
        first = seen.setdefault(value, at)
        if first != at:
            raise EmsInvalidArgument(
                f"{name}[{at}] is {value!r}, as {name}[{first}] is: they must differ within one call"
            )


def _shown(value: Any) -> str:
    return f"{reprlib.repr(value)} of type {type(value).__name__}"
