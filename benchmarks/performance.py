"""Writes `docs/performance.md`, with its picture, from one run: what `aiodatadist bench` measures beside other libraries.
It takes some minutes, needs a package index once, and a machine with nothing else to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from aiodatadist.cli.bench.command import measure_cases
from aiodatadist.cli.bench.figures import OURS, Latencies, Row, Spread
from aiodatadist.cli.bench.initiator import Lengths
from aiodatadist.cli.bench.options import BenchOptions
from aiodatadist.cli.bench.plot import check_plot, draw
from aiodatadist.cli.bench.report import BenchReport
from aiodatadist.cli.bench.sizes import size_text
from aiodatadist.cli.bench.workload import MemoryKind, Op
from benchmarks import copies, facade, layers, scale
from benchmarks.common import arguments

DOCS = Path(__file__).resolve().parent.parent / "docs"
PEERS = ("process_vm", "nixl")
OWNER = ["--role", "prefill"]
LARGE = BenchOptions(
    owner_arguments=OWNER,
    ops=(Op.PULL, Op.PUSH),
    memories=(MemoryKind.POOL, MemoryKind.USER),
    against=PEERS,
    lengths=Lengths(seconds=2.0),
)
SMALL = BenchOptions(
    owner_arguments=OWNER,
    ops=(Op.PULL, Op.PUSH),
    blocks_of=(32, 2 << 10, 8 << 10),
    batch=1,
    layers=1,
    against=PEERS,
    lengths=Lengths(seconds=1.0),
)
BATCHED = BenchOptions(
    owner_arguments=OWNER, ops=(Op.PULL,), blocks_of=(2 << 10,), batch=64, layers=1, lengths=Lengths(seconds=1.0)
)
BATCHED_COMMAND = "aiodatadist bench --op pull --block 2KiB --batch 64 --layers 1"
LARGE_COMMAND = "aiodatadist bench --op pull,push --memory pool,user --against process_vm,nixl"
SMALL_COMMAND = (
    "aiodatadist bench --op pull,push --block 32,2KiB,8KiB --batch 1 --layers 1 --seconds 1 --against process_vm,nixl"
)


def by_case(rows: Sequence[Row]) -> Iterator[dict[str, Row]]:
    """The rows of one case, by library."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.case.model_dump_json(), {})[row.by] = row
    return iter(cases.values())


def ratio(ours: Spread, theirs: Spread) -> str:
    return f"{ours.median / theirs.median:.2f}"


def latency(row: Row) -> Latencies:
    assert row.latency_us is not None, f"{row.by} says how long each transfer takes"
    return row.latency_us


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines])


def large_lines(rows: Sequence[Row]) -> list[list[str]]:
    lines = []
    for found in by_case(rows):
        ours, case = found[OURS], found[OURS].case
        peers = [found[name].gigabytes_per_second for name in PEERS]
        lines.append(
            [
                f"{case.op.value}, {case.memory.value}",
                size_text(case.block),
                str(ours.gigabytes_per_second),
                str(ours.of_memcpy or "-"),
                *(f"{peer} ({ratio(ours.gigabytes_per_second, peer)}x)" for peer in peers),
                f"{ours.cpu_seconds_per_gigabyte:.3f}",
            ]
        )
    return lines


def small_lines(rows: Sequence[Row]) -> list[list[str]]:
    lines = []
    for found in by_case(rows):
        ours, case = found[OURS], found[OURS].case
        peers = [latency(found[name]) for name in PEERS]
        lines.append(
            [
                case.op.value,
                size_text(2 * case.block),
                f"{latency(ours).p50:.1f}",
                f"{latency(ours).p99:.1f}",
                f"{ours.transfers_per_second.median:,.0f}",
                *(f"{peer.p50:.1f} / {peer.p99:.1f}" for peer in peers),
            ]
        )
    return lines


def losses(reports: Sequence[BenchReport]) -> list[str]:
    """Where another library, or memcpy on one thread, is faster."""
    lines = []
    for found in (found for report in reports for found in by_case(report.rows)):
        ours, case = found[OURS], found[OURS].case
        what = f"{case.op.value}, {case.memory.value}, {case.batch} blocks of {size_text(case.block)} per tensor"
        for name in PEERS:
            times = found[name].gigabytes_per_second.median / ours.gigabytes_per_second.median
            if times > 1:
                lines.append(f"- {what}: {name} has {times:.2f} times as much")
        if ours.of_memcpy is not None and ours.of_memcpy.median < 1 and case.batch > 1:
            lines.append(f"- {what}: {ours.of_memcpy.median:.2f} of a plain memcpy on one thread")
    return lines


