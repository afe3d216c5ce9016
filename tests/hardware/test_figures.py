"""Bandwidth and latency by size of a block, as a table beside upstream's. Nothing is asserted of time."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable

import pytest

from tests.hardware import upstream
from tests.hardware.conftest import Pair, linked
from tests.hardware.place import Place
from tests.hardware.remote import Remote

MIB = int(os.environ.get("AIODATADIST_FIGURES_MIB", "128"))
"""MiB that each transfer moves, as upstream's benchmark does."""
ROUNDS = 5
CALLS = 200
SMALL = [64, 4096, 16 << 10]

Call = Callable[[], Awaitable[None]]


async def seconds_of(call: Call, rounds: int) -> float:
    """Return the median. The first call, which may have to ask the peer, does not count."""
    await call()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


async def row_of(pair: Pair, nbytes: int) -> str:
    """Measure scattered blocks. They are shuffled at one end, so that hardly any two of them are one request."""
    blocks = max(2, (MIB << 20) // 2 // nbytes)
    await pair.allocate(2, blocks, nbytes)
    everything = list(range(blocks))
    shuffled = random.Random(nbytes).sample(everything, blocks)
    pulled = await seconds_of(lambda: pair.here.pull(1, everything, shuffled), ROUNDS)
    expected = [[(1, t, everything[shuffled.index(n)]) for n in everything] for t in range(2)]
    assert await pair.here.whose() == expected
    await pair.here.fill()
    pushed = await seconds_of(lambda: pair.here.push(1, everything, shuffled), ROUNDS)
    assert await pair.there.whose() == [
        [(2, t, mark[2]) for mark in tensor if mark] for t, tensor in enumerate(expected)
    ]
    chip, moved = pair.here.datadist.runtime.chip, 2 * blocks * nbytes / 1e9
    published = [upstream.published(chip, what, link, nbytes) for what in ("pull", "push") for link in ("HCCS", "RoCE")]
    return line(f"{nbytes >> 10} KiB", moved / pulled, *published[:2], moved / pushed, *published[2:])


def line(first: str, *figures: float | None) -> str:
    return "| " + " | ".join([first, *("" if figure is None else f"{figure:.2f}" for figure in figures)]) + " |"


async def test_bandwidth(mine: Place, peer: Remote, capsys: pytest.CaptureFixture[str]) -> None:
    async with linked(mine, peer, pool=(MIB + 16) << 20, sync_kv_timeout=60_000) as pair:
        rows = [await row_of(pair, nbytes) for nbytes in upstream.SIZES]
        runtime = pair.here.datadist.runtime
    with capsys.disabled():
        print(f"\n\nGB/s of {MIB} MiB in scattered blocks, median of {ROUNDS}; {runtime.chip}, ACL {runtime.version}")
        print("(upstream: the hixl repository's benchmarks/performance.md, one server; empty: none for this chip)\n")
        print("| block | pull | upstream, HCCS | upstream, RoCE | push | upstream, HCCS | upstream, RoCE |")
        print("| --- " * 7 + "|", *rows, sep="\n")


async def test_latency(mine: Place, peer: Remote, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    async with linked(mine, peer) as pair:
        for nbytes in SMALL:
            await pair.allocate(2, 4, nbytes)
            pulled = await seconds_of(lambda: pair.here.pull(1, [1], [2]), CALLS)
            assert [tensor[2] for tensor in await pair.here.whose()] == [(1, 0, 1), (1, 1, 1)]
            await pair.here.fill()
            pushed = await seconds_of(lambda: pair.here.push(1, [1], [2]), CALLS)
            assert [tensor[2] for tensor in await pair.there.whose()] == [(2, 0, 1), (2, 1, 1)]
            rows.append(line(f"{nbytes} B", pulled * 1e6, pushed * 1e6))
    with capsys.disabled():
        print(f"\n\nmicroseconds of one block of two tensors, median of {CALLS} (upstream publishes none)\n")
        print("| block | pull | push |", "| --- | --- | --- |", *rows, sep="\n")
