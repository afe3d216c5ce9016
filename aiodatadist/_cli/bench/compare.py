"""The comparison of a report with an older one: faster, slower, or within the spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiodatadist._cli.bench.figures import OURS, Row, Spread
from aiodatadist._cli.bench.report import BenchReport
from aiodatadist._cli.bench.sizes import size_text
from aiodatadist._cli.bench.workload import Case
from aiodatadist._cli.kit.tables import folded
from aiodatadist._cli.kit.text import wrapped_all


def comparison(old: BenchReport, new: BenchReport, columns: int) -> list[str]:
    """Return a readable comparison of two reports, in lines of at most ``columns`` columns."""
    place = elsewhere(old, new)
    head = wrapped_all([place], columns) if place is not None else []
    return [*head, *folded(compared(old.rows, new.rows), 1, columns)]


def elsewhere(old: BenchReport, new: BenchReport) -> str | None:
    """Return how the machines of two reports differ, which may explain a difference in speed; None if they are alike."""
    before, now = _place(old), _place(new)
    differ = [
        f"{name} {before[name]}, now {now[name]}"
        for name in now
        if before[name] != now[name] and None not in {before[name], now[name]}
    ]
    return f"The older report is from another machine: {'; '.join(differ)}" if differ else None


def _place(report: BenchReport) -> dict[str, Any]:
    """Return where a report was made.

    A value is None if the machine has no such property, or the report does not mention it.
    """
    machine, ran = report.machine, report.ran
    return {
        "processor": machine.cpu,
        "cores": machine.cores,
        "GiB": round(machine.memory_gib),  # another kernel keeps some of it for itself
        "runtime": ran.runtime,
        "softnpu as": ran.strictness,
        "copiers": ran.copiers,
        "chip": ran.chip,
        "transport": ran.transport,
    }


def verdict(old: Spread, new: Spread) -> str:
    """Compare two speeds. They differ if their quartiles do not overlap."""
    if new.low > old.high:
        return "faster"
    if new.high < old.low:
        return "slower"
    return "within the spread"


def compared(old: Sequence[Row], new: Sequence[Row]) -> list[list[str]]:
    """Return the header, a line for each row of ``new``, and a line for each row of ``old`` that ``new`` lacks."""
    before = {_key(row): row for row in old}
    cells = [["Case", "new/old", "", "old (GB/Sec)", "new (GB/Sec)"]]
    for row in new:
        earlier = before.pop(_key(row), None)
        if earlier is None:
            cells.append([_name(row), "-", "new", "-", str(row.gigabytes_per_second)])
            continue
        a, b = earlier.gigabytes_per_second, row.gigabytes_per_second
        cells.append([_name(row), f"{b.median / a.median:.2f}", verdict(a, b), str(a), str(b)])
    cells += [[_name(row), "-", "gone", str(row.gigabytes_per_second), "-"] for row in before.values()]
    return cells


def _key(row: Row) -> tuple[str, Case]:
    return row.by, row.case.model_copy(update={"seed": 0})


def _name(row: Row) -> str:
    case = row.case
    by = "" if row.by == OURS else f"{row.by}: "
    at_a_time = f" x {case.concurrency}" if case.concurrency > 1 else ""
    what = f"{case.op.value} {case.memory.value} {size_text(case.block)} x {case.batch} x {case.layers} layers"
    return f"{by}{what}{at_a_time}"
