"""Durations: reported by ``make measure``, and no reason to fail, because a busy machine takes longer.

By the clock of ``clock.py`` it is exact, and no machine's matter: there a test that takes longer fails.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from tests.clock import AutojumpLoop

TIMES = "AIODATADIST_TIMES"
"""The environment variable that names the file for the times, one JSON object a line."""
CLOCK = 0.002
"""Seconds by which an event loop's clock, which may count whole milliseconds, can be ahead of this one."""


@contextmanager
def lasting(expected: float, at_least: float = 0.0) -> Iterator[None]:
    """Note how long the body took.

    Args:
        expected: seconds that it takes at most on a quiet machine. The report names what took longer.
        at_least: seconds that it must take; a timer that fires early is a defect on any machine.
    """
    if isinstance(loop := _running_loop(), AutojumpLoop):
        start = loop.jumped
        yield
        assert at_least - CLOCK <= (seconds := loop.jumped - start) <= expected, f"{seconds:.3f} s by the loop's clock"
        return
    start = monotonic()
    yield
    seconds = monotonic() - start
    if path := os.environ.get(TIMES):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        with Path(path).open("a") as file:
            file.write(json.dumps({"test": test, "expected": expected, "seconds": seconds}) + "\n")
    assert seconds >= at_least - CLOCK, f"{seconds:.3f} s: that is less than {at_least}"


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def main() -> None:
    """Print the times of a run, the slowest of their kind first."""
    rows = [json.loads(line) for line in Path(os.environ[TIMES]).read_text().splitlines()]
    rows.sort(key=lambda row: row["expected"] / max(row["seconds"], CLOCK))
    for row in rows:
        mark = "LATE" if row["seconds"] >= row["expected"] else ""
        print(f"{mark:4}  {row['seconds']:8.3f} s of {row['expected']:8.3f}  {row['test']}")
    print(f"{len(rows)} times, {sum(row['seconds'] >= row['expected'] for row in rows)} late")


if __name__ == "__main__":
    main()
