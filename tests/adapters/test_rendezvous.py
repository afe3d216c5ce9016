"""Where prefill ranks tell their addresses: a peer that asks gets all of them or none, and no client can stop it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import anyio
import pytest

from aiodatadist import LLMException
from aiodatadist.adapters import rendezvous
from aiodatadist.adapters.peer_links import PeerAddress
from aiodatadist.adapters.rendezvous import Ranks, Registered, RendezvousServer
from aiodatadist.adapters.rendezvous_lines import MAX_QUESTION

LAYOUT: dict[str, str | int] = {"page_size": 16}


def worker(rank: int, ranks: int = 2, port: int = 5000) -> Registered:
    address = PeerAddress(cluster_id=7, host="127.0.0.1", port=port)
    return Registered(rank=rank, ranks=ranks, address=address, layout=LAYOUT)


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with closing(RendezvousServer("127.0.0.1", 0)) as made:
        yield made


async def test_all_ranks_or_none(server: RendezvousServer) -> None:
    assert await rendezvous.ask("127.0.0.1", server.port) is None
    await rendezvous.register("127.0.0.1", server.port, worker(1))
    assert await rendezvous.ask("127.0.0.1", server.port) is None
    await rendezvous.register("127.0.0.1", server.port, worker(0))
    told = await rendezvous.ask("127.0.0.1", server.port)
    assert told == Ranks(layout=LAYOUT, addresses=[worker(0).address, worker(1).address])
    await rendezvous.register("127.0.0.1", server.port, worker(1, port=6000))
    told = await rendezvous.ask("127.0.0.1", server.port)
    assert told is not None
    assert told.addresses[1].port == 6000


async def test_clients_that_say_nothing_or_garbage(server: RendezvousServer, caplog: pytest.LogCaptureFixture) -> None:
    await rendezvous.register("127.0.0.1", server.port, worker(0, 1))
    with closing(socket.create_connection(("127.0.0.1", server.port))):
        assert await rendezvous.ask("127.0.0.1", server.port) is not None, "beside a client that is silent"
        for said in (
            b"\n",
            b"{}\n",
            b'{"type": "register", "worker": {"rank": -1}}\n',
            b"\0" * 1000 + b"\n",
            b"GET / HTTP/1.1\n",
        ):
            async with await anyio.connect_tcp("127.0.0.1", server.port) as client:
                await client.send(said)
                assert b'"refused"' in await client.receive()
        async with await anyio.connect_tcp("127.0.0.1", server.port) as client:
            with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream, ConnectionError)):  # noqa: PT012
                await client.send(b"x" * (2 * MAX_QUESTION))
                await client.receive()
    assert "the rendezvous refused 127.0.0.1" in caplog.text
    assert await rendezvous.ask("127.0.0.1", server.port) is not None


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


def test_its_loop_is_its_own_and_ends_with_it(server: RendezvousServer) -> None:
    def loops() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("aiodatadist ")]

    assert loops() == ["aiodatadist rendezvous"]
    server.close()
    assert loops() == []
