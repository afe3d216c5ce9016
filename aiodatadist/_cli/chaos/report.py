"""Reports of runs, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from aiodatadist._cli.chaos.run import Result
from aiodatadist._cli.chaos.tally import GOOD
from aiodatadist._cli.kit.numbers import percentile
from aiodatadist._cli.kit.tables import folded

MIB = 1 << 20
SUMMARIZED = 5
"""The number of each profile's violations that are repeated at the end."""


def lines(result: Result, columns: int) -> Iterator[str]:
    """Yield the lines of one profile."""
    tally = result.tally
    end = ", interrupted" if result.is_interrupted else ""
    yield f"{result.profile}: {result.seconds:.1f} s, everything looked at {result.looks} times{end}"
    moved, compared = tally.moved / MIB, tally.checked / MIB
    yield f"  {moved:,.0f} MiB moved, {compared:,.0f} MiB compared, {tally.good:,} operations succeeded"
    memory = (
        f"{name} {each[-1] / MIB:,.0f}, {(each[-1] - each[0]) / MIB:+,.1f}" for name, each in result.resident.items()
    )
    yield f"  MiB of memory at the end, and more than at first: {'; '.join(memory)}"
    yield ""
    yield from folded(list(_operations(result)), 1, columns)
    if result.faults:
        yield ""
        yield from folded(list(_faults(result)), 1, columns)
    yield ""
    yield f"violations: {result.broken}"
    for rule, what in result.violations:
        first, *rest = what.splitlines() or [""]
        yield f"  {rule}: {first}"
        yield from (f"      {line}" for line in rest)


def summary(results: Sequence[Result]) -> Iterator[str]:
    """Yield the first violations of all profiles again, one line each."""
    for result in results:
        for rule, what in result.violations[:SUMMARIZED]:
            yield f"{result.profile}: {rule}: {(what.splitlines() or [''])[0]}"
        if result.broken > SUMMARIZED:
            yield f"{result.profile}: and {result.broken - SUMMARIZED} more"


def _operations(result: Result) -> Iterator[list[str]]:
    outcomes = result.tally.outcomes
    total: Counter[str] = sum(outcomes.values(), Counter())
    others = [status for status, _ in total.most_common() if status != GOOD]
    yield ["operation", "good", *(status.removeprefix("LLM_").lower().replace("_", " ") for status in others)]
    for operation, statuses in sorted(outcomes.items()):
        yield [operation, str(statuses[GOOD]), *(str(statuses[status] or "") for status in others)]


def _faults(result: Result) -> Iterator[list[str]]:
    yield ["fault", "times", "good again after ms, median", "99 %", "most"]
    seconds: dict[str, list[float]] = {}
    for fault, each in result.tally.recoveries:
        seconds.setdefault(fault, []).append(1000 * each)
    for fault, times in sorted(result.faults.items()):
        found = seconds.get(fault)
        figures = (
            [f"{value:.0f}" for value in (median(found), percentile(found, 99), max(found))] if found else [""] * 3
        )
        yield [fault, str(times), *figures]


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Return the results as JSON-safe values, in seconds and bytes."""
    return {"violations": sum(result.broken for result in results), "profiles": [_one(result) for result in results]}


def _one(result: Result) -> dict[str, Any]:
    tally = result.tally
    return {
        "profile": result.profile,
        "seed": result.seed,
        "seconds": round(result.seconds, 3),
        "looks": result.looks,
        "moved_bytes": tally.moved,
        "checked_bytes": tally.checked,
        "operations": {operation: dict(statuses) for operation, statuses in sorted(tally.outcomes.items())},
        "resident_bytes": dict(result.resident),
        "faults": dict(result.faults),
        "recoveries": [{"fault": fault, "seconds": round(each, 4)} for fault, each in tally.recoveries],
        "violations": [{"rule": rule, "what": what} for rule, what in result.violations],
        "violated": result.broken,
    }
