"""Printing and measuring that all benchmarks share."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiodatadist
from aiodatadist._cli.bench.figures import Spread
from aiodatadist._cli.kit.numbers import percentile
from aiodatadist._cli.kit.tables import aligned

__all__ = ["Spread", "arguments", "in_turns", "now", "percentile", "report", "report_all", "seconds_of"]

Result = TypeVar("Result")

Table = Sequence[dict[str, Any]]
"""Rows with the same keys. Values are texts, numbers and spreads: written as numbers, and rounded for people only."""


def machine() -> dict[str, str]:
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "aiodatadist": aiodatadist.__version__,
        "runtime": os.environ.get("AIODATADIST_RUNTIME", "auto"),
    }


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    return parser


def report(title: str, rows: Table, into: Path | None) -> None:
    """Print the machine, then a table with the keys of the first row as columns. Write both as JSON ``into`` a file."""
    host = machine()
    _print(title, host, rows)
    if into is not None:
        _write({"title": title, "machine": host, "rows": list(rows)}, into)


def report_all(tables: Mapping[str, Table], into: Path | None) -> None:
    """Print several tables, by their titles, and write them into one file."""
    host = machine()
    for title, rows in tables.items():
        _print(title, host, rows)
    if into is not None:
        each = [{"title": title, "rows": list(rows)} for title, rows in tables.items()]
        _write({"machine": host, "tables": each}, into)


def shown(value: object) -> str:
    """Format a value for people: two decimals, or three digits if it is smaller than one."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    return str(value)


def _print(title: str, host: dict[str, str], rows: Table) -> None:
    print(f"{title}\n" + ", ".join(f"{key} {value}" for key, value in host.items()))
    columns = list(rows[0])
    cells = [[shown(row[column]) for column in columns] for row in rows]
    print("\n".join(aligned([columns, *cells])))


def _write(found: dict[str, Any], into: Path) -> None:
    into.write_text(json.dumps(found, indent=1, default=Spread.model_dump), encoding="utf-8")


now = time.perf_counter


async def seconds_of(once: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Await calls, one after the other, and return the seconds of each."""
    seconds = []
    for _ in range(count):
        start = now()
        await once()
        seconds.append(now() - start)
    return seconds


async def in_turns(
    contenders: Mapping[str, Callable[[], Awaitable[Result]]], rounds: int, warm: int = 0
) -> dict[str, list[Result]]:
    """Run the contenders in turns, each round in another order. Return each one's results, round by round.

    The results of ``warm`` rounds before these are left out: they connect, and touch memory for the first time.
    """
    choose = random.Random(1)
    found: dict[str, list[Result]] = {name: [] for name in contenders}
    for number in range(-warm, rounds):
        for name in choose.sample(list(contenders), len(contenders)):
            result = await contenders[name]()
            if number >= 0:
                found[name].append(result)
    return found
