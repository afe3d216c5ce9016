"""Sizes as people write them: KiB and KB differ; K, M and G alone are binary, as in nixlbench."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_UNITS |= {f"{letter}IB": _UNITS[letter] for letter in "KMG"} | {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d{1,18}) ?([A-Za-z]{0,3})")


def parse_size(text: str) -> int:
    """Return the bytes that "65536", "64K", "64KiB" or "64KB" stands for.

    Raises:
        ValueError: if it is not a size, or 0.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].upper() not in _UNITS or int(found[1]) == 0:
        raise ValueError(f"{text!r} is not a size: must be written as 64KiB, 64KB, 64K (64KiB) or 65536")
    return int(found[1]) * _UNITS[found[2].upper()]


def parse_sizes(text: str) -> list[int]:
    """Return comma-separated sizes in their order; "A:B" stands for A, 2A, 4A, ... up to B.

    Raises:
        ValueError: if one of them is not a size, or B is less than A.
    """
    sizes: list[int] = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        size = parse_size(first)
        end = parse_size(last) if colon else size
        if end < size:
            raise ValueError(f"{part!r} ends before it begins")
        while size <= end:
            sizes.append(size)
            size *= 2
    return list(dict.fromkeys(sizes))


def size_text(nbytes: int) -> str:
    """Return the shortest exact binary form of a size: 64KiB, 1536KiB, 1000."""
    for letter, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % unit == 0:
            return f"{nbytes // unit}{letter}"
    return str(nbytes)
