"""Measure how soon a caller learns that its peer was killed.

A peer in a process of its own is killed (SIGKILL) at a moment drawn by chance, again and again. Time is from the signal until
the awaiting call raises: `idle` waits for the end of the link, `pull` moves 16 MiB at a time between arrays of both ends, and
`request` asks the peer to write them; `reclaimed` is until this end's cache can be given back. Bars: 50 ms at the 99th
percentile, 100 ms for what is reclaimed. The kinds take turns.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMException,
    NotLinked,
)
from aiodatadist.testing import Cluster, open_cluster
from benchmarks.common import arguments, now, percentile, report
from benchmarks.peers import clusters, info_of, link_to, process_of

DESC = CacheDesc(4, [64, 64 << 10], DataType.DT_UINT8)
BLOCKS = list(range(64))
LONGEST_WAIT = 0.05
"""Seconds from the first transfer to the signal, at most."""

Wait = Callable[[Cluster, Cache], Awaitable[None]]


async def end_of_link(cluster: Cluster, _: Cache) -> None:
    await cluster.datadist.wait_link_closed(1)


async def end_of_pulls(cluster: Cluster, cache: Cache) -> None:
    try:
        while True:
            await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, BLOCKS, BLOCKS)
    except LLMException:
        return


KINDS: dict[str, tuple[bool, Wait]] = {
    "idle": (True, end_of_link),
    "pull": (True, end_of_pulls),
    "request": (False, end_of_pulls),
}


async def one(one_sided: bool, wait: Wait) -> tuple[float, float]:
    """Kill a peer once. Return the seconds until the call has raised, and until the cache is given back."""
    options: dict[str, Any] = {"enable_remote_cache_accessible": one_sided}
    peer = process_of(clusters, [1], DESC, options)
    async with peer as (pid, (address,)), open_cluster(2, device_id=1, **options) as cluster:
        cache = await cluster.blocks(DESC)
        await link_to(cluster.datadist, info_of(1, address))
        return await killed(pid, wait, cluster, cache)


async def killed(pid: int, wait: Wait, cluster: Cluster, cache: Cache) -> tuple[float, float]:
    at = 0.0

    async def kill() -> None:
        nonlocal at
        await anyio.sleep(random.uniform(0, LONGEST_WAIT))
        at = now()
        os.kill(pid, signal.SIGKILL)

    async with anyio.create_task_group() as group:
        group.start_soon(kill)
        await wait(cluster, cache)
        told = now() - at
    with suppress(NotLinked):  # it is closed
        await cluster.datadist.wait_link_closed(1)
    await cluster.datadist.cache_manager.unregister_cache(cache.cache_id)
    return told, now() - at


async def measure(rounds: int) -> list[dict[str, Any]]:
    told: dict[str, list[float]] = {kind: [] for kind in KINDS}
    reclaimed: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, (one_sided, wait) in KINDS.items():
            seconds = await one(one_sided, wait)
            told[kind].append(seconds[0])
            reclaimed[kind].append(seconds[1])
    rows = []
    for what, found in (("told", told), ("reclaimed", reclaimed)):
        for kind, each in found.items():
            points = {f"p{point} ms": f"{percentile(each, point) * 1e3:.2f}" for point in (50, 90, 99)}
            rows.append({"what": f"{what}, {kind}", "kills": rounds, **points, "max ms": f"{max(each) * 1e3:.2f}"})
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=100, metavar="N", help="kills of each kind (100)")
    given = parser.parse_args()
    report("killed: from SIGKILL of the peer", anyio.run(measure, given.rounds), given.json)


if __name__ == "__main__":
    main()
