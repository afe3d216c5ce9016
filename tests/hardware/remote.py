"""The peer from the test's end."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.abc import Process, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from aiodatadist import LLMClusterInfo, LLMStatusCode
from tests.hardware.member import Mark, Member, address_of
from tests.hardware.peer import LONGEST
from tests.hardware.place import Place

ANSWER_SECONDS = 200.0
"""HCCL may take 120 for a link."""


class Remote:
    """Clusters in another process.

    Attributes:
        process: where it runs on this machine; None: on another one.
    """

    def __init__(self, connection: SocketStream, process: Process | None) -> None:
        self.process = process
        self._connection = connection
        self._lines = BufferedByteReceiveStream(connection)
        self._addresses: dict[int, tuple[str, int]] = {}

    async def ask(self, verb: str, **arguments: Any) -> Any:
        """Have the peer do something, and return the result. Only one request at a time."""
        with anyio.fail_after(ANSWER_SECONDS):
            await self._connection.send(json.dumps({"verb": verb, "arguments": arguments}).encode() + b"\n")
            answer = json.loads(await self._lines.receive_until(b"\n", LONGEST))
        assert "failed" not in answer, f"the peer's {verb}: {answer['failed']}"
        return answer["done"]

    async def whose(self, cluster_id: int = 1) -> list[list[Mark]]:
        marks = await self.ask("whose", cluster_id=cluster_id)
        return [[None if mark is None else (mark[0], mark[1], mark[2]) for mark in tensor] for tensor in marks]

    async def open(self, cluster_id: int = 1, pool: int = 64 << 20, **options: Any) -> None:
        """Open a cluster there. :meth:`link` links to it."""
        self._addresses[cluster_id] = await self.ask("open", cluster_id=cluster_id, pool=pool, options=options)

    def info(self, cluster_id: int, port: int | None = None) -> LLMClusterInfo:
        """Return the address of a cluster there; ``port`` replaces its own."""
        host, own = self._addresses[cluster_id]
        return address_of(cluster_id, host, own if port is None else port)

    async def link(self, mine: Member, *cluster_ids: int) -> None:
        """Link from here to clusters there."""
        status, each = await mine.datadist.link_clusters([self.info(number) for number in cluster_ids], 60_000)
        assert status is LLMStatusCode.LLM_SUCCESS, each


@asynccontextmanager
async def started(place: Place) -> AsyncIterator[Remote]:
    """Start a peer on this machine, in a new process. It ends with the test."""
    command = [
        sys.executable,
        "-m",
        "tests.hardware.peer",
        "--once",
        "--device",
        str(place.device),
        "--host",
        place.host,
    ]
    if place.resource is not None:
        command += ["--local-comm-res", str(place.resource)]
    async with await anyio.open_process(command, stderr=None) as process:
        try:
            assert process.stdout is not None
            line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 64)
            async with connected(place.host, int(line), process) as remote:
                yield remote
            with anyio.move_on_after(60):
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()


@asynccontextmanager
async def connected(host: str, port: int, process: Process | None = None) -> AsyncIterator[Remote]:
    """Connect to a peer that runs already."""
    async with await anyio.connect_tcp(host, port) as connection:
        yield Remote(connection, process)
