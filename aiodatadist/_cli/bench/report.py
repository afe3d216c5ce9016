"""Rows as a table with nixlbench's column names, and as JSON with numbers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pydantic import BaseModel, ConfigDict

from aiodatadist._cli.bench.figures import Latencies, Row, Spread
from aiodatadist._cli.bench.initiator import Lengths
from aiodatadist._cli.bench.machine import Machine, Ran
from aiodatadist._cli.kit.tables import aligned, folded
from aiodatadist._cli.kit.text import wrapped_all

SCHEMA = "aiodatadist-bench/1"

KEYS = 5
"""The columns that identify a row."""
ROOMY = ("P99 Post (us)", "P99 Tx (us)")
"""The columns for a terminal that is wide enough for all."""
SHED = (
    "Avg Post (us)", "Avg Tx (us)", "Loop late P99 (us)", "Max (us)", "P90 (us)", "Avg Lat. (us)", "Transfers/s", "CPU s/GB",
    "memcpy", "P50 (us)",
)  # fmt: skip
"""The columns that are left out on a narrow terminal, in this order. ``--json`` has them all."""


class BenchReport(BaseModel):
    """The report that ``--json`` writes.

    Attributes:
        schema_name: name of the report's format.
        started: start time, with its time zone.
        idle_late_p99_us: lateness of the event loop before anything moved.
        failure: why rows are missing; ``interrupted`` after Ctrl-C.
    """

    model_config = ConfigDict(frozen=True)

    schema_name: str = SCHEMA
    started: datetime
    machine: Machine
    ran: Ran
    lengths: Lengths
    rows: list[Row]
    idle_late_p99_us: float | None = None
    failure: str | None = None


def table(rows: Sequence[Row], columns: int = 0) -> list[list[str]]:
    """Return the header, then a line per row. If there is room, it includes 99th percentiles of the parts of a transfer."""
    cells = [_cells(row) for row in rows]
    heads = list(cells[0]) if cells else []
    whole = _chosen(cells, heads)
    if whole and len(aligned(whole)[0]) <= columns:
        return whole
    return _chosen(cells, [head for head in heads if head not in ROOMY])


def _chosen(cells: Sequence[dict[str, str]], heads: list[str]) -> list[list[str]]:
    return [heads, *([row[head] for head in heads] for row in cells)] if cells else []


def _cells(row: Row) -> dict[str, str]:
    case = row.case
    return {
        "By": row.by,
        "Op": case.op.value,
        "Memory": case.memory.value,
        "Block Size (B)": str(case.block),
        "Batch Size": str(row.pieces),
        "B/W (GB/Sec)": str(row.gigabytes_per_second),
        "memcpy": _median(row.memcpy_gigabytes_per_second),
        "B/W / memcpy": "-" if row.of_memcpy is None else str(row.of_memcpy),
        "Transfers/s": f"{row.transfers_per_second.median:.0f}",
        "Avg Lat. (us)": _us(row.latency_us, "average"),
        "P50 (us)": _us(row.latency_us, "p50"),
        "P90 (us)": _us(row.latency_us, "p90"),
        "P99 (us)": _us(row.latency_us, "p99"),
        "Max (us)": "-" if row.latency_us is None else f"{row.latency_us.max:.0f}",
        "Avg Post (us)": _us(row.post_us, "average"),
        "P99 Post (us)": _us(row.post_us, "p99"),
        "Avg Tx (us)": _us(row.transfer_us, "average"),
        "P99 Tx (us)": _us(row.transfer_us, "p99"),
        "CPU s/GB": f"{row.cpu_seconds_per_gigabyte:.3f}",
        "Loop late P99 (us)": "-" if row.loop_late_p99_us is None else f"{row.loop_late_p99_us:.0f}",
        "Check": "-" if row.wrong is None else "WRONG" if row.wrong else "ok",
    }


def table_lines(rows: Sequence[Row], columns: int) -> list[str]:
    """Return one table of at most ``columns`` columns: the narrower, the fewer figures. Below 60 columns it is folded.

    Keys in which all rows are equal are then said once, in a line above the table.
    """
    cells = table(rows, columns)
    drawn = folded(cells, KEYS, columns)
    if not cells or "" not in drawn:
        return drawn
    equal = [i for i in range(KEYS - 2) if len({row[i] for row in cells[1:]}) == 1]  # not the sizes
    above = ", ".join(cells[1][i] for i in equal)
    cells = [[cell for i, cell in enumerate(line) if i not in equal] for line in cells]
    for head in (None, *SHED):
        cells = [[cell for i, cell in enumerate(line) if cells[0][i] != head] for line in cells]
        drawn = folded(cells, KEYS - len(equal), columns)
        if "" not in drawn:
            break
    return [above, *drawn] if above else drawn


def _us(latencies: Latencies | None, which: str) -> str:
    return "-" if latencies is None else f"{getattr(latencies, which):.1f}"


def _median(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.2f}"


def lines(report: BenchReport, columns: int) -> list[str]:
    """Return a readable report in lines of at most ``columns`` columns: what ran, the table, and what went wrong."""
    machine, ran = report.machine, report.ran
    soft = f" ({ran.strictness})" if ran.strictness else ""
    head = [
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, Linux {machine.kernel}",
        f"aiodatadist {machine.aiodatadist}, Python {machine.python}, {machine.loop}; {ran.runtime}{soft}"
        f"{' ' + ran.chip if ran.chip else ''}, transport {ran.transport}, device {ran.device}",
    ]
    if report.idle_late_p99_us is not None:
        head.append(f"event loop late by {report.idle_late_p99_us:.0f} us when idle (99th percentile)")
    wrong = [
        f"WRONG: {row.case.op.value} of {row.case.block} B: {text}" for row in report.rows for text in row.wrong or ()
    ]
    return [*wrapped_all(head, columns), "", *table_lines(report.rows, columns), *wrapped_all(wrong, columns)]
