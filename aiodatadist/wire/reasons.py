"""Words for the other end, and words of its: printable ASCII of a bounded length, whatever was in them."""

from __future__ import annotations

from aiodatadist.wire.messages import MAX_REASON


def printable(error: Exception) -> str:
    """What a peer is told of an error: the message alone. Its status travels beside it; a hint is for a caller here."""
    return as_ascii(str(error.args[0] if error.args else error))


def as_ascii(text: str, limit: int = MAX_REASON) -> str:
    """The text with all that is no printable ASCII escaped; no more than ``limit`` characters."""
    return "".join(char if " " <= char <= "~" else ascii(char)[1:-1] for char in text[:limit])[:limit]
