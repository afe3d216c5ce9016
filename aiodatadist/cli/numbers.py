"""Numbers on a command line, for argparse."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def integer(least: int, most: int) -> Callable[[str], int]:
    """A whole number in a closed range."""

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
    """A finite number of seconds, not below ``least``."""

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from {least:g} on")
        return number

    return convert
