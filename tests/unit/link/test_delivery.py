"""Messages that the network swallows: noticed after the patience, and never if the peer only does not read."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aiodatadist._link.control import delivery
from aiodatadist._link.control.connection import Connection
from aiodatadist._link.control.delivery import PATIENCE, Delivery, UnderWay, keep_alive, under_way
from aiodatadist.errors import PeerLost
from aiodatadist.testing import linked_pair
from tests.clock import took
from tests.faults.peer import DESC


class Network:
    """A connection whose acknowledgements are made up: the next look returns the next of them, and the last one again."""

    def __init__(self, *looks: int | None) -> None:
        self.looks = [None if look is None else UnderWay(look) for look in looks]
        self.failed = asyncio.Event()
        self.taken = 0
        self.delivery = Delivery(self.look, self.failed.set)

    def look(self) -> UnderWay | None:
        self.taken += 1
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


@pytest.mark.autojump
async def test_bytes_that_are_never_acknowledged_are_noticed_at_the_second_look() -> None:
    network = Network(10, 10)
    network.delivery.sent()
    with took(2 * PATIENCE):
        await network.failed.wait()
    network.delivery.sent()
    await anyio.sleep(100)
    assert network.taken == 2


@pytest.mark.autojump
async def test_each_further_byte_earns_more_time() -> None:
    network = Network(10, 11, 12, 12)
    network.delivery.sent()
    with took(4 * PATIENCE):
        await network.failed.wait()


@pytest.mark.autojump
async def test_there_is_no_look_once_all_is_acknowledged_until_more_is_sent() -> None:
    network = Network(None)
    network.delivery.sent()
    network.delivery.sent()
    await anyio.sleep(10 * PATIENCE)
    assert network.taken == 1
    network.looks = [UnderWay(5)]
    network.delivery.sent()
    with took(2 * PATIENCE):
        await network.failed.wait()


@pytest.mark.autojump
async def test_what_is_acknowledged_between_two_looks_counts_as_new() -> None:
    """At the second look other bytes are under way, of which none was at the first one."""
    network = Network(10, None)
    network.delivery.sent()
    await anyio.sleep(3 * PATIENCE)
    network.looks = [UnderWay(10), UnderWay(11), None]
    network.delivery.sent()
    await anyio.sleep(10 * PATIENCE)
    assert not network.failed.is_set()


@pytest.mark.autojump
async def test_nothing_is_noticed_after_the_end() -> None:
    network = Network(10)
    network.delivery.sent()
    network.delivery.end()
    network.delivery.sent()
    await anyio.sleep(10 * PATIENCE)
    assert (network.taken, network.failed.is_set()) == (0, False)


# ---- what the kernel says ----


@pytest.fixture
def both() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        with other:
            yield one, other


def test_a_peer_that_does_not_read_has_acknowledged_what_it_could_take(
    both: tuple[socket.socket, socket.socket],
) -> None:
    one, _ = both
    one.setblocking(False)
    with suppress(BlockingIOError):
        while one.send(bytes(1 << 20)):
            pass
    while under_way(one) is not None:  # the kernel at the other end has filled its buffer, and says so
        pass


def test_a_socket_that_is_closed_or_not_tcp_has_nothing_under_way() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.send(b"x")
        assert under_way(one) is None
    assert under_way(one) is None


def test_an_idle_connection_is_probed(both: tuple[socket.socket, socket.socket]) -> None:
    keep_alive(both[0])
    assert both[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert both[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == delivery.IDLE_SECONDS


# ---- links ----


class Made(Delivery):
    """A delivery whose failure the test may call for. It counts how often the stream was told to end."""

    def __init__(self, look: Callable[[], UnderWay | None], fail: Callable[[], object]) -> None:
        super().__init__(look, fail)
        self.fail = fail
        self.ends = 0

    def end(self) -> None:
        super().end()
        self.ends += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """Note the deliveries of all connections, in the order in which these were made."""
    all_made: list[Made] = []

    def make(look: Callable[[], UnderWay | None], fail: Callable[[], object]) -> Made:
        all_made.append(Made(look, fail))
        return all_made[-1]

    monkeypatch.setattr("aiodatadist._link.control.connection.Delivery", make)
    return all_made


@pytest.mark.parametrize(("interval", "patience"), [(0.5, PATIENCE), (10.0, 40.0)])
async def test_messages_have_at_least_the_time_of_heartbeats(
    interval: float, patience: float, made: list[Made]
) -> None:
    async with linked_pair(DESC, heartbeat_interval=interval, heartbeat_misses=3):
        assert [each.patience for each in made] == [patience, patience]


async def test_a_connection_that_was_closed_is_forgotten_at_once(both: tuple[socket.socket, socket.socket]) -> None:
    one, _ = both
    one.setblocking(False)
    connection = await Connection.over(one.dup())
    await connection.send(b"message")
    forgotten = weakref.ref(connection)
    await connection.aclose()
    del connection
    await anyio.lowlevel.checkpoint()
    gc.collect()
    assert forgotten() is None


async def test_what_comes_after_the_network_swallowed_messages_is_ignored(
    both: tuple[socket.socket, socket.socket], made: list[Made]
) -> None:
    """A network may swallow what goes one way only. Bytes of the peer come until the link is closed."""
    one, other = both
    one.setblocking(False)
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    connection = await Connection.over(one.dup())
    other.sendall(b"before")
    assert await connection.receive() == b"before"
    (watched,) = made
    watched.fail()
    other.sendall(b"after")
    other.shutdown(socket.SHUT_WR)
    while watched.ends < 2:  # the event loop has not read to the end
        await anyio.lowlevel.checkpoint()
    with pytest.raises(PeerLost, match="the network does not deliver messages"):
        await connection.receive()
    await connection.aclose()
    assert failures == []
