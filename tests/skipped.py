"""A summary of what a run left out, in one line at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

NEEDS = {
    "make abi": "the vendor's headers",
    "redis-server": "redis-server",
    "redis-py": "redis-py",
    "mooncake": "Mooncake",
    "torch": "torch",
    "ml_dtypes": "ml_dtypes",
    "two npus": "two NPUs",
    "network namespaces": "network namespaces",
    "nftables": "nftables",
    "python 3.12": "Python 3.12",
}
"""A word of the reason, and what was absent; the first one counts."""


def line(reasons: Iterable[str], *, nightly: int = 0, other_loop: int = 0) -> str:
    """Return a line such as ``skipped: 613 need redis-server, 33 need torch``; empty if nothing was left out.

    Args:
        reasons: of each test that was skipped.
        nightly: tests that run in the night only.
        other_loop: tests that ran on one of the event loops, and run on the other one in the night.
    """
    words = [f"{count} {what}" for what, count in Counter(map(_short, reasons)).most_common()]
    words += [f"{nightly} nightly"] if nightly else []
    words += [f"{other_loop} on the other event loop"] if other_loop else []
    return f"skipped: {', '.join(words)}" if words else ""


def _short(reason: str) -> str:
    reason = reason.removeprefix("Skipped: ")
    found = [name for word, name in NEEDS.items() if word in reason.lower()]
    return f"need {found[0]}" if found else f"({reason})"
