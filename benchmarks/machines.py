"""Measure pulls and pushes between two machines with ``transport="tcp"``, beside plain TCP with as many connections.

One end serves both contenders, on a port and the next one; the other end measures, each round in another order::

    python -m benchmarks.machines serve 10.0.0.5 7000
    python -m benchmarks.machines measure 10.0.0.5 7000

On one machine, two network namespaces joined by a veth pair are as good as two machines (``ip netns exec NAME ...``). Blocks
lie scattered in the memory of both ends, for both contenders. Processor seconds are of both ends: of whole processes for
aiodatadist, of the threads that move bytes for plain TCP. A ratio compares the two contenders of one round; the table has its
median, and its quartiles as the spread. Bytes travel plain unless ``--sealed`` is given.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_network
from typing import Any

import anyio
import anyio.to_thread

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, DataType
from aiodatadist.testing import Cluster, open_cluster
from benchmarks import raw_tcp
from benchmarks.common import arguments, in_turns, now, report
from benchmarks.peers import info_of, link_to
from benchmarks.raw_tcp import Measured

BLOCKS = (64 << 10, 1 << 20)
STREAMS = (1, 4)
SIZE, TENSORS = 128 << 20, 2
"""The bytes of a transfer, and of each cache, and the tensors over which they are spread."""
KEY = "a key of benchmarks, which is no secret"
OURS, PLAIN = "aiodatadist", "plain TCP"
Transfer = Callable[[], Awaitable[Measured]]


def options(host: str, streams: int, sealed: bool) -> dict[str, Any]:
    """Return the options of an end. Unless they are sealed, bytes travel plain in the network of the end that serves."""
    network = ip_network(f"{host}/{64 if ':' in host else 24}", strict=False)
    plain = {} if sealed else {"tcp_plain_networks": str(network)}
    return {"transport": "tcp", "tcp_streams": streams, "auth_key": KEY, **plain}


async def caches(cluster: Cluster) -> dict[int, Cache]:
    """Register a cache for each size of blocks. Its model is that size."""
    return {
        block: await cluster.blocks(
            CacheDesc(TENSORS, [SIZE // TENSORS // block, block], DataType.DT_UINT8), model_id=block
        )
        for block in BLOCKS
    }


# ---- the end that serves ----


async def serve(host: str, port: int, size: int) -> None:
    """Serve until killed."""
    memory = memoryview(bytearray(size))
    with socket.create_server((host, port + 1), family=family_of(host)) as listener:
        threading.Thread(target=raw_tcp.serve, args=(listener, memory), daemon=True).start()
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        async with open_cluster(1, listen_ip_info=place, **options(host, max(STREAMS), sealed=False)) as cluster:
            await caches(cluster)
            print("ready", flush=True)
            async for note in cluster.datadist.notifications():
                used = json.dumps(time.process_time())
                await cluster.datadist.notify(note.cluster_id, used.encode())


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


# ---- the end that measures ----


async def processor_seconds(cluster: Cluster) -> float:
    """Return the processor seconds of both processes so far."""
    await cluster.datadist.notify(1, b"processor seconds")
    theirs = json.loads((await anext(cluster.datadist.notifications())).payload)
    return float(theirs) + time.process_time()


async def ours(cluster: Cluster, cache: Cache, block: int, what: str) -> Measured:
    """Pull or push all blocks once."""
    order = list(range(SIZE // TENSORS // block))
    random.Random(1).shuffle(order)
    used = await processor_seconds(cluster)
    began = now()
    manager, key = cluster.datadist.cache_manager, BlocksCacheKey(1, block)
    await (manager.pull_blocks if what == "pull" else manager.push_blocks)(key, cache, order, order)
    seconds = now() - began
    return Measured(seconds, await processor_seconds(cluster) - used)


async def plain(socks: list[socket.socket], memory: memoryview, block: int, what: str) -> Measured:
    return await anyio.to_thread.run_sync(partial(raw_tcp.transfer, socks, memory, block, pulls=what == "pull"))


async def measure(host: str, port: int, rounds: int, sealed: bool) -> list[dict[str, Any]]:
    rows = []
    memory = memoryview(bytearray(SIZE))
    for streams in STREAMS:
        async with open_cluster(2, listen_ip_info=None, **options(host, streams, sealed)) as cluster:
            own = await caches(cluster)
            await link_to(cluster.datadist, info_of(1, (host, port)))
            with ExitStack() as stack:
                socks = [stack.enter_context(socket.create_connection((host, port + 1))) for _ in range(streams)]
                for sock in socks:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for block in BLOCKS:
                    for what in ("pull", "push"):
                        contenders: dict[str, Transfer] = {
                            OURS: partial(ours, cluster, own[block], block, what),
                            PLAIN: partial(plain, socks, memory, block, what),
                        }
                        rows.append(row(what, block, streams, await in_turns(contenders, rounds, warm=2)))
    return rows


def row(what: str, block: int, streams: int, found: dict[str, list[Measured]]) -> dict[str, Any]:
    pairs = list(zip(found[OURS], found[PLAIN], strict=True))
    return {
        "what": what,
        "block": f"{block >> 10} KiB",
        "streams": streams,
        "speed, of plain TCP": spread([theirs.seconds / our.seconds for our, theirs in pairs]),
        "CPU s/GB, of plain TCP": spread([our.processor / theirs.processor for our, theirs in pairs]),
        "CPU s/GB": spread([our.processor / (SIZE / 1e9) for our, _ in pairs]),
        "plain TCP": spread([theirs.processor / (SIZE / 1e9) for _, theirs in pairs]),
    }


def spread(values: list[float]) -> str:
    """Return the median, and the quartiles."""
    ordered = sorted(values)
    low, middle, high = (ordered[round(part * (len(ordered) - 1))] for part in (0.25, 0.5, 0.75))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("command", choices=["serve", "measure"])
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="transfers of each kind (15)")
    parser.add_argument("--sealed", action="store_true", help="seal the bytes; plain TCP stays plain")
    given: argparse.Namespace = parser.parse_args()
    if given.command == "serve":
        anyio.run(serve, given.host, given.port, SIZE)
    else:
        rows = anyio.run(measure, given.host, given.port, given.rounds, given.sealed)
        report("transfers between two machines, beside plain TCP", rows, given.json)


if __name__ == "__main__":
    main()
