"""The goals of `docs/performance.md`: each with its measured value and spread, and whether it was reached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiodatadist._cli.bench.figures import OURS, Row, Spread
from aiodatadist._cli.bench.sizes import size_text
from aiodatadist._cli.bench.workload import MemoryKind, Op
from benchmarks.cliffs import Step
from benchmarks.copies import Share
from benchmarks.regions import Ratio

LARGE_COMMAND = "aiodatadist bench --op pull,push --memory pool,user --against process_vm,nixl"
SMALL_COMMAND = (
    "aiodatadist bench --op pull,push --block 32,2KiB,8KiB --batch 1 --layers 1 --seconds 1 --against process_vm,nixl"
)
BATCHED_COMMAND = "aiodatadist bench --op pull --block 2KiB --batch 64 --layers 1"
ONE_COPIER_COMMAND = "SOFTNPU_COPIERS=1 python -m benchmarks.overlap"
COPIES_COMMAND = "python -m benchmarks.copies"
SCALE_COMMAND = "python -m benchmarks.scale"

USER_OF_POOL = 0.6
"""The share of a pool's bytes per second, with the caller's memory."""
TIMES_NIXL = 1.5


@dataclass(frozen=True)
class Goal:
    """A row of the table of goals.

    Attributes:
        here: the measured value. Its median is compared with the limit.
        limit: the goal; None if there is no goal and the row is there for scale.
        is_least: True if the limit is the least that is wanted, not the most.
        beside: words behind the measured value.
    """

    what: str
    here: Spread
    limit: float | None
    command: str
    unit: str = ""
    is_least: bool = False
    beside: str = ""

    @property
    def is_reached(self) -> bool:
        if self.limit is None:
            return True
        return self.here.median >= self.limit if self.is_least else self.here.median <= self.limit

    @property
    def cells(self) -> list[str]:
        found = f"{text(self.here)}{self.unit}{self.beside}"
        if self.limit is None:
            return [self.what, found, "none", "-", f"`{self.command}`"]
        bar = f"at {'least' if self.is_least else 'most'} {self.limit:,.6g}{self.unit}"
        return [self.what, found, bar, "reached" if self.is_reached else "missed", f"`{self.command}`"]


def text(spread: Spread) -> str:
    """Format a spread with a precision that suits its size."""
    form = ",.0f" if spread.median >= 1000 else ".1f" if spread.median >= 20 else ".2f"
    return f"{spread.median:{form}} ({spread.low:{form}}..{spread.high:{form}})"


def over(one: Spread, other: Spread) -> Spread:
    """Return the ratio of two spreads not measured in turns. Its quartiles are as far apart as theirs allow."""
    return Spread(median=one.median / other.median, low=one.low / other.high, high=one.high / other.low)


def by_case(rows: Sequence[Row]) -> Iterator[dict[str, Row]]:
    """Group rows by case, and each group by library."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.case.model_dump_json(), {})[row.by] = row
    return iter(cases.values())


# ---- many blocks at a time ----


def user_of_pool(rows: Sequence[Row]) -> list[Goal]:
    """Compare memory of the caller's with a pool's, in the table of many blocks at a time."""
    speeds = {
        (row.case.op, row.case.memory, row.case.block): row.gigabytes_per_second for row in rows if row.by == OURS
    }
    return [
        Goal(
            f"{op.value}, user, blocks of {size_text(block)}: of a pool's memory, in the first table",
            over(speed, speeds[op, MemoryKind.POOL, block]),
            USER_OF_POOL,
            LARGE_COMMAND,
            is_least=True,
        )
        for (op, memory, block), speed in speeds.items()
        if memory is MemoryKind.USER
    ]


def user_of_pool_in_turns(shares: Sequence[Share]) -> list[Goal]:
    return [
        Goal(
            f"pull, user, blocks of {size_text(each.block)}: of a pool's memory, in turns with it",
            each.user_of_pool,
            USER_OF_POOL,
            COPIES_COMMAND,
            is_least=True,
        )
        for each in shares
    ]


def pool_of_copies(shares: Sequence[Share]) -> list[Goal]:
    return [
        Goal(
            f"pull, pool, blocks of {size_text(each.block)}: of two threads' non-temporal copies of them, in turns",
            each.pool_of_copies,
            0.85,
            COPIES_COMMAND,
            is_least=True,
        )
        for each in shares
    ]