async def layered_lines() -> list[list[str]]:
    """A layered transfer, all of whose layers are ready, against one push of the same blocks."""
    return [
        [
            f"a layered transfer without compute, blocks of {size_text(block)}: its time over one push's, in turns",
            f"{await layers.ratio_of_large(block, 100)}",
            "at most 1.1",
            "`python -m benchmarks.layers`",
        ]
        for block in layers.LARGE_BLOCKS
    ]


def copier_lines(shares: Sequence[copies.Share]) -> list[list[str]]:
    """Pool memory pulled, against what two threads copy and nothing else; and memory of the caller's against that."""
    command = "`python -m benchmarks.copies`"
    of_copies = [
        [
            f"pull, pool, blocks of {size_text(each.block)}: of two threads' non-temporal copies of them, in turns",
            f"{each.pool_of_copies}",
            "at least 0.85",
            command,
        ]
        for each in shares
    ]
    of_pool = ", ".join(f"{each.user_of_pool.median:.2f} ({size_text(each.block)})" for each in shares)
    return [
        *of_copies,
        ["pull, user: of a pool's memory, by the block, in turns", of_pool, "at least 0.6", command],
    ]


def small_goal_lines(rows: Sequence[Row], batched: Sequence[Row]) -> list[list[str]]:
    """What one small pull may take, and how many there have to be in a second."""
    pulls = {2 * row.case.block: row for row in rows if row.by == OURS and row.case.op is Op.PULL}
    largest, small = latency(pulls[16 << 10]), latency(pulls[64])
    command = f"`{SMALL_COMMAND}`"
    many = batched[0]
    return [
        [
            "a pull of 16KiB, awaited: median, p99",
            f"{largest.p50:.1f}, {largest.p99:.1f} us",
            "at most 10, 20 us",
            command,
        ],
        ["a pull of 64 bytes, awaited: median", f"{small.p50:.1f} us", "at most 8 us", command],
        [
            "pulls of 4KiB, each awaited, per second",
            f"{pulls[4 << 10].transfers_per_second.median:,.0f}",
            "at least 100,000",
            command,
        ],
        [
            f"blocks of 4KiB in pulls of {many.case.batch}, per second",
            f"{many.case.batch * many.transfers_per_second.median:,.0f}",
            "at least 150,000",
            f"`{BATCHED_COMMAND}`",
        ],
    ]


async def link_lines(times: int = 3) -> list[list[str]]:
    seconds = sorted([await scale.seconds_to_link(512) for _ in range(times)])
    first, again, words = (1e6 * each for each in await scale.seconds_of_first_pull(10, 100))
    command = "`python -m benchmarks.scale`"
    return [
        [
            "512 links to clusters in 8 processes, made at once",
            f"{seconds[len(seconds) // 2]:.2f} s ({seconds[0]:.2f}..{seconds[-1]:.2f})",
            "at most 2 s",
            command,
        ],
        ["the first pull by a key, for which the peer is asked", f"{first:.0f} us", "at most 100 us", command],
        [
            "in turns with it: a pull when the answer is known; 300 bytes over TCP and back",
            f"{again:.0f}; {words:.0f} us",
            "none",
            command,
        ],
    ]


def facade_lines() -> list[list[str]]:
    with facade.linked() as ends:
        found = list(facade.submissions(ends, 2000))
    return [
        [
            f"{row['what']}: median, p99",
            f"{row['median us']}, {row['p99 us']} us",
            f"p99 at most {row['budget us']} us",
            "`python -m benchmarks.facade`",
        ]
        for row in found
        if row["budget us"] != "-"
    ]


