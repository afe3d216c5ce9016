"""LMCache's memory objects as bytes."""

from __future__ import annotations

from typing import Any


def bytes_of(memory_object: Any) -> memoryview:
    """Return its contents, writable, in place."""
    return memoryview(memory_object.byte_array).cast("B")
