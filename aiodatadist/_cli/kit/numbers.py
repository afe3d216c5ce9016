"""Numbers as people write and read them: arguments for argparse, sizes and durations for the screen."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence


def integer(least: int, most: int) -> Callable[[str], int]:
    """Return a converter for a whole number in a closed range."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return number

    return convert


def seconds(least: float) -> Callable[[str], float]:
    """Return a converter for a finite number of seconds, not below ``least``."""

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from {least:g} on")
        return number

    return convert


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def quantity(count: float) -> str:
    """Return a readable number of bytes, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def duration(seconds: float) -> str:
    """Return a readable duration, in the unit that makes the number at least one."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
