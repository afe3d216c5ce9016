"""Links on which nothing moves live for as long as both processes do, and end in time when one of them does not."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest

from aiodatadist import LLMClusterInfo
from aiodatadist.testing import Cluster, open_cluster

LINKS = 16
BRISK = {"heartbeat_interval": 100, "heartbeat_misses": 3}
DEFAULTS: dict[str, Any] = {}


class Clients:
    """So many clusters in a process of their own, each linked to the one of this process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def links(self) -> int:
        """How many there are at their end, by now."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return int(await self._process.stdout.readline())


@asynccontextmanager
async def linked_by_many(**options: Any) -> AsyncIterator[tuple[Cluster, Clients]]:
    """A cluster that listens, and its clients on the same kind of loop."""
    async with open_cluster(100, device_id=7, **options) as cluster:
        assert cluster.datadist.listen_address is not None
        host, port = cluster.datadist.listen_address
        kind = type(asyncio.get_running_loop()).__module__
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.faults.test_idle_links", kind, host, str(port), json.dumps(options),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            clients = Clients(process)
            assert await clients.links() == LINKS
            yield cluster, clients
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


def count(cluster: Cluster) -> int:
    return len(cluster.datadist.statistics().links)


async def left_alone(options: dict[str, Any], seconds: float) -> None:
    """Link, and do nothing."""
    async with linked_by_many(**options) as (cluster, clients):
        await anyio.sleep(seconds)
        left = (count(cluster), await clients.links())
        assert left == (LINKS, LINKS), f"of {LINKS} links so many are left after {seconds:g} s at either end: {left}"


async def test_idle_links_are_not_lost() -> None:
    await left_alone(BRISK, 8)


@pytest.mark.nightly
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("options", "seconds"), [(BRISK, 60), (DEFAULTS, 30)], ids=["brisk", "defaults"])
async def test_idle_links_are_not_lost_in_a_long_time(options: dict[str, Any], seconds: float) -> None:
    await left_alone(options, seconds)


# ---- the clients ----


async def main(host: str, port: int, options: dict[str, Any]) -> None:
    peer = LLMClusterInfo(100)
    peer.append_remote_ip_info(host, port)
    async with AsyncExitStack() as stack:
        clusters = [
            await stack.enter_async_context(open_cluster(number + 1, device_id=number % 7, **options))
            for number in range(LINKS)
        ]
        for cluster in clusters:
            await cluster.datadist.link_clusters([peer], 20_000)
        while await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            print(sum(map(count, clusters)), flush=True)


if __name__ == "__main__":
    anyio.run(main, sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]),
              backend_options={"use_uvloop": sys.argv[1].startswith("uvloop")})  # fmt: skip
