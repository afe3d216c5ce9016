"""EMS's names of arguments in errors, instead of those of :class:`~aiodatadist.context_caching.ContextCache`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from aiodatadist._context_caching.errors import EmsInvalidArgument

_NAMES: Final = {"slots": "slot_mapping", "chunks": "chunk_descs", "keys": "key_list", "buffers": "value_list"}
_AT_THE_START = re.compile(r"^(slots|keys|buffers)\b")
_ELSEWHERE = re.compile(r"\b(?:(?:slots|keys|buffers)(?=\[\d| or offsets| has \d)|chunks\b)")


@contextmanager
def upstreams_names() -> Iterator[None]:
    """Raise each EmsInvalidArgument of this context with upstream's names of the arguments."""
    try:
        yield
    except EmsInvalidArgument as error:
        message = _ELSEWHERE.sub(_renamed, _AT_THE_START.sub(_renamed, error.message()))
        if message == error.message():
            raise
        raise EmsInvalidArgument(message, partial=error.partial) from error


def _renamed(found: re.Match[str]) -> str:
    return _NAMES[found[0]]
