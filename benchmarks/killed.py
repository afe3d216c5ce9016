"""Measure how soon a caller learns that its peer was killed.

A peer in a process of its own is killed (SIGKILL) at a moment drawn by chance, again and again. Time is from the signal until
the awaiting call raises: `idle` waits for the end of the link, `pull` moves 16 MiB at a time between arrays of both ends, and
`request` asks the peer to write them; `reclaimed` is until this end's cache can be given back. Bars: 50 ms at the 99th
percentile, 100 ms for what is reclaimed. The kinds take turns.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.to_thread

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMException,
    LLMStatusCode,
    NotLinked,
)
from aiodatadist.testing import Cluster, open_cluster
from benchmarks.common import arguments, now, percentile, report

DESC = CacheDesc(4, [64, 64 << 10], DataType.DT_UINT8)
BLOCKS = list(range(64))
LONGEST_WAIT = 0.05
"""Seconds from the first transfer to the signal, at most."""

Wait = Callable[[Cluster, Cache], Awaitable[None]]


def host_peer(one_sided: bool, port: Connection) -> None:
    """Run the peer in a separate process."""
    anyio.run(_host_peer, one_sided, port)


async def _host_peer(one_sided: bool, port: Connection) -> None:
    async with open_cluster(1, enable_remote_cache_accessible=one_sided) as peer:
        await peer.blocks(DESC)
        port.send(peer.datadist.listen_address)
        await anyio.to_thread.run_sync(port.recv)


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
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=host_peer, args=(one_sided, theirs), daemon=True)
    process.start()
    try:
        address = await anyio.to_thread.run_sync(ours.recv)
        async with open_cluster(2, device_id=1, enable_remote_cache_accessible=one_sided) as cluster:
            cache = await cluster.blocks(DESC)
            info = LLMClusterInfo(1)
            info.append_remote_ip_info(*address)
            status, _ = linked = await cluster.datadist.link_clusters([info], 10_000)
            if status is not LLMStatusCode.LLM_SUCCESS:
                raise SystemExit(f"the peer could not be linked: {linked.errors}")
            return await killed(process.pid or 0, wait, cluster, cache)
    finally:
        process.kill()
        await anyio.to_thread.run_sync(process.join)
        process.close()


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
