"""Write `docs/performance.md`, with its picture, from one run: what `aiodatadist bench` measures beside other libraries.

The run takes some minutes, needs a package index once, and a machine with nothing else to do.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any

from aiodatadist._cli.bench.command import measure_cases
from aiodatadist._cli.bench.figures import OURS, Row, Spread
from aiodatadist._cli.bench.initiator import Lengths
from aiodatadist._cli.bench.options import BenchOptions
from aiodatadist._cli.bench.plot import draw
from aiodatadist._cli.bench.report import BenchReport
from aiodatadist._cli.bench.sizes import size_text
from aiodatadist._cli.bench.workload import MemoryKind, Op
from benchmarks import cliffs, copies, facade, first_touch, forms, goals, layers, pages, regions, scale
from benchmarks.common import arguments
from benchmarks.goals import LARGE_COMMAND, SMALL_COMMAND, by_case

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


@dataclass(frozen=True)
class Others:
    """Results besides the two tables.

    Attributes:
        batched: pulls of many blocks of 4 KiB.
        layered: the time of a layered transfer over one push's, by the size of blocks.
        link_seconds, first_pull: the time of 512 links; of a first pull, of one whose answer is known, and of an echo.
        slowed: percent by which compute on one core takes longer beside transfers with one copier.
        facade, pages, forms: rows of these benchmarks.
        cliffs, first_touch, regions: results of these benchmarks.
    """

    shares: Sequence[copies.Share]
    batched: Row
    layered: Mapping[int, Spread]
    link_seconds: Spread
    first_pull: Sequence[Spread]
    slowed: Spread
    facade: Sequence[dict[str, Any]]
    pages: Sequence[dict[str, Any]]
    forms: Sequence[dict[str, Any]]
    cliffs: Mapping[str, cliffs.Step]
    first_touch: Mapping[tuple[str, str], Spread]
    regions: Sequence[regions.Ratio]


def ratio(ours: Spread, theirs: Spread) -> str:
    return f"{ours.median / theirs.median:.2f}"


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
        lines.append(
            [
                case.op.value,
                size_text(2 * case.block),
                *map(goals.text, goals.latencies(ours)),
                f"{ours.transfers_per_second.median:,.0f}",
                *(" / ".join(map(goals.text, goals.latencies(found[name]))) for name in PEERS),
            ]
        )
    return lines


def losses(reports: Sequence[BenchReport]) -> list[str]:
    """List the cases in which another library, or memcpy on one thread, is faster."""
    lines = []
    for found in (found for report in reports for found in by_case(report.rows)):
        ours, case = found[OURS], found[OURS].case
        what = f"{case.op.value}, {case.memory.value}, {case.batch} blocks of {size_text(case.block)} per tensor"
        lines += [f"- {what}: {name} has {had}" for name in PEERS for had in better(found[name], ours)]
        if ours.of_memcpy is not None and ours.of_memcpy.median < 1 and case.batch > 1:
            lines.append(f"- {what}: {ours.of_memcpy.median:.2f} of a plain memcpy on one thread")
    return lines


def better(theirs: Row, ours: Row) -> Iterator[str]:
    """Yield each way in which the other library is better. Latencies are compared for transfers of one block only."""
    times = theirs.gigabytes_per_second.median / ours.gigabytes_per_second.median
    if times > 1:
        yield f"{times:.2f} times as much"
    if ours.case.batch == 1:
        for name, one, other in zip(("median", "p99"), goals.latencies(theirs), goals.latencies(ours), strict=True):
            if one.median < other.median:
                yield f"a {name} of {one.median:.1f} us, not {other.median:.1f}"


def goals_of(large: Sequence[Row], small: Sequence[Row], others: Others) -> list[goals.Goal]:
    return [
        *goals.pool_of_copies(others.shares),
        *goals.user_of_pool(large),
        *goals.user_of_pool_in_turns(others.shares),
        *goals.times_nixl(large),
        *goals.small(small),
        goals.batched(others.batched),
        *goals.layered(others.layered),
        *goals.links(others.link_seconds, others.first_pull),
        goals.slowed(others.slowed),
        *goals.cliffs(others.cliffs),
        *goals.first_touch(others.first_touch),
        *goals.regions(others.regions),
        *goals.facade(others.facade),
    ]


def below(found: Sequence[goals.Goal]) -> str:
    """Name the goals that are missed, each with its measured value."""
    missed = [f"{goal.what.partition(':')[0]} ({goal.here.median:.2f})" for goal in found if not goal.is_reached]
    return ", ".join(missed) or "none"


def extremes(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def user_memory(large: Sequence[Row], others: Others) -> str:
    """Describe which sizes stay below the goal, in the first table and in turns, and what the size of a page costs."""
    costs = [
        extremes([row["of the first's"] for row in others.pages if row["memory"] == f"private, pages of {size}"])
        for size in ("4 KiB", "2 MiB")
    ]
    return wrapped(
        f"""Memory of the caller's has a goal of {goals.USER_OF_POOL} of a pool's. Below it stay, in the first table:
        {below(goals.user_of_pool(large))}; in turns with the pool's:
        {below(goals.user_of_pool_in_turns(others.shares))}. The first table measures one after the other, minutes
        apart: the quartiles of its ratios are those furthest apart, the lower one of one memory over the upper one of
        the other.""",
        f"""Such memory is private: the kernel copies it, and looks up and pins every page of it first. On pages of 4 KiB
        that costs the processor {costs[0]} times what a copy of shared memory does, on pages of 2 MiB {costs[1]}
        times, by the size of the blocks (`python -m benchmarks.pages`). Neither two copiers, more ranges in a call,
        the other direction nor a buffer in the cache in between makes up for small pages. So softnpu moves a region
        to huge pages: of up to 256 MiB when it is registered, a larger one behind that; numpy's arrays from 4 MiB up
        have them already. What is under `MADV_NOHUGEPAGE`, and all regions before Linux 6.1 or where the machine has
        no 2 MiB in one piece left, stay on small pages. `aiodatadist.empty` and `torch_empty` give arrays and tensors
        that are shared to begin with: these have a pool's speed.""",
        """A region of GiBs is slower than one of 256 MiB, and so is a pool of GiBs: the processor looks up more addresses
        than its tables hold, twice in a virtual machine.""",
    )