def times_nixl(rows: Sequence[Row]) -> list[Goal]:
    """Compare with NIXL on private memory, for each operation at the size of blocks where the ratio is least."""
    goals = []
    for op in (Op.PULL, Op.PUSH):
        found = [
            (over(by[OURS].gigabytes_per_second, by["nixl"].gigabytes_per_second), by[OURS].case.block)
            for by in by_case(rows)
            if by[OURS].case.op is op and by[OURS].case.memory is MemoryKind.USER
        ]
        least, block = min(found, key=lambda each: each[0].median)
        what = f"{op.value}, user: of NIXL's, private memory both, where it is least: blocks of {size_text(block)}"
        goals.append(Goal(what, least, TIMES_NIXL, LARGE_COMMAND, is_least=True))
    return goals


# ---- small transfers ----


def latencies(row: Row) -> tuple[Spread, Spread]:
    """Return the median and the 99th percentile in microseconds, over the windows."""
    assert row.p50_us is not None
    assert row.p99_us is not None
    return row.p50_us, row.p99_us


def small(rows: Sequence[Row]) -> list[Goal]:
    """Return the goals of small pulls: the time that one may take, and how many must end in a second."""
    pulls = {2 * row.case.block: row for row in rows if row.by == OURS and row.case.op is Op.PULL}
    p50, p99 = latencies(pulls[16 << 10])
    return [
        Goal("a pull of 16KiB, awaited: median", p50, 10, SMALL_COMMAND, " us"),
        Goal("a pull of 16KiB, awaited: p99", p99, 20, SMALL_COMMAND, " us"),
        Goal("a pull of 64 bytes, awaited: median", latencies(pulls[64])[0], 8, SMALL_COMMAND, " us"),
        Goal(
            "pulls of 4KiB, each awaited, per second",
            pulls[4 << 10].transfers_per_second,
            100_000,
            SMALL_COMMAND,
            is_least=True,
        ),
    ]


def batched(row: Row) -> Goal:
    return Goal(
        f"blocks of 4KiB in pulls of {row.case.batch}, per second",
        row.transfers_per_second.times(row.case.batch),
        150_000,
        BATCHED_COMMAND,
        is_least=True,
    )


# ---- cliffs, and large memory ----


def cliffs(largest: Mapping[str, Step]) -> list[Goal]:
    """Return the largest steps between transfers of neighbouring sizes."""
    return [
        Goal(
            f"the largest step from one size to one a quarter larger, in {what}: from {step.before:,} to {step.after:,}",
            step.ratio,
            1.5,
            "python -m benchmarks.cliffs",
        )
        for what, step in largest.items()
    ]


def first_touch(ratios: Mapping[tuple[str, str], Spread]) -> list[Goal]:
    """Compare the first transfer into a pool with later ones."""
    return [
        Goal(
            f'the first {way}, of a later one, with `"populate": "{populate}"`',
            ratio,
            2 if populate == "background" else None,
            "python -m benchmarks.first_touch",
        )
        for (populate, way), ratio in ratios.items()
    ]


def regions(ratios: Iterable[Ratio]) -> list[Goal]:
    """Compare the caller's memory, of different sizes and pages, with a pool's."""
    return [
        Goal(f"pull from {each.what}", each.as_fast, each.bar, "python -m benchmarks.regions", is_least=True)
        for each in ratios
    ]


# ---- others ----


def layered(ratios: Mapping[int, Spread]) -> list[Goal]:
    """Compare a layered transfer whose layers are all ready with one push of the same blocks, for each size of blocks."""
    return [
        Goal(
            f"a layered transfer without compute, blocks of {size_text(block)}: its time over one push's, in turns",
            ratio,
            1.1,
            "python -m benchmarks.layers",
        )
        for block, ratio in ratios.items()
    ]


def links(seconds: Spread, first_pull: Sequence[Spread]) -> list[Goal]:
    first, again, words = (each.times(1e6) for each in first_pull)
    return [
        Goal("512 links to clusters in 8 processes, made at once", seconds, 2, SCALE_COMMAND, " s"),
        Goal("the first pull by a key, for which the peer is asked", first, 100, SCALE_COMMAND, " us"),
        Goal("in turns with it: a pull when the answer is known", again, None, SCALE_COMMAND, " us"),
        Goal("in turns with it: 300 bytes over TCP and back", words, None, SCALE_COMMAND, " us"),
    ]


def slowed(percent: Spread) -> Goal:
    what = "compute on one core beside transfers with one copier: slowed by"
    return Goal(what, percent, 3, ONE_COPIER_COMMAND, " %")


def facade(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    return [
        Goal(
            f"{row['what']}: p99",
            row["p99 us"],
            row["budget us"],
            "python -m benchmarks.facade",
            " us",
            beside=f"; median {text(row['median us'])}",
        )
        for row in rows
        if row["budget us"] is not None
    ]
