"""Clusters in processes of their own, and links to them."""

from __future__ import annotations

import multiprocessing
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.to_thread

from aiodatadist import CacheDesc, LLMClusterInfo, LLMDataDist, LLMStatusCode
from aiodatadist.testing import open_cluster

Serve = Callable[..., AbstractAsyncContextManager[object]]
"""Opens in the other process what there is, and yields what this one is told of it."""


def _host(port: Connection, serve: Serve, words: Sequence[object]) -> None:
    async def host() -> None:
        async with serve(*words) as message:
            port.send(message)
            await anyio.to_thread.run_sync(port.recv)

    anyio.run(host)


class Peer:
    """A process that runs ``serve(*words)`` until it is killed."""

    def __init__(self, serve: Serve, *words: object) -> None:
        self._port, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_host, args=(theirs, serve, words), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    async def message(self) -> Any:
        """Wait until the process is ready, and return what it has told."""
        return await anyio.to_thread.run_sync(self._port.recv)

    async def kill(self) -> None:
        self._process.kill()
        await anyio.to_thread.run_sync(self._process.join)
        self._process.close()
        self._port.close()


@asynccontextmanager
async def process_of(serve: Serve, *words: object) -> AsyncIterator[tuple[int, Any]]:
    """Run ``serve(*words)`` in its own process, which is killed at the end. Yield its pid and its message."""
    peer = Peer(serve, *words)
    try:
        yield peer.pid, await peer.message()
    finally:
        with anyio.CancelScope(shield=True):
            await peer.kill()


@asynccontextmanager
async def clusters(
    ids: Sequence[int], desc: CacheDesc, options: dict[str, Any]
) -> AsyncIterator[list[tuple[str, int]]]:
    """Open clusters, each with a blocks cache, and yield their addresses."""
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(open_cluster(cluster_id, **options)) for cluster_id in ids]
        for cluster in opened:
            await cluster.blocks(desc)
        yield [cluster.datadist.listen_address or ("", 0) for cluster in opened]


def info_of(cluster_id: int, address: tuple[str, int]) -> LLMClusterInfo:
    info = LLMClusterInfo(cluster_id)
    info.append_remote_ip_info(*address)
    return info


async def link_to(datadist: LLMDataDist, *infos: LLMClusterInfo) -> None:
    """Link to clusters, or end the benchmark."""
    linked = await datadist.link_clusters(infos, 60_000)
    if linked.status is not LLMStatusCode.LLM_SUCCESS:
        raise SystemExit(f"not all peers could be linked: {[str(error) for error in linked.errors if error]}")
