"""Measure what honest peers of a cluster notice of attacks on it.

Two clusters in this process are linked with a key. The attacks come from another process, and are aimed at the port of the
first cluster or, over a link, at its event loop:

- `silent`: connections from another address of this machine that say nothing, 2000 in a second;
- `unproved`: connections that begin with a hello, and never prove the key, 2000 in a second;
- `notifying`: a linked peer sends notifications of 4 KiB without a pause, and the cluster takes none of them.

In each round every attack, and the lack of one, takes its turn. Meanwhile the second cluster pulls 16 KiB in
request/response mode, one pull after the other, and a third cluster links and unlinks. `pull` is the median over that
without an attack in the same round, `link` the 99th percentile of the seconds from the call to the link, and `late` the
99th percentile of how much later than asked for a timer of 1 ms comes. Bars: 1.5, 1 s, and 10 ms. An attacker uses a whole
core if it can, so a machine with two cores and other work to do shows more.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from statistics import median
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, LLMException
from aiodatadist._cli.bench.lateness import ticking
from aiodatadist._wire.frames import encode
from aiodatadist._wire.messages import PROTOCOL, Hello1
from aiodatadist.testing import Cluster, cluster_info, open_cluster
from benchmarks.common import Spread, arguments, in_turns, now, percentile, report, seconds_of
from benchmarks.peers import info_of, link_to, process_of

KEY = b"a key of the benchmark, 32 bytes"
DESC = CacheDesc(1, [4, 16 << 10], DataType.DT_UINT8)
OPTIONS: dict[str, Any] = {"auth_key": KEY, "enable_remote_cache_accessible": False}
FROM = "127.0.0.2"
"""The address of the attacker: addresses share nothing but the limit of all."""
KEPT = 2048
"""Silent connections that the attacker keeps, twice as many as a cluster does."""
RATE, PAUSE = 2000, 0.01
"""Connections in a second, and seconds between two groups of them."""
PULLS, LINKS = 200, 10
Attack = Callable[..., Coroutine[Any, Any, None]]


async def connect(place: tuple[str, int]) -> socket.socket:
    sock = socket.socket()
    try:
        sock.setblocking(False)
        sock.bind((FROM, 0))
        await asyncio.get_running_loop().sock_connect(sock, place)
    except BaseException:
        sock.close()
        raise
    return sock


async def flood(place: tuple[str, int], first: bytes, kept: int, *, task_status: anyio.abc.TaskStatus[None]) -> None:
    """Connect again and again, say ``first``, and keep the newest connections."""
    loop, open_now, due = asyncio.get_running_loop(), deque[socket.socket](), now()
    task_status.started()
    while True:
        for _ in range(int(RATE * PAUSE)):
            with contextlib.suppress(OSError):
                sock = await connect(place)
                open_now.append(sock)
                await loop.sock_sendall(sock, first)
            if len(open_now) > kept:
                open_now.popleft().close()
        due = max(due + PAUSE, now())
        await anyio.sleep(due - now())


HELLO = encode(Hello1(protocols=[PROTOCOL], nonce="a" * 64, key_names=["auth_key"]))


async def notify(place: tuple[str, int], *, task_status: anyio.abc.TaskStatus[None]) -> None:
    async with open_cluster(9, device_id=3, **OPTIONS) as attacker, anyio.create_task_group() as group:
        await link_to(attacker.datadist, info_of(1, place))
        task_status.started()

        async def notify_on() -> None:
            while True:
                with contextlib.suppress(LLMException):
                    await attacker.datadist.notify(1, b"n" * 4096)
                await anyio.lowlevel.checkpoint()

        for _ in range(64):
            group.start_soon(notify_on)


ATTACKS: dict[str, Attack] = {
    "silent": partial(flood, first=b"", kept=KEPT),
    "unproved": partial(flood, first=HELLO, kept=0),
    "notifying": notify,
}


@contextlib.asynccontextmanager
async def attacking(name: str, place: tuple[str, int]) -> AsyncIterator[str]:
    """Attack, in the attacker's process."""
    async with anyio.create_task_group() as group:
        await group.start(ATTACKS[name], place)
        yield name
        group.cancel_scope.cancel()


async def measure(owner: Cluster, pull: Callable[[], Awaitable[object]], third: Cluster) -> tuple[float, float, float]:
    """Return the median of the pulls, the slowest link, and how late the event loop was."""
    links: list[float] = []

    async def link() -> None:
        links.extend(await seconds_of(partial(link_to, third.datadist, cluster_info(owner)), 1))
        await third.datadist.unlink_clusters([cluster_info(owner)], 5000)

    with ticking() as late:
        pulls = await seconds_of(pull, PULLS)
        for _ in range(LINKS):
            await link()
    return median(pulls), percentile(links, 99), percentile(late, 99)


async def main(rounds: int) -> list[dict[str, object]]:
    async with (
        open_cluster(1, **OPTIONS) as owner,
        open_cluster(2, device_id=1, **OPTIONS) as puller,
        open_cluster(3, device_id=2, **OPTIONS) as third,
    ):
        await owner.blocks(DESC)
        cache = await puller.blocks(DESC)
        place = owner.datadist.listen_address or ("", 0)
        await link_to(puller.datadist, cluster_info(owner))

        async def pull() -> None:
            await puller.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])

        async def alone() -> tuple[float, float, float]:
            return await measure(owner, pull, third)

        async def under(name: str) -> tuple[float, float, float]:
            async with process_of(attacking, name, place):
                return await measure(owner, pull, third)

        turns = {"none": alone} | {name: partial(under, name) for name in ATTACKS}
        found = await in_turns(turns, rounds, warm=1)
    rows: list[dict[str, object]] = []
    for name, each in found.items():
        ratios = [one[0] / other[0] for one, other in zip(each, found["none"], strict=True)]
        rows.append(
            {
                "attack": name,
                "pull, us": Spread.of([one[0] * 1e6 for one in each]),
                "pull": median(ratios),
                "link, s": max(one[1] for one in each),
                "late, ms": median(one[2] for one in each) * 1e3,
            }
        )
    return rows


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    report("Honest peers of a cluster under attack", anyio.run(main, given.rounds), given.json)
