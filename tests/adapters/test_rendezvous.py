"""Where prefill ranks tell their addresses: a peer that asks gets all of them or none, and no client can stop it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import anyio
import pytest

from aiodatadist import LLMException
from aiodatadist.adapters import rendezvous
from aiodatadist.adapters.peer_links import PeerAddress
from aiodatadist.adapters.rendezvous import Registered, RendezvousServer

LAYOUT: dict[str, str | int] = {"page_size": 16}


def worker(rank: int, ranks: int = 2, port: int = 5000) -> Registered:
    address = PeerAddress(cluster_id=7, host="10.0.0.1", port=port)
    return Registered(rank=rank, ranks=ranks, address=address, layout=LAYOUT)


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with closing(RendezvousServer("127.0.0.1", 0)) as made:
        yield made


async def test_all_ranks_or_none(server: RendezvousServer) -> None:
    assert await rendezvous.ask("127.0.0.1", server.port) == []
    await rendezvous.register("127.0.0.1", server.port, worker(1))
    assert await rendezvous.ask("127.0.0.1", server.port) == []
    await rendezvous.register("127.0.0.1", server.port, worker(0))
    assert await rendezvous.ask("127.0.0.1", server.port) == [worker(0), worker(1)]
    await rendezvous.register("127.0.0.1", server.port, worker(1, port=6000))
    assert (await rendezvous.ask("127.0.0.1", server.port))[1].address.port == 6000


async def test_clients_that_say_nothing_or_garbage(
    server: RendezvousServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "SECONDS", 0.3)
    await rendezvous.register("127.0.0.1", server.port, worker(0, 1))
    with closing(socket.create_connection(("127.0.0.1", server.port))):
        assert len(await rendezvous.ask("127.0.0.1", server.port)) == 1, "beside a client that is silent"
        for said in (
            b"\n",
            b"{}\n",
            b'{"op": "register", "worker": {"rank": -1}}\n',
            b"\0" * 1000 + b"\n",
            b"GET / HTTP/1.1\n",
        ):
            async with await anyio.connect_tcp("127.0.0.1", server.port) as client:
                await client.send(said)
                assert await client.receive() == b"\n"
        async with await anyio.connect_tcp("127.0.0.1", server.port) as client:
            with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream, ConnectionError)):  # noqa: PT012
                await client.send(b"x" * (2 * rendezvous.MAX_LINE))
                await client.receive()
    assert "is no question" in caplog.text
    assert len(await rendezvous.ask("127.0.0.1", server.port)) == 1


async def test_what_does_not_answer_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SECONDS", 0.3)
    with pytest.raises(LLMException, match="does not answer"):
        await rendezvous.ask("127.0.0.1", 1)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)

    async def say(client: anyio.abc.ByteStream) -> None:
        async with client:
            await client.send(b"HTTP/1.1 400 Bad Request\n")

    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, say)
        with pytest.raises(LLMException, match="does not answer as a rendezvous"):
            await rendezvous.ask("127.0.0.1", port)
        group.cancel_scope.cancel()
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(LLMException, match="does not answer"):
            await rendezvous.ask("127.0.0.1", silent.getsockname()[1])


def test_a_port_that_is_taken_and_closing_twice(server: RendezvousServer) -> None:
    with pytest.raises(OSError, match="in use"):
        RendezvousServer("127.0.0.1", server.port)
    server.close()
    server.close()
    RendezvousServer("127.0.0.1", server.port).close()
