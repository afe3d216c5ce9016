"""A process on the path between two clusters: it sees each frame and each heartbeat, and passes on what it likes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Literal

from aiodatadist import LLMClusterInfo
from aiodatadist._concurrency.signal import Signal
from aiodatadist._wire.frames import HEAD, MAGIC, SEALED_VERSION
from aiodatadist.testing import Cluster

BEAT = 24
"""Bytes of a sealed heartbeat."""
Way = Literal["to_server", "to_client"]
Decide = Callable[[Way, str, bytes], list[bytes]]
"""Returns what is passed on for a frame of this kind, or a beat; [frame] if it is left alone."""


def kind_of(frame: bytes) -> str:
    """Return the type of the message in a frame, sealed or not."""
    content = frame[HEAD.size :]
    kind = json.JSONDecoder().raw_decode(content.decode("latin-1"))[0]["type"]
    assert isinstance(kind, str)
    return kind


def as_it_is(_: Way, __: str, piece: bytes) -> list[bytes]:
    return [piece]


class Path:
    """The connections between one client and a server.

    Attributes:
        decide: decides about each frame and beat.
        seen: all bytes that went by.
        beats: the heartbeats that went by.
        frames: the frames that went by.
        kinds: the types of their messages.
        connections: the number of connections that came.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self.port = 0
        self.decide: Decide = as_it_is
        self.seen: dict[Way, bytearray] = {"to_server": bytearray(), "to_client": bytearray()}
        self.beats: dict[Way, list[bytes]] = {"to_server": [], "to_client": []}
        self.frames: dict[Way, list[bytes]] = {"to_server": [], "to_client": []}
        self.kinds: list[str] = []
        self._writers: dict[tuple[Way, bool], asyncio.StreamWriter] = {}
        self.connections = 0
        self._news = Signal()

    async def wait_beats(self, *ways: Way) -> None:
        """Wait until a heartbeat of each of these ways has gone by."""
        while not all(self.beats[way] for way in ways):
            await self._news.wait()

    def sealed(self, way: Way) -> list[bytes]:
        """Return the sealed frames that went this way."""
        return [frame for frame in self.frames[way] if HEAD.unpack_from(frame)[1] == SEALED_VERSION]

    def info(self, cluster_id: int) -> LLMClusterInfo:
        """Return the address of the cluster behind the path: this process's."""
        info = LLMClusterInfo(cluster_id)
        info.append_remote_ip_info("127.0.0.1", self.port)
        return info

    def inject(self, way: Way, data: bytes, *, beats: bool = False) -> None:
        """Send bytes to one of the ends, over the link's connection or that of its heartbeats."""
        self._writers[way, beats].write(data)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there = await asyncio.open_connection(*self._address)
        for_beats = self.connections > 0
        self.connections += 1
        self._writers["to_server", for_beats], self._writers["to_client", for_beats] = there, writer
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry("to_server", for_beats, reader, there))
                group.create_task(self._carry("to_client", for_beats, there_reader, writer))
        finally:
            writer.transport.abort()
            there.transport.abort()

    async def _carry(
        self, way: Way, for_beats: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                piece = await self._next(way, for_beats, reader)
                self.seen[way] += piece
                writer.writelines(self._passed_on(way, piece))
                await writer.drain()
        writer.close()

    async def _next(self, way: Way, for_beats: bool, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readexactly(HEAD.size)
        if for_beats and not head.startswith(MAGIC):
            return head + await reader.readexactly(BEAT - HEAD.size)
        *_, length = HEAD.unpack(head)
        return head + await reader.readexactly(length)

    def _passed_on(self, way: Way, piece: bytes) -> list[bytes]:
        if not piece.startswith(MAGIC):
            self.beats[way].append(piece)
            self._news.wake()
            return self.decide(way, "beat", piece)
        kind = kind_of(piece)
        self.kinds.append(kind)
        self.frames[way].append(piece)
        return self.decide(way, kind, piece)


@asynccontextmanager
async def on_the_path(server: Cluster) -> AsyncIterator[Path]:
    """Run a process on the path to a cluster."""
    address = server.datadist.listen_address
    assert address is not None
    path, tasks = Path(address), set[asyncio.Task[None]]()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made: Awaitable[None] = path.serve(reader, writer)
        task = asyncio.ensure_future(made)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    path.port = listener.sockets[0].getsockname()[1]
    try:
        yield path
    finally:
        listener.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