def facade_waits(others: Others) -> str:
    medians = {row["what"]: row["median us"].median for row in others.facade}
    after = [
        median / medians[what.replace("after work", "idle")]
        for what, median in medians.items()
        if what.endswith("after work")
    ]
    return wrapped(
        f"""Where a goal is missed: a first pull is three turns of an event loop and many calls of Python, of both ends, each
        of which runs once, with cold caches. A call of the facade waits for the interpreter's lock while the loop's
        thread has it, for waking another core, which a virtual machine may have put to sleep, and for two threads
        that copy: its 99th percentiles differ from round to round, as the quartiles say. `after work` is no waiting:
        its medians are {extremes(after)} times those of `idle`, because the processor's caches are full of what its
        caller did before."""
    )


def every_form(rows: Sequence[dict[str, Any]]) -> str:
    """Describe what the forms of a small transfer cost: calls and ratios, which a busy machine changes less than times."""
    by_form: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_form.setdefault(row["what"].rpartition(", ")[0], []).append(row)
    plain = by_form["pull_blocks"]
    lines = [
        [
            f"`{form}`",
            str(found[0]["calls"]),
            *(f"{one['CPU us'] / of['CPU us']:.2f}" for one, of in zip(found, plain, strict=True)),
        ]
        for form, found in by_form.items()
    ]
    return f"""## Every form of a small transfer

One block or slot of four tensors, from the third transfer of a form on: the functions of the package that it enters at this
end, and this end's CPU time by that of a plain `pull_blocks`, in turns with it.

{table(["form", "calls", "CPU time, 64 bytes", "CPU time, 16 KiB"], lines)}

```console
$ python -m benchmarks.forms
```

A notification is a message, which is made, sealed and written in the call. A checksum is a question to the peer and its
answer. With both ends in one process, such a pull takes 3 to 4 times the CPU time of an echo of two such messages.

"""


