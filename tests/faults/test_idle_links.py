"""Links live for as long as both processes do: those on which nothing moves, and those on which something always does."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMClusterInfo, LLMException, LLMRole
from aiodatadist.testing import Cluster, open_cluster
from tests import children
from tests.held import let_pass

LINKS = 16
BUSY = 4
"""Of them, on which something moves where something moves at all."""
DESC = CacheDesc(2, [64, 1 << 20], DataType.DT_UINT8)
BLOCKS = list(range(64))
BRISK = {"heartbeat_interval": 0.1, "heartbeat_misses": 3}
PATIENT = {"heartbeat_interval": 0.1, "heartbeat_misses": 7}
"""Of a machine on which more is to be done than it has processors for."""
DEFAULTS: dict[str, Any] = {}


class Clients:
    """Clusters in their own process, each linked to the one of this process."""

    def __init__(self, process: children.Process) -> None:
        self._process = process

    async def ask(self) -> tuple[int, int, list[str]]:
        """Return the links at their end, the transfers that ended well, and the reasons why others did not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        links, transfers, errors = json.loads(await self._process.stdout.readline())
        return links, transfers, errors


@asynccontextmanager
async def linked_by_many(busy: int, **options: Any) -> AsyncIterator[tuple[Cluster, Clients]]:
    """Open a cluster that listens, and clients on the same kind of loop, ``busy`` of which push and pull all the time."""
    async with open_cluster(100, LLMRole.MIX, device_id=7, **options) as cluster:
        await cluster.blocks(DESC)
        assert cluster.datadist.listen_address is not None
        host, port = cluster.datadist.listen_address
        kind = type(asyncio.get_running_loop()).__module__
        process = await children.create_subprocess_exec(
            sys.executable, "-m", "tests.faults.test_idle_links", kind, host, str(port), str(busy), json.dumps(options),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            clients = Clients(process)
            assert await clients.ask() == (LINKS, 0, [])
            yield cluster, clients
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


def count(cluster: Cluster) -> int:
    return len(cluster.datadist.statistics().links)


async def left_alone(options: dict[str, Any], seconds: float) -> None:
    """Link, and do nothing."""
    async with linked_by_many(0, **options) as (cluster, clients):
        await let_pass(seconds)
        left = (count(cluster), (await clients.ask())[0])
        assert left == (LINKS, LINKS), f"of {LINKS} links so many are left after {seconds:g} s at either end: {left}"


async def test_idle_links_are_not_lost() -> None:
    await left_alone(DEFAULTS, 6)


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("options", "seconds"), [(BRISK, 60), (DEFAULTS, 30)], ids=["brisk", "defaults"])
async def test_idle_links_are_not_lost_in_a_long_time(options: dict[str, Any], seconds: float) -> None:
    await left_alone(options, seconds)


@asynccontextmanager
async def busy_machine() -> AsyncIterator[None]:
    """Start as many processes that never wait as there are processors."""
    endless = [
        await children.create_subprocess_exec(sys.executable, "-c", "while True: pass")
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for process in endless:
            process.kill()
            await process.wait()


async def moving(seconds: float) -> None:
    """Push and pull on some links, leave the others alone, and have the machine do something else as well."""
    async with linked_by_many(BUSY, **PATIENT) as (cluster, clients), busy_machine():
        await let_pass(seconds)
        links, transfers, errors = await clients.ask()
        assert errors == []
        assert (count(cluster), links) == (LINKS, LINKS)
        assert transfers > BUSY


@pytest.mark.measures
async def test_links_on_a_busy_machine_are_not_lost() -> None:
    await moving(6)


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(700)
async def test_links_on_a_busy_machine_are_not_lost_in_a_long_time() -> None:
    await moving(600)


# ---- the clients ----


class Mover:
    """Pushes to and pulls from the one cluster, until something fails."""

    def __init__(self) -> None:
        self.transfers = 0
        self.errors: list[str] = []

    async def move(self, cluster: Cluster, cache: Cache) -> None:
        manager = cluster.datadist.cache_manager
        try:
            while True:
                await manager.push_blocks(BlocksCacheKey(100), cache, BLOCKS, BLOCKS)
                await manager.pull_blocks(BlocksCacheKey(100), cache, BLOCKS, BLOCKS)
                self.transfers += 2
        except LLMException as error:
            self.errors.append(repr(error))


async def main(host: str, port: int, busy: int, options: dict[str, Any]) -> None:
    peer = LLMClusterInfo(100)
    peer.append_remote_ip_info(host, port)
    mover = Mover()
    async with AsyncExitStack() as stack:
        clusters = [
            await stack.enter_async_context(open_cluster(number + 1, LLMRole.MIX, device_id=number % 7, **options))
            for number in range(LINKS)
        ]
        caches = [await cluster.blocks(DESC) for cluster in clusters[:busy]]
        for cluster in clusters:
            await cluster.datadist.link_clusters([peer], 20_000)
        group = await stack.enter_async_context(anyio.create_task_group())
        while await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            print(json.dumps([sum(map(count, clusters)), mover.transfers, mover.errors]), flush=True)
            while caches:
                group.start_soon(mover.move, clusters[len(caches) - 1], caches.pop())
        group.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main, sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]),
              backend_options={"use_uvloop": sys.argv[1].startswith("uvloop")})  # fmt: skip
