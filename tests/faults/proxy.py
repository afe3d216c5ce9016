"""A TCP proxy in this process, in front of a cluster that listens: what goes through it can be broken."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiodatadist import LLMClusterInfo

PIECE = 1 << 16
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends RST."""


class _Pipe:
    """A connection: the client's half and the server's."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server

    def reset(self) -> None:
        for half in (self.client, self.server):
            half.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            half.transport.abort()


class Proxy:
    """A proxy that harms connections, as long as it is told to.

    Attributes:
        limits: bytes from client to server after which the next connections are reset, one for each; others are not.
        keeps_open: if True, the server does not hear that a client closed.
        refuses: if True, new connections are reset.
        connections: number of connections that came.
        records: if True, what clients say is kept from now on.
        recorded: what was kept, of each connection.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._pipes: set[_Pipe] = set()
        self._kept: list[_Pipe] = []
        self._port = 0
        self.limits: deque[int] = deque()
        self.keeps_open = self.refuses = False
        self.connections = 0
        self.records = False
        self.recorded: list[bytearray] = []

    def info(self, cluster_id: int) -> LLMClusterInfo:
        """Return the address of the cluster behind the proxy: the proxy's."""
        info = LLMClusterInfo(cluster_id)
        info.append_remote_ip_info("127.0.0.1", self._port)
        return info

    def reset(self) -> None:
        """Reset all connections."""
        for pipe in list(self._pipes):
            pipe.reset()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        limit = self.limits.popleft() if self.limits else None
        try:
            if self.refuses:
                raise ConnectionResetError
            there_reader, there = await asyncio.open_connection(*self._address)
        except OSError:
            writer.transport.abort()
            return
        pipe = _Pipe(writer, there)
        record = bytearray()
        if self.records:
            self.recorded.append(record)
        self._pipes.add(pipe)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(pipe, there_reader, writer, None))
                await self._copy(pipe, reader, there, limit, record)
                if self.keeps_open:
                    self._kept.append(pipe)
                    await asyncio.Event().wait()
                there.transport.abort()
        finally:
            self._pipes.discard(pipe)
            for half in (writer, there):
                half.transport.abort()

    async def _copy(
        self,
        pipe: _Pipe,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limit: int | None,
        record: bytearray | None = None,
    ) -> None:
        passed = 0
        try:
            while data := await reader.read(PIECE):
                passed += len(data)
                if record is not None and self.records:
                    record += data
                if limit is not None and passed > limit:
                    pipe.reset()
                    return
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        if writer is pipe.client:
            writer.transport.abort()


@asynccontextmanager
async def proxy(address: tuple[str, int] | None) -> AsyncIterator[Proxy]:
    """Run a proxy in front of a cluster's ``listen_address``."""
    assert address is not None
    made = Proxy(address)
    tasks: set[asyncio.Task[None]] = set()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(made._serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made._port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