def page(large: BenchReport, small: BenchReport, others: Sequence[Sequence[str]] = ()) -> str:
    machine, ran = large.machine, large.ran
    large_head = ["what", "block", "GB/s", "of memcpy on one thread", *PEERS, "CPU s per GB"]
    small_head = ["what", "bytes", "median", "p99", "per second", *(f"{name}, median / p99" for name in PEERS)]
    return f"""# Performance

Written by `python -m benchmarks.performance` from one run on {large.started:%Y-%m-%d}. Nothing of this is of an NPU:
softnpu's copies are the processor's. Medians, with quartiles in parentheses; all contenders in turns in the same run, two
processes on one machine, every byte checked; another library's processes are stopped while it is not its turn.

{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, Linux {machine.kernel}; Python {machine.python},
{machine.loop}; aiodatadist {machine.aiodatadist} on {ran.runtime} ({ran.strictness or "-"}), transport {ran.transport}.
NIXL (over UCX) and process_vm (plain Python that calls `process_vm_readv`) run as they come. Their memory is private, on
pages of 4 KiB; so is `user` memory before it is registered, which moves it to pages of 2 MiB.

## Many blocks at a time

128 MiB in scattered blocks of 8 tensors. `pool` is memory of the library's, or of `aiodatadist.empty`; `user` is arrays of
the caller's. GB/s; behind another library's: how many times as fast this one is.

{table(large_head, large_lines(large.rows))}

![Bytes per second by the size of a block](performance.svg)

```console
$ {LARGE_COMMAND}
```

## One small transfer at a time

Awaited one behind the other, of two tensors; microseconds.

{table(small_head, small_lines(small.rows))}

```console
$ {SMALL_COMMAND}
```

The median is what a call costs that never leaves C and its Python wrapper. Fewer than one transfer in a hundred gives way to
the event loop, which inline work may keep for a millisecond: that turn of the loop is beyond the 99th percentile, unless the
machine is busy.

## What else has a goal

{table(["what", "here", "goal", "command"], others)}

Where a goal is missed: a first pull is three turns of an event loop and some hundred calls of Python, of both ends, each of
which runs once, with cold caches. A call of the facade waits for the interpreter's lock while the loop's thread has it, for
waking another core, which a virtual machine may have put to sleep, and for two threads that copy: its 99th percentiles are
about their goals, and differ from run to run: with 1024 blocks, beside 64 MiB, it was 0.11, 0.15 and 0.68 ms in three of
them. `after work` is no waiting: each line of the call takes four to six times as long, because the processor's caches are
full of what its caller did before.

Memory of the caller's is private: the kernel copies it, and looks up and pins every page of it first. On pages of 4 KiB
that costs the processor 2.5 to 3 times what a copy of shared memory does, on pages of 2 MiB 1.1 to 1.5 times, the more the
smaller the blocks are (`python -m benchmarks.pages`). Neither two copiers, more ranges in a call, the other direction nor a
buffer in the cache in between makes up for small pages. So softnpu moves a region of at most 256 MiB to huge pages when it
is registered; numpy's arrays from 4 MiB up have them already. Larger regions of others, and all of them before Linux 6.1 or
where the machine has no 2 MiB in one piece left, stay below the goal. `aiodatadist.empty` and `torch_empty` give arrays and
tensors that are shared to begin with: these have a pool's speed.

## Where others are faster

{chr(10).join(losses([large, small])) or "- nowhere in this run"}
"""


async def measured(options: BenchOptions) -> BenchReport:
    found = await measure_cases(options, options.cases())
    wrong = [line for row in found.rows for line in row.wrong or ()]
    if found.failure is not None or wrong:
        raise SystemExit(found.failure or "\n".join(wrong))
    return found


async def both(seconds: float | None) -> tuple[BenchReport, BenchReport]:
    large, small = LARGE, SMALL
    if seconds is not None:
        lengths = Lengths(seconds=seconds)
        large, small = replace(large, lengths=lengths), replace(small, lengths=lengths)
    return await measured(large), await measured(small)


async def other_lines() -> list[list[str]]:
    return [*await layered_lines(), *await link_lines()]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, metavar="S", help="of transfers for each row (2 and 1)")
    parser.add_argument("--into", type=Path, metavar="FOLDER", default=DOCS, help="where the page goes (docs)")
    given = parser.parse_args()
    check_plot(given.into / "performance.svg")
    large, small = asyncio.run(both(given.seconds))
    others = [
        *copier_lines(asyncio.run(copies.shares())),
        *small_goal_lines(small.rows, asyncio.run(measured(BATCHED)).rows),
        *asyncio.run(other_lines()),
        *facade_lines(),
    ]
    given.into.joinpath("performance.md").write_text(page(large, small, others), encoding="utf-8")
    draw(large, given.into / "performance.svg")


if __name__ == "__main__":
    main()
