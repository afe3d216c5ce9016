"""The small table at the end of the demo, computed from the seconds of each pull. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from aiodatadist._cli.demo.messages import Pull
from aiodatadist._cli.kit.numbers import duration, quantity


@dataclass(frozen=True)
class Figures:
    """The figures of one demo's pulls. Bandwidths are in 1e9 bytes per second, latencies in seconds.

    Pulls of one block determine the latency, larger ones everything else. If the prompt is too short for larger ones,
    the small ones must do. Each figure is a median, so that one interruption does not decide it.
    """

    bytes: int
    blocks: int
    ranges: int
    pulls: int
    gb_per_second: float
    memcpy_gb_per_second: float
    memcpy_share: float
    pull_seconds: float
    pull_blocks: int
    block_seconds: float
    first_seconds: float


def figures_of(pulls: Sequence[Pull]) -> Figures:
    """Sum up; ``pulls`` must not be empty."""
    portions = [pull for pull in pulls if pull.blocks > 1] or pulls
    singles = [pull for pull in pulls if pull.blocks == 1]
    return Figures(
        bytes=sum(pull.bytes for pull in pulls),
        blocks=sum(pull.blocks for pull in pulls),
        ranges=sum(pull.ranges for pull in pulls),
        pulls=len(pulls),
        gb_per_second=median(pull.bytes / pull.seconds for pull in portions) / 1e9,
        memcpy_gb_per_second=median(pull.bytes / pull.memcpy_seconds for pull in portions) / 1e9,
        memcpy_share=median(pull.memcpy_seconds / pull.seconds for pull in portions),
        pull_seconds=median(pull.seconds for pull in portions),
        pull_blocks=portions[0].blocks,
        block_seconds=median(pull.seconds for pull in singles or portions),
        first_seconds=pulls[0].seconds,
    )


@dataclass(frozen=True)
class Warm:
    """The figures of pulls of all blocks again, into memory that is in use, in turns with plain copies of as much.

    Bandwidths are in 1e9 bytes per second, medians of ``warm_pulls`` pulls; the latency is that of one block alone.
    """

    warm_pulls: int
    warm_gb_per_second: float
    warm_memcpy_gb_per_second: float
    warm_memcpy_share: float
    warm_block_seconds: float


def warm_of(pulls: Sequence[Pull]) -> Warm:
    """Sum up; the first of ``pulls`` is of all blocks."""
    whole = [pull for pull in pulls if pull.blocks == pulls[0].blocks]
    singles = [pull for pull in pulls if pull.blocks == 1]
    speed = median(pull.bytes / pull.seconds for pull in whole) / 1e9
    limit = median(pull.bytes / pull.memcpy_seconds for pull in whole) / 1e9
    return Warm(
        warm_pulls=len(whole),
        warm_gb_per_second=speed,
        warm_memcpy_gb_per_second=limit,
        warm_memcpy_share=speed / limit,
        warm_block_seconds=median(pull.seconds for pull in singles or whole),
    )


def portions_of(count: int, pieces: int = 6, singles: int = 8) -> list[range]:
    """Cut ``count`` blocks into pulls: even pieces first, then some blocks one by one.

    Every block is in exactly one range, in order; two or more blocks make two or more ranges.
    """
    singles = min(singles, count // 2)
    rest = count - singles
    bounds = [rest * piece // pieces for piece in range(pieces + 1)]
    pulls = [range(first, last) for first, last in pairwise(bounds) if last > first]
    return pulls + [range(block, block + 1) for block in range(rest, count)]


def table(figures: Figures, warm: Warm, runtime: str) -> list[tuple[str, str]]:
    """Return the rows of the final table, each with a left and a right column."""
    f = figures
    each = quantity(f.bytes / f.ranges)
    return [
        ("bytes", f"{quantity(f.bytes)} of KV cache in {f.pulls} pulls"),
        ("blocks", f"{f.blocks} blocks of {quantity(f.bytes / f.blocks)}, as {f.ranges} ranges of {each}"),
        ("first pull", f"{duration(f.first_seconds)}, including what is set up once per link"),
        ("first touch", f"{f.gb_per_second:.2f} GB/s: the kernel clears each page of a new cache"),
        ("warm pulls", f"{warm.warm_gb_per_second:.2f} GB/s, median of {warm.warm_pulls} pulls of all blocks"),
        ("memcpy limit", f"{warm.warm_memcpy_gb_per_second:.2f} GB/s, one thread, the same ranges, in turns with them"),
        ("share of limit", f"{warm.warm_memcpy_share:.2f}"),
        ("block latency", f"{duration(warm.warm_block_seconds)} for one block alone"),
        ("runtime", runtime),
    ]


def layered_table(pull: Pull, layers: int, runtime: str) -> list[tuple[str, str]]:
    """Return the table of a cache that came layer by layer."""
    each = quantity(pull.bytes / pull.ranges)
    return [
        ("bytes", f"{quantity(pull.bytes)} of KV cache in {layers} layers"),
        ("blocks", f"{pull.blocks} blocks of {quantity(pull.bytes / pull.blocks)}, as {pull.ranges} ranges of {each}"),
        ("bandwidth", f"{pull.bytes / pull.seconds / 1e9:.2f} GB/s while a layer travels, beside the model"),
        (
            "memcpy limit",
            f"{pull.bytes / pull.memcpy_seconds / 1e9:.2f} GB/s, one thread, as much, with nothing beside it",
        ),
        ("runtime", runtime),
    ]


def v1_table(pull: Pull, runtime: str) -> list[tuple[str, str]]:
    """Return the table of a cache that came with one ``pull_kv``."""
    return [
        ("bytes", f"{quantity(pull.bytes)} of KV cache in one pull_kv, as {pull.ranges} ranges"),
        (
            "pull_kv",
            f"{duration(pull.seconds)}, {pull.bytes / pull.seconds / 1e9:.2f} GB/s, including what a link needs once",
        ),
        ("memcpy limit", f"{pull.bytes / pull.memcpy_seconds / 1e9:.2f} GB/s, one thread, as much in scattered blocks"),
        ("runtime", runtime),
    ]