def _of(rows: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{one['CPU us'] / other['CPU us']:.2f}" for one, other in zip(rows, plain, strict=True)]


def wrapped(*paragraphs: str) -> str:
    return "\n\n".join(fill(" ".join(each.split()), 126, break_on_hyphens=False) for each in paragraphs)


def other_goals(large: Sequence[Row], small: Sequence[Row], others: Others) -> str:
    head = ["what", "here", "goal", "it is", "command"]
    found = table(head, [goal.cells for goal in goals_of(large, small, others)])
    return f"""## What has a goal

Medians decide, of windows, rounds or turns; their quartiles are in parentheses.

{found}

{facade_waits(others)}

{user_memory(large, others)}

"""


def page(large: BenchReport, small: BenchReport, others: Others | None = None) -> str:
    """Write the page, without the goals if the other results were not measured."""
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

Awaited one behind the other, of two tensors; microseconds, with the quartiles of the windows.

{table(small_head, small_lines(small.rows))}

```console
$ {SMALL_COMMAND}
```

The median is what a call costs that never leaves C and its Python wrapper. Fewer than one transfer in a hundred gives way to
the event loop, which inline work may keep for a millisecond: that turn of the loop is beyond the 99th percentile, unless the
machine is busy.

{every_form(others.forms) + other_goals(large.rows, small.rows, others) if others else ""}## Where others are faster

{chr(10).join(losses([large, small])) or "- nowhere in this run"}
"""


async def measured(options: BenchOptions) -> BenchReport:
    found = await measure_cases(options, options.cases())
    wrong = [line for row in found.rows for line in row.wrong or ()]
    if found.failure is not None or wrong:
        raise SystemExit(found.failure or "\n".join(wrong))
    return found


async def both(seconds: float | None) -> tuple[BenchReport, BenchReport]:
    return await measured(shortened(LARGE, seconds)), await measured(shortened(SMALL, seconds))


def shortened(options: BenchOptions, seconds: float | None) -> BenchOptions:
    return options if seconds is None else replace(options, lengths=Lengths(seconds=seconds))


def measured_others(seconds: float | None, rounds: int) -> Others:
    """Measure the other results, each on its own event loop. No loop runs while the facade is measured."""
    return Others(
        shares=asyncio.run(copies.shares(seconds or 2.0)),
        batched=asyncio.run(measured(shortened(BATCHED, seconds))).rows[0],
        layered={block: asyncio.run(layers.ratio_of_large(block, 20 * rounds)) for block in layers.LARGE_BLOCKS},
        link_seconds=Spread.of([asyncio.run(scale.seconds_to_link(512)) for _ in range(rounds)]),
        first_pull=asyncio.run(scale.seconds_of_first_pull(2 * rounds, 100)),
        slowed=slowed_with_one_copier(3 * rounds),
        facade=facade_rows(rounds),
        pages=list(pages.rows(seconds or 1.0)),
        forms=asyncio.run(forms.measure_all(4 * rounds, 100)),
        cliffs=cliffs.largest(asyncio.run(cliffs.steps())),
        first_touch=first_touch.ratios(rounds),
        regions=list(regions.ratios(asyncio.run(regions.times(4 << 30, 8 * rounds, cpu=False))[0])),
    )


def slowed_with_one_copier(rounds: int) -> Spread:
    """Return the percent by which one copier slows a matrix product.

    This needs its own process: the number of copiers is read once.
    """
    with TemporaryDirectory() as folder:
        into = Path(folder) / "overlap.json"
        command = [sys.executable, "-m", "benchmarks.overlap", "--rounds", str(rounds), "--json", str(into)]
        subprocess.run(command, env={**os.environ, "SOFTNPU_COPIERS": "1"}, stdout=subprocess.DEVNULL, check=True)
        rows = json.loads(into.read_text(encoding="utf-8"))["rows"]
    return next(Spread.model_validate(row["slowed %"]) for row in rows if row["compute"] == "gemm")


def facade_rows(rounds: int) -> list[dict[str, Any]]:
    with facade.linked() as ends:
        return facade.spread_of([list(facade.submissions(ends, 2000)) for _ in range(rounds)])


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, metavar="S", help="of transfers for each row (2 and 1)")
    parser.add_argument("--rounds", type=int, metavar="N", default=5, help="of links and of the facade's calls (5)")
    parser.add_argument("--into", type=Path, metavar="FOLDER", default=DOCS, help="where the page goes (docs)")
    given = parser.parse_args()
    if find_spec("matplotlib") is None:
        raise SystemExit("the picture of the page needs the extra plot: pip install '.[plot]'")
    large, small = asyncio.run(both(given.seconds))
    others = measured_others(given.seconds, given.rounds)
    given.into.joinpath("performance.md").write_text(page(large, small, others), encoding="utf-8")
    draw(large, given.into / "performance.svg")


if __name__ == "__main__":
    main()
