"""Argument checks whose messages name the value, the limit and the rule.

They raise ``TypeError`` for types and ``ValueError`` for C ranges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, TypeVar

T = TypeVar("T")

UINT8: Final = range(2**8)
UINT16: Final = range(2**16)
UINT32: Final = range(2**32)
UINT64: Final = range(2**64)
INT32: Final = range(-(2**31), 2**31)
INT64: Final = range(-(2**63), 2**63)

_NAMES: Final = {id(UINT8): "uint8", id(UINT16): "uint16", id(UINT32): "uint32", id(UINT64): "uint64"}
_NAMES.update({id(INT32): "int32", id(INT64): "int64"})


def integer(value: Any, name: str, allowed: range) -> int:
    """Check an ``int`` (``bool`` counts) within ``allowed``, one of the ranges above."""
    if not isinstance(value, int):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}: must be an int")
    if not allowed.start <= value < allowed.stop:
        kind = _NAMES.get(id(allowed), "allowed")
        raise ValueError(f"{name} is {value}: the {kind} range is {allowed.start} to {allowed.stop - 1}")
    return value


def seconds(value: Any, name: str) -> float:
    """Check an ``int`` or ``float`` of at least 0; ``math.inf`` means for ever."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}: must be a number of seconds")
    if math.isnan(value) or value < 0:
        raise ValueError(f"{name} is {value}: must be at least 0 seconds")
    return value


def instance(value: Any, name: str, kind: type[T] | tuple[type[T], ...]) -> T:
    """Check that an object belongs to one of these classes; None is refused, too."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join(k.__name__ for k in kinds)
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}: must be {wanted}")
    return value


def sequence(value: Any, name: str, kind: type[T]) -> Sequence[T]:
    """Check a list or tuple whose elements all belong to one class."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} is of type {type(value).__name__}: must be a list or tuple of {kind.__name__}")
    for i, element in enumerate(value):
        if not isinstance(element, kind):
            raise TypeError(f"{name}[{i}] is {element!r} of type {type(element).__name__}, not {kind.__name__}")
    return value
