"""Measure how fast blocks travel between two processes.

128 MiB in scattered blocks of 16 KiB to 2 MiB are pulled by one process from another, every byte verified once, as
`aiodatadist bench` does it. Beside it, in the same run and in turns: a plain one-thread memcpy of the same ranges inside the
pulling process, with the source's memory mapped there (`memcpy`). Bar: the pull has at least 0.8 of memcpy at every size. A
1 ms ticker shows how late the event loop is while blocks move at full speed, and when nothing moves; bar: at most 1 ms at the
99th percentile with SOFTNPU_COPIERS=1. Where every processor copies the loop waits for its turn: 1 to 3 ms on two.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiodatadist.cli.bench.command import measure_cases
from aiodatadist.cli.bench.figures import Row, Spread, percentile
from aiodatadist.cli.bench.initiator import Lengths
from aiodatadist.cli.bench.lateness import ticking
from aiodatadist.cli.bench.options import BenchOptions
from aiodatadist.cli.kit.place import add_place_arguments, first_place, places
from benchmarks.common import arguments, report

WINDOWS = 9
"""Of about a third of a second each, idle and moving: a virtual machine that loses its core spoils one or two."""


async def idle_late() -> Spread:
    """Return the 99th percentile of the loop's lateness in milliseconds when nothing moves."""
    each = []
    for _ in range(WINDOWS):
        with ticking() as late:
            await asyncio.sleep(0.3)
        each.append(percentile(late, 99) * 1e3)
    return Spread.of(each)


def row(found: Row) -> dict[str, Any]:
    limit, late = found.memcpy_gigabytes_per_second, found.loop_late_p99_us
    return {
        "block": f"{found.case.block >> 10} KiB",
        "blocks": found.pieces,
        "pull GB/s": f"{found.gigabytes_per_second.median:.2f}",
        "memcpy GB/s": "-" if limit is None else f"{limit.median:.2f}",
        "pull/memcpy": f"{found.of_memcpy or '-'}",
        "loop late p99 ms": "-" if late is None else f"{late / 1e3:.2f}",
    }


async def measure(options: BenchOptions) -> list[dict[str, Any]]:
    idle = await idle_late()
    measured = await measure_cases(options, options.cases())
    if measured.failure is not None:
        raise SystemExit(measured.failure)
    for found in measured.rows:
        if found.wrong:
            raise SystemExit("\n".join(found.wrong))
    return [{**row(found), "when idle": f"{idle}"} for found in measured.rows]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=3.0, help="of transfers for each size (3)")
    add_place_arguments(parser)
    args = parser.parse_args()
    prefill_at, decode_at = places(args)
    options = BenchOptions(
        places=[prefill_at, decode_at],
        owner_arguments=["--role", "prefill", *first_place(args)],
        lengths=Lengths(args.seconds, WINDOWS),
    )
    report("pull_blocks: 128 MiB between two processes", asyncio.run(measure(options)), args.json)


if __name__ == "__main__":
    main()
