"""Figures that a mistake would spoil by far, with generous limits; docs/performance.md has those that are close."""

from __future__ import annotations

import pytest

from aiodatadist._cli.bench.report import BenchReport
from aiodatadist._cli.bench.workload import MemoryKind, Op
from tests.bench.test_bench import bench

TRIES = 3
"""The best counts: a busy machine spoils one short run, and seldom three."""
SHORT = ("--block", "256KiB", "--seconds", "0.3", "--warmup", "0.1", "--windows", "3", "--json", "-")


def ratios() -> dict[str, float]:
    """Run the benchmark once and return its ratios. Each is better the larger it is."""
    done = bench("--op", "pull,push,layered", "--memory", "pool,user", *SHORT)
    assert done.returncode == 0, done.stderr
    rows = {(row.case.op, row.case.memory): row for row in BenchReport.model_validate_json(done.stdout).rows}
    speeds = {key: row.gigabytes_per_second.median for key, row in rows.items()}
    of_memcpy = rows[Op.PULL, MemoryKind.POOL].of_memcpy
    assert of_memcpy is not None
    return {
        "a pull of pool memory over memcpy": of_memcpy.median,
        "a pull of user memory over pool memory": speeds[Op.PULL, MemoryKind.USER] / speeds[Op.PULL, MemoryKind.POOL],
        "a push over a layered transfer, by time": speeds[Op.LAYERED, MemoryKind.POOL]
        / speeds[Op.PUSH, MemoryKind.POOL],
    }


LEAST = {
    "a pull of pool memory over memcpy": 0.25,
    "a pull of user memory over pool memory": 0.2,
    "a push over a layered transfer, by time": 1 / 3,
}


@pytest.mark.measures
@pytest.mark.timeout(240)
def test_ratios_are_not_off_by_far() -> None:
    best = dict.fromkeys(LEAST, 0.0)
    for _ in range(TRIES):
        best = {name: max(best[name], ratio) for name, ratio in ratios().items()}
        if all(best[name] > least for name, least in LEAST.items()):
            return
    pytest.fail(f"the best of {TRIES} runs: {best}; more is wanted than {LEAST}")
