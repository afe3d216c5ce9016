"""The rendezvous of prefill ranks: a peer that asks gets all addresses or none, and no client can stop it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress

import anyio
import pytest

from aiodatadist import LinkTimeout, LLMException, ParamInvalid
from aiodatadist._adapters import rendezvous, rendezvous_asks
from aiodatadist._adapters.peer_links import PeerAddress
from aiodatadist._adapters.rendezvous import Ranks, Registered, RendezvousServer
from aiodatadist._adapters.rendezvous_asks import MAX_ASKS, RendezvousAsks
from aiodatadist._adapters.rendezvous_lines import MAX_QUESTION
from aiodatadist._config.trust import AuthKey, Credential, Untrusted
from aiodatadist._testing.views import call_on_loop


def started(asks: RendezvousAsks, port: int) -> Future[Ranks | None]:
    """Ask a server, whatever was asked before."""
    return asks._start(("127.0.0.1", port)).answer


def ports_of(asks: RendezvousAsks) -> list[int]:
    """Return the ports of servers whose answers are kept."""
    return [port for _, port in asks._asked]


LAYOUT: dict[str, str | int] = {"page_size": 16}


def worker(rank: int, ranks: int = 2, port: int = 5000) -> Registered:
    address = PeerAddress(cluster_id=7, host="127.0.0.1", port=port)
    return Registered(rank=rank, ranks=ranks, address=address, layout=LAYOUT)


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with closing(RendezvousServer("127.0.0.1", 0, Untrusted())) as made:
        yield made


async def test_all_ranks_or_none(server: RendezvousServer) -> None:
    assert await rendezvous.ask("127.0.0.1", server.port, Untrusted()) is None
    await rendezvous.register("127.0.0.1", server.port, worker(1), Untrusted())
    assert await rendezvous.ask("127.0.0.1", server.port, Untrusted()) is None
    await rendezvous.register("127.0.0.1", server.port, worker(0), Untrusted())
    told = await rendezvous.ask("127.0.0.1", server.port, Untrusted())
    assert told == Ranks(layout=LAYOUT, addresses=[worker(0).address, worker(1).address])
    await rendezvous.register("127.0.0.1", server.port, worker(1, port=6000), Untrusted())
    told = await rendezvous.ask("127.0.0.1", server.port, Untrusted())
    assert told is not None
    assert told.addresses[1].port == 6000


async def test_clients_that_say_nothing_or_garbage(server: RendezvousServer, caplog: pytest.LogCaptureFixture) -> None:
    await rendezvous.register("127.0.0.1", server.port, worker(0, 1), Untrusted())
    with closing(socket.create_connection(("127.0.0.1", server.port))):
        assert await rendezvous.ask("127.0.0.1", server.port, Untrusted()) is not None, "beside a client that is silent"
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
    assert await rendezvous.ask("127.0.0.1", server.port, Untrusted()) is not None


async def test_what_does_not_answer_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SECONDS", 0.3)
    with pytest.raises(LLMException, match="does not answer"):
        await rendezvous.ask("127.0.0.1", 1, Untrusted())
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)

    async def say(client: anyio.abc.ByteStream) -> None:
        async with client:
            await client.send(b"HTTP/1.1 400 Bad Request\n")

    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, say)
        with pytest.raises(LLMException, match="is not a rendezvous"):
            await rendezvous.ask("127.0.0.1", port, Untrusted())
        group.cancel_scope.cancel()
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(LLMException, match="does not answer"):
            await rendezvous.ask("127.0.0.1", silent.getsockname()[1], Untrusted())


def test_a_port_that_is_taken_and_closing_twice(server: RendezvousServer) -> None:
    with pytest.raises(OSError, match="in use"):
        RendezvousServer("127.0.0.1", server.port, Untrusted())
    server.close()
    server.close()
    RendezvousServer("127.0.0.1", server.port, Untrusted()).close()


def test_its_loop_is_its_own_and_ends_with_it(server: RendezvousServer) -> None:
    def loops() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("aiodatadist ")]

    assert loops() == ["aiodatadist rendezvous"]
    server.close()
    assert loops() == []


@contextmanager
def held_server() -> Iterator[tuple[int, threading.Event, list[int]]]:
    """Run a bootstrap server behind a door. Yield its port, the event that opens the door, and the connections so far."""
    opened, came = threading.Event(), list[int]()
    with (
        closing(RendezvousServer("127.0.0.1", 0, Untrusted())) as server,
        socket.create_server(("127.0.0.1", 0)) as door,
    ):

        def carry() -> None:
            with suppress(OSError):
                while True:
                    client, (_, port) = door.accept()
                    came.append(port)
                    with client, socket.create_connection(("127.0.0.1", server.port)) as behind:
                        opened.wait(60)
                        behind.sendall(client.recv(4096))
                        client.sendall(behind.recv(4096))

        thread = threading.Thread(target=carry)
        thread.start()
        try:
            register = rendezvous.register("127.0.0.1", server.port, worker(0, 1), Untrusted())
            anyio.run(lambda: register)
            yield door.getsockname()[1], opened, came
        finally:
            opened.set()
            door.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_scheduler_does_not_wait_for_a_server_that_is_silent() -> None:
    with held_server() as (port, opened, came), closing(RendezvousAsks(Untrusted())) as asks:
        for _ in range(3):
            assert asks.ask("127.0.0.1", port) is None
        opened.set()
        told = asks.ask("127.0.0.1", port, 30)
        assert told is not None
        assert told.addresses == [worker(0, 1).address]
        assert len(came) == 1, "one question, and its answer"


def test_an_answer_that_was_not_taken_for_long_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([LinkTimeout("it is being started"), None])

    async def ask(*_: object) -> None:
        error = next(answers)
        if error is not None:
            raise error

    now = [100.0]
    monkeypatch.setattr(rendezvous, "ask", ask)
    monkeypatch.setattr(rendezvous_asks, "monotonic", lambda: now[0])
    with closing(RendezvousAsks(Untrusted())) as asks:
        with suppress(Exception):
            started(asks, 1).result(30)
        now[0] += rendezvous_asks.KEPT_SECONDS + 1
        assert asks.ask("127.0.0.1", 1, 30) is None


def test_what_a_server_fails_with_is_told_once_and_it_is_asked_again() -> None:
    with closing(RendezvousAsks(Untrusted())) as asks:
        for _ in range(2):
            with pytest.raises(LLMException, match="does not answer"):
                asks.ask("127.0.0.1", 1, 30)
        with pytest.raises(ParamInvalid, match="is not a loopback address needs auth_key or trust"):
            asks.ask("10.9.9.9", 8998, 30)


@pytest.mark.parametrize("host", ["", "::1%a b", "::1%\u2028", "127.0.0.1\n", "localhost\x00", "\ud800", "a b"])
def test_a_host_that_is_none_is_refused_before_it_is_looked_up(host: str) -> None:
    with (
        closing(RendezvousAsks(AuthKey(b"k" * 32))) as asks,
        pytest.raises(ParamInvalid, match=r"rendezvous is at .*: must"),
    ):
        asks.ask(host, 1, 30)


def test_of_many_servers_the_one_that_was_asked_first_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request names any server, and one that does not answer keeps its place for no longer than there is room."""
    ended: list[int] = []

    async def ask(_: str, port: int, _key: Credential) -> Ranks:
        try:
            if port <= MAX_ASKS + 2:
                await anyio.sleep_forever()
        finally:
            ended.append(port)
        return Ranks(layout=LAYOUT, addresses=[])

    monkeypatch.setattr(rendezvous, "ask", ask)
    with closing(RendezvousAsks(Untrusted())) as asks:
        for port in range(1, MAX_ASKS + 3):
            assert asks.ask("127.0.0.1", port) is None
        assert len(ports_of(asks)) == MAX_ASKS
        assert asks.ask("127.0.0.1", 1000, 30) is not None
        call_on_loop(asks, anyio.lowlevel.checkpoint)
        assert sorted(ended) == [1, 2, 3, 1000]
    asks.close()


def test_an_answer_is_kept_while_many_servers_are_asked_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler comes for an answer a second later. Requests that name servers which refuse at once are many by then."""

    async def ask(_: str, port: int, _key: Credential) -> Ranks:
        if port:
            raise LinkTimeout("nothing listens there")
        return Ranks(layout=LAYOUT, addresses=[])

    monkeypatch.setattr(rendezvous, "ask", ask)
    with closing(RendezvousAsks(Untrusted())) as asks:
        answer = started(asks, 0)
        assert answer.result(30) == Ranks(layout=LAYOUT, addresses=[])
        for port in range(1, 3 * MAX_ASKS):
            assert isinstance(started(asks, port).exception(30), LinkTimeout)
        assert len(ports_of(asks)) == MAX_ASKS
        assert asks.ask("127.0.0.1", 0) == answer.result()


def test_answers_that_are_not_taken_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(*_: object) -> None:
        return None

    monkeypatch.setattr(rendezvous, "ask", ask)
    with closing(RendezvousAsks(Untrusted())) as asks:
        for port in range(1, MAX_ASKS + 1):
            started(asks, port).result(30)
        assert asks.ask("127.0.0.1", 100, 30) is None
        assert ports_of(asks) == list(range(2, MAX_ASKS + 1))
