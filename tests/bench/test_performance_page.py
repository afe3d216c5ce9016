"""The page of figures is made of one run: every case has its line, and where another library is faster is said."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from aiodatadist._cli.bench.figures import OURS, Row, Spread
from aiodatadist._cli.bench.initiator import Lengths
from aiodatadist._cli.bench.machine import Machine, Ran
from aiodatadist._cli.bench.options import BenchOptions
from aiodatadist._cli.bench.report import BenchReport
from benchmarks.cliffs import Step
from benchmarks.copies import Share
from benchmarks.goals import Goal, over
from benchmarks.performance import LARGE, PEERS, SMALL, Others, losses, page
from benchmarks.regions import Ratio
from tests.bench.test_values import row


async def report(options: BenchOptions, speeds: dict[str, float]) -> BenchReport:
    """Return a report in which each library has the same speed in every case."""
    rows: list[Row] = []
    for one in options.cases():
        for name in (OURS, *PEERS):
            rows.append(row(speeds[name]).model_copy(update={"by": name, "case": one}))
    ran = Ran(runtime="soft", strictness="free", libraries=[], version="1", chip="SoftNPU", transport="hccl", device=1)
    return BenchReport(
        started=datetime(2026, 11, 1, tzinfo=UTC), machine=await Machine.here(), ran=ran, lengths=Lengths(), rows=rows
    )


async def test_every_case_has_its_line() -> None:
    large = await report(LARGE, {OURS: 8.0, "process_vm": 2.0, "nixl": 4.0})
    small = await report(SMALL, {OURS: 8.0, "process_vm": 2.0, "nixl": 4.0})
    text = page(large, small)
    assert "2026-11-01" in text
    for one in LARGE.cases():
        assert f"| {one.op.value}, {one.memory.value} | " in text
    ratios = [float(found) for found in re.findall(r"\(([0-9.]+)x\)", text)]
    assert ratios == pytest.approx([4.0, 2.0] * len(LARGE.cases()), rel=0.02)
    assert text.count("| pull | ") == text.count("| push | ") == len(SMALL.blocks_of)
    assert all(len(line) <= 132 for line in text.splitlines() if not line.startswith(("|", "$")))


def spread(median: float) -> Spread:
    return Spread(median=median, low=0.9 * median, high=1.1 * median)


def others() -> Others:
    """Return results in which a pull of 1 MiB blocks of the caller's and one call of the facade are too slow."""
    calls = {"submit a pull of 1 blocks, idle": (10.0, 40.0), "submit a pull of 1 blocks, after work": (70.0, 90.0)}
    return Others(
        shares=[
            Share(block, spread(20), spread(10), spread(20), spread(0.9), spread(share))
            for block, share in ((64 << 10, 0.7), (1 << 20, 0.5))
        ],
        batched=row(8.0),
        layered={64 << 10: spread(1.0)},
        link_seconds=spread(1.5),
        first_pull=[spread(170e-6), spread(30e-6), spread(20e-6)],
        slowed=spread(1.0),
        facade=[
            {"what": what, "median us": spread(median), "p99 us": spread(p99), "budget us": 50}
            for what, (median, p99) in calls.items()
        ],
        pages=[
            {"memory": f"private, pages of {size}", "of the first's": cost}
            for size, cost in (("4 KiB", 2.0), ("4 KiB", 3.0), ("2 MiB", 1.5))
        ],
        forms=[
            {"what": f"{form}, {nbytes} B", "calls": calls, "CPU us": cost}
            for nbytes in (64, 16384)
            for form, calls, cost in (("pull_blocks", 17, 8.0), ("push_blocks, notify", 33, 12.0))
        ],
        cliffs={"bytes": Step("bytes", 4096, 5120, (1e-5, 1.2e-5), spread(1.2))},
        first_touch={("background", "pull"): spread(1.0), ("use", "pull"): spread(10.0)},
        regions=[Ratio("the large region, of the small one", spread(0.95), 0.9, spread(10.0))],
    )


async def test_every_goal_is_reached_or_missed() -> None:
    fast = await report(LARGE, {OURS: 8.0, "process_vm": 2.0, "nixl": 4.0})
    small = await report(SMALL, {OURS: 8.0, "process_vm": 2.0, "nixl": 4.0})
    text = page(fast, small, others())
    goals = text.partition("## What has a goal")[2].partition("## Where others")[0]
    lines = [line for line in goals.splitlines() if line.startswith("| ")][2:]
    assert {line.split(" | ")[3] for line in lines} == {"reached", "missed", "-"}
    assert "| submit a pull of 1 blocks, after work: p99 | 90.0 (81.0..99.0) us; median 70.0 (63.0..77.0) |" in goals
    words = " ".join(goals.split())
    assert "in the first table: none; in turns with the pool's: pull, user, blocks of 1MiB (0.50)." in words
    assert "2.0 to 3.0 times what a copy of shared memory does, on pages of 2 MiB 1.5 to 1.5 times" in words
    assert "its medians are 7.0 to 7.0 times those of `idle`" in words
    assert "private memory both, where it is least: blocks of 16KiB | 2.00" in words


async def test_each_form_is_compared_with_a_plain_pull() -> None:
    fast = await report(LARGE, {OURS: 8.0, "process_vm": 2.0, "nixl": 4.0})
    small = await report(SMALL, {OURS: 8.0, "process_vm": 2.0, "nixl": 4.0})
    forms = page(fast, small, others()).partition("## Every form")[2].partition("## What has a goal")[0]
    assert "| `pull_blocks` | 17 | 1.00 | 1.00 |" in forms
    assert "| `push_blocks, notify` | 33 | 1.50 | 1.50 |" in forms


def test_the_median_decides() -> None:
    most, least = Goal("", spread(1.0), 1.0, ""), Goal("", spread(0.59), 0.6, "", is_least=True)
    assert most.cells[1:4] == ["1.00 (0.90..1.10)", "at most 1", "reached"]
    assert least.cells[1:4] == ["0.59 (0.53..0.65)", "at least 0.6", "missed"]
    assert over(spread(2.0), spread(1.0)).low == pytest.approx(2.0 * 0.9 / 1.1)


async def test_lower_latencies_of_others_are_listed() -> None:
    """A contender may take less time for most transfers, or for the slowest ones, and move no more bytes in a second."""
    small = await report(SMALL, {OURS: 8.0, "process_vm": 2.0, "nixl": 4.0})
    quick = {"p50_us": spread(500.0), "p99_us": spread(900.0)}
    rows = [each.model_copy(update=quick) if each.by == "nixl" else each for each in small.rows]
    found = losses([small.model_copy(update={"rows": rows})])
    assert len(found) == 2 * len(SMALL.cases())
    assert found[0].endswith("nixl has a median of 500.0 us, not 1000.0")
    assert found[1].endswith("nixl has a p99 of 900.0 us, not 1000.0")


async def test_where_others_are_faster_is_said() -> None:
    slower = await report(LARGE, {OURS: 8.0, "process_vm": 2.0, "nixl": 12.0})
    assert len(losses([slower])) == 2 * len(LARGE.cases()), "nixl, and memcpy on one thread, which has 10"
    assert "nixl has 1.50 times as much" in losses([slower])[0]
    assert "0.80 of a plain memcpy" in losses([slower])[1]
    faster = await report(LARGE, {OURS: 30.0, "process_vm": 2.0, "nixl": 12.0})
    assert losses([faster]) == []
    assert "nowhere in this run" in page(faster, faster)
