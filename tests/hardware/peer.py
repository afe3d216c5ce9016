"""The other end, in a process of its own: clusters that do what a test tells them over a connection.

On another server it is started by hand::

    python -m tests.hardware.peer --device 0 --host ADDRESS_OF_THIS_SERVER --port 26100

It opens clusters for any program that connects: run it in a network of your own only, and end it afterwards.
"""

from __future__ import annotations

import argparse
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from tests.hardware.member import Mark, Member, address_of, member
from tests.hardware.place import Place

LONGEST = 16 << 20
"""Bytes of one line: the marks of some ten thousand blocks."""


class Peer:
    """The clusters of one connection, and what it can tell them: a verb is a method."""

    def __init__(self, place: Place, stack: AsyncExitStack) -> None:
        self._place = place
        self._stack = stack
        self._members: dict[int, tuple[Member, AsyncExitStack]] = {}

    async def open(self, cluster_id: int, pool: int, options: dict[str, Any]) -> tuple[str, int]:
        """Open a further cluster and return its address."""
        own = await self._stack.enter_async_context(AsyncExitStack())
        opened = await own.enter_async_context(member(self._place, cluster_id, pool, **options))
        self._members[cluster_id] = opened, own
        address = opened.datadist.listen_address
        assert address is not None
        return address

    async def close(self, cluster_id: int) -> None:
        _, own = self._members.pop(cluster_id)
        await own.aclose()

    async def allocate(self, cluster_id: int, tensors: int, blocks: int, nbytes: int) -> None:
        await self._at(cluster_id).allocate(tensors, blocks, nbytes)

    async def fill(self, cluster_id: int) -> None:
        await self._at(cluster_id).fill()

    async def whose(self, cluster_id: int) -> list[list[Mark]]:
        return await self._at(cluster_id).whose()

    async def link(self, cluster_id: int, to: int, host: str, port: int) -> str:
        status, _ = await self._at(cluster_id).datadist.link_clusters([address_of(to, host, port)], 60_000)
        return status.name

    async def links(self, cluster_id: int) -> list[int]:
        return [link.cluster_id for link in self._at(cluster_id).datadist.statistics().links]

    async def pull(self, cluster_id: int, of: int, source: list[int], target: list[int]) -> None:
        await self._at(cluster_id).pull(of, source, target)

    async def push(self, cluster_id: int, to: int, source: list[int], target: list[int], notify: str | None) -> None:
        await self._at(cluster_id).push(to, source, target, notify.encode() if notify is not None else None)

    async def notify(self, cluster_id: int, to: int, payload: str) -> None:
        await self._at(cluster_id).datadist.notify(to, payload.encode())

    async def notes(self, cluster_id: int, count: int) -> list[str]:
        return await self._at(cluster_id).notes(count)

    def _at(self, cluster_id: int) -> Member:
        return self._members[cluster_id][0]


VERBS = ("open", "close", "allocate", "fill", "whose", "link", "links", "pull", "push", "notify", "notes")


async def answer(peer: Peer, line: bytes) -> dict[str, Any]:
    """Answer one request. A failure is an answer, too: the test's end raises it."""
    request = json.loads(line)
    if request["verb"] not in VERBS:
        return {"failed": f"{request['verb']!r} is none of {', '.join(VERBS)}"}
    try:
        return {"done": await getattr(peer, request["verb"])(**request["arguments"])}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


async def serve(place: Place, port: int, once: bool) -> None:
    """Serve until ended, or with ``once`` until the first connection ends. Print the port that it listens on.

    Connections are served one at a time: the clusters of the one before are gone when the next one is served.
    """
    turn = anyio.Lock()
    async with (
        await anyio.create_tcp_listener(local_host=place.host, local_port=port) as listener,
        anyio.create_task_group() as tasks,
    ):
        print(listener.extra(anyio.abc.SocketAttribute.local_port), flush=True)

        async def handle(connection: SocketStream) -> None:
            lines = BufferedByteReceiveStream(connection)
            async with turn, connection, AsyncExitStack() as stack:
                peer = Peer(place, stack)
                try:
                    while True:
                        line = await lines.receive_until(b"\n", LONGEST)
                        await connection.send(json.dumps(await answer(peer, line)).encode() + b"\n")
                except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
                    pass  # the test is over
            if once:
                tasks.cancel_scope.cancel()

        await listener.serve(handle, tasks)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hardware.peer", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address of this server, under which the other one reaches it"
    )
    parser.add_argument("--port", type=int, default=0, help="where tests connect; 0: a free one, which is printed")
    parser.add_argument("--local-comm-res", type=Path, help="a file; without it the library makes its own")
    parser.add_argument("--once", action="store_true", help="end with the first connection")
    chosen = parser.parse_args()
    anyio.run(serve, Place(chosen.device, chosen.host, chosen.local_comm_res), chosen.port, chosen.once)


if __name__ == "__main__":
    main()
