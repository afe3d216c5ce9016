"""The reason of an error as a peer is told it: printable ASCII of a bounded length."""

from __future__ import annotations

from aiodatadist._values.foreign import printable
from aiodatadist._wire.messages import MAX_REASON


def reason_of(error: Exception) -> str:
    """Return only the error's message. Its status travels separately, and its hint is for a caller here."""
    return printable(error.args[0] if error.args else error, MAX_REASON)
