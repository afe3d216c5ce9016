"""What all benchmarks print and measure with."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiodatadist
from aiodatadist.cli.bench.figures import Spread, percentile

__all__ = ["Spread", "arguments", "now", "percentile", "report"]


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


def report(title: str, rows: Sequence[dict[str, Any]], into: Path | None) -> None:
    """A machine line, then a table with the keys of the first row as columns."""
    host = machine()
    print(f"{title}\n" + ", ".join(f"{key} {value}" for key, value in host.items()))
    columns = list(rows[0])
    cells = [[str(row[column]) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    for line in [columns, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if into is not None:
        into.write_text(json.dumps({"title": title, "machine": host, "rows": list(rows)}, indent=1), encoding="utf-8")


now = time.perf_counter
