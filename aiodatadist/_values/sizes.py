"""Sizes in bytes, as people write them: ``1073741824`` or ``"1GiB"``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator

_UNITS: Final = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE: Final = re.compile(r"(-?[0-9]{1,20})\s*([KMGT]iB|)", re.IGNORECASE)


def read_size(value: Any) -> int:
    """Return the bytes of ``1048576``, ``"1048576"``, ``"64MiB"`` or ``"1GiB"``, without a limit.

    Raises ValueError, whose message is the rule, if the value is none of these.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError('must be a number of bytes, or a text like "64MiB" with KiB, MiB, GiB or TiB')
    return int(found[1]) * _UNITS[found[2].lower()]


Size = Annotated[int, BeforeValidator(read_size)]
"""A field of a pydantic model that takes a size, and keeps bytes."""
