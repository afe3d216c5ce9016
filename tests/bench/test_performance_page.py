"""The page of figures is made of one run: every case has its line, and where another library is faster is said."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from aiodatadist.cli.bench.figures import OURS, Row
from aiodatadist.cli.bench.initiator import Lengths
from aiodatadist.cli.bench.machine import Machine, Ran
from aiodatadist.cli.bench.options import BenchOptions
from aiodatadist.cli.bench.report import BenchReport
from benchmarks.performance import LARGE, PEERS, SMALL, losses, page
from tests.bench.test_values import row


async def report(options: BenchOptions, speeds: dict[str, float]) -> BenchReport:
    """Every library has the same speed in each case."""
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


async def test_where_others_are_faster_is_said() -> None:
    slower = await report(LARGE, {OURS: 8.0, "process_vm": 2.0, "nixl": 12.0})
    assert len(losses([slower])) == 2 * len(LARGE.cases()), "nixl, and memcpy on one thread, which has 10"
    assert "nixl has 1.50 times as much" in losses([slower])[0]
    assert "0.80 of a plain memcpy" in losses([slower])[1]
    faster = await report(LARGE, {OURS: 30.0, "process_vm": 2.0, "nixl": 12.0})
    assert losses([faster]) == []
    assert "nowhere in this run" in page(faster, faster)
