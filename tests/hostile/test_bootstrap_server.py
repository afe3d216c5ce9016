"""Strangers at the bootstrap server: decode engines get the true ranks, at once, and the KV cache's loop is not delayed."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import pytest

from aiodatadist import AuthError, LinkError, LinkTimeout, ParamInvalid, ProtocolError
from aiodatadist._adapters import rendezvous, rendezvous_lines
from aiodatadist._adapters.engine_ranks import EngineRanks
from aiodatadist._adapters.peer_links import PeerAddress
from aiodatadist._adapters.regions import MAX_LAYOUT, MAX_WORD
from aiodatadist._adapters.rendezvous import Registered, RendezvousServer, ask, register
from aiodatadist._adapters.rendezvous_lines import (
    ANSWER,
    MAX_ANSWER,
    MAX_QUESTION,
    MAX_RANKS,
    Ask,
    Greet,
    Greeted,
    Ranks,
    Refused,
    Register,
    read,
    written,
)
from aiodatadist._blocking import shared_loop
from aiodatadist._cluster import client_slots
from aiodatadist._cluster.client_slots import MAX_CLIENTS, MAX_CLIENTS_OF_ONE, ClientSlots
from aiodatadist._testing.views import thread_of
from aiodatadist._values.foreign import Unreadable
from tests.keys import having

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
LAYOUT: dict[str, str | int] = {"page_size": 16, "kv_layout": "NHD"}
NOW = 1_800_000_000.0
HOST = "127.0.0.1"


def worker(port: int, cluster_id: int = 7, rank: int = 0, ranks: int = 1, **layout: str | int) -> Registered:
    address = PeerAddress(cluster_id=cluster_id, host=HOST, port=port)
    return Registered(rank=rank, ranks=ranks, address=address, layout={**LAYOUT, **layout})


class Door:
    """An address that takes connections until it is closed, as a rank's does."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def door() -> Iterator[Door]:
    with closing(Door()) as made:
        yield made


@pytest.fixture
def other_door() -> Iterator[Door]:
    with closing(Door()) as made:
        yield made


@pytest.fixture(params=[None, KEY], ids=["without a key", "with a key"])
def either(request: pytest.FixtureRequest) -> Iterator[tuple[RendezvousServer, bytes | None]]:
    """Open a server, with and without a key. Yield it and its key."""
    with closing(RendezvousServer(HOST, 0, having(request.param), lambda: NOW)) as made:
        yield made, request.param


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    """Open a server that has listened for a minute."""
    times = iter([NOW - 60])
    with closing(RendezvousServer(HOST, 0, having(KEY), lambda: next(times, NOW))) as made:
        yield made


@pytest.fixture
def fresh() -> Iterator[RendezvousServer]:
    """Open a server that has just begun to listen."""
    with closing(RendezvousServer(HOST, 0, having(KEY), lambda: NOW)) as made:
        yield made


@pytest.fixture
def keyless() -> Iterator[RendezvousServer]:
    with closing(RendezvousServer(HOST, 0, having(None), lambda: NOW)) as made:
        yield made


async def say(port: int, line: bytes) -> bytes:
    """Send a line and return the answer, without its line end."""
    async with await anyio.connect_tcp(HOST, port) as client:
        await client.send(line + b"\n")
        with anyio.fail_after(30):
            return b"".join([data async for data in client]).rstrip(b"\n")


ID = "0" * 32
"""The id of no server."""


def registration(server: str = ID, port: int = 9, at: float = NOW, cluster_id: int = 666) -> Register:
    return Register(at=at, server=server, worker=worker(port, cluster_id))


async def id_of(server: RendezvousServer, key: bytes | None = KEY) -> str:
    """Ask a server for its id, as a rank does that registers."""
    line = written(key, Greet(at=NOW, nonce="0" * 32))
    answer = read(key, await say(server.port, line), ANSWER, MAX_ANSWER, line)
    assert isinstance(answer, Greeted)
    return answer.server


async def ranks(server: RendezvousServer, key: bytes | None = KEY) -> list[PeerAddress]:
    told = await ask(HOST, server.port, having(key), lambda: NOW)
    return [] if told is None else told.addresses


async def enrol(server: RendezvousServer, rank: Registered, at: float = NOW, key: bytes | None = KEY) -> None:
    await register(HOST, server.port, rank, having(key), lambda: at)


# ---- who may register ----


LINES: dict[str, Callable[[str], bytes]] = {
    "no seal": lambda server: written(None, registration(server)),
    "another key": lambda server: written(OTHER_KEY, registration(server)),
    "an old line": lambda server: written(KEY, registration(server, at=NOW - 61)),
    "a line of the future": lambda server: written(KEY, registration(server, at=NOW + 61)),
    "the seal of an answer": lambda server: written(KEY, registration(server), b"{}"),
    "a changed line": lambda server: written(KEY, registration(server))[:-1] + b" ",
    "for another server": lambda _: written(KEY, registration()),
    "zeros": lambda server: b"0" * 64 + b" " + written(None, registration(server)),
    "nothing": lambda _: b"",
}


@pytest.mark.parametrize("name", LINES)
async def test_a_stranger_registers_no_rank(server: RendezvousServer, door: Door, name: str) -> None:
    """Refuse the line for its own sake: nothing is registered yet."""
    answer = await say(server.port, LINES[name](await id_of(server)))
    assert b"refused" in answer
    assert await ranks(server) == []
    await enrol(server, worker(door.port))
    assert [each.port for each in await ranks(server)] == [door.port]


async def test_a_line_that_was_overheard_registers_nothing_a_second_time(
    server: RendezvousServer, door: Door, other_door: Door
) -> None:
    """The rank was started again, and listens elsewhere."""
    overheard = written(KEY, registration(await id_of(server), door.port, NOW - 2, 7))
    assert b'"ranks"' in await say(server.port, overheard)
    await enrol(server, worker(other_door.port), NOW - 1)
    assert b"rank 0 has sent something newer" in await say(server.port, overheard)
    assert [each.port for each in await ranks(server)] == [other_door.port]


async def test_a_line_that_was_overheard_counts_at_no_other_server(
    server: RendezvousServer, fresh: RendezvousServer, door: Door, other_door: Door
) -> None:
    """Repeat it at another engine's server, or at the same engine's next one, before the true ranks have registered."""
    overheard = written(KEY, registration(await id_of(server), door.port))
    assert b'"ranks"' in await say(server.port, overheard)
    assert b"it is for another bootstrap server" in await say(fresh.port, overheard)
    assert await ranks(fresh) == []
    true = worker(other_door.port)
    await enrol(fresh, true, NOW - 1)
    assert await ranks(fresh) == [true.address]


async def test_the_id_of_a_server_is_told_to_the_group_alone(server: RendezvousServer, fresh: RendezvousServer) -> None:
    ids = [await id_of(each) for each in (server, fresh, server)]
    assert ids[0] == ids[2] != ids[1]
    for key in (None, OTHER_KEY):
        assert ids[0].encode() not in await say(server.port, written(key, Greet(at=NOW, nonce="0" * 32)))


async def test_a_true_answer_to_another_question_is_refused(
    server: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineRanks, "told", lambda _: Greeted(server=ID))
    with pytest.raises(ProtocolError, match="answered ask with greeted"):
        await ranks(server)


async def test_a_stranger_learns_nothing_and_reaches_no_parser(
    server: RendezvousServer, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enrol(server, worker(door.port))
    parsed: list[bytes] = []

    def counted(data: bytes, *arguments: Any, **limits: Any) -> Any:
        parsed.append(data)
        raise AssertionError("a stranger's line was parsed")

    monkeypatch.setattr(rendezvous_lines, "read_foreign", counted)
    question = Ask(at=NOW, nonce="0" * 32)
    bomb = b'{"type":"register","at":[' + b"[" * 8000 + b"]" * 8000
    for line in (written(None, question), written(OTHER_KEY, question), bomb, b"a" * 64 + b" " + bomb):
        assert str(door.port).encode() not in await say(server.port, line)
    assert parsed == []


async def test_a_live_rank_is_not_replaced_by_another_cluster(
    either: tuple[RendezvousServer, bytes | None], door: Door, other_door: Door
) -> None:
    server, key = either
    await enrol(server, worker(door.port), key=key)
    with pytest.raises(LinkError, match="rank 0 is cluster 7, whose address still answers"):
        await enrol(server, worker(other_door.port, 8), NOW + 1, key)
    assert [(each.cluster_id, each.port) for each in await ranks(server, key)] == [(7, door.port)]
    await enrol(server, worker(other_door.port, 7), NOW + 2, key)
    assert [(each.cluster_id, each.port) for each in await ranks(server, key)] == [(7, other_door.port)]


async def test_a_rank_whose_address_no_longer_answers_is_replaced(
    server: RendezvousServer, door: Door, other_door: Door
) -> None:
    await enrol(server, worker(door.port))
    door.close()
    await enrol(server, worker(other_door.port, 8), NOW + 1)
    assert [(each.cluster_id, each.port) for each in await ranks(server)] == [(8, other_door.port)]


async def test_an_engine_that_was_started_again_at_its_port_registers(
    server: RendezvousServer, keyless: RendezvousServer, door: Door
) -> None:
    """Register the new rank that answers at the old one's address. Without a key a stranger could claim that."""
    await enrol(server, worker(door.port, 7))
    await enrol(server, worker(door.port, 8), NOW + 1)
    assert [each.cluster_id for each in await ranks(server)] == [8]
    await enrol(keyless, worker(door.port, 7), key=None)
    with pytest.raises(LinkError, match="whose address still answers"):
        await enrol(keyless, worker(door.port, 8), NOW + 1, None)


@pytest.mark.parametrize(
    ("size", "ports", "layout"),
    [(2, [0, 1], {}), (3, [2, 1, 0], {}), (3, [0, 1, 2], {"page_size": 32}), (1, [2], {"page_size": 32})],
    ids=["fewer ranks", "at each other's ports", "another layout", "one of the last rank's port"],
)
@pytest.mark.parametrize("renamed", [0, 10], ids=["same clusters", "other clusters"])
async def test_an_engine_that_was_started_again_with_other_options_at_its_ports_registers(
    server: RendezvousServer, size: int, ports: list[int], layout: dict[str, str | int], renamed: int
) -> None:
    """All ranks listen before the first one registers, so each address of the earlier engine may answer."""
    with closing(Door()) as first, closing(Door()) as second, closing(Door()) as third:
        doors = first.port, second.port, third.port
        for rank, port in enumerate(doors):
            await enrol(server, worker(port, 7 + rank, rank, 3))
        assert len(await ranks(server)) == 3
        for rank, port in enumerate(ports):
            await enrol(server, worker(doors[port], 7 + rank + renamed, rank, size, **layout), NOW + 1)
            assert len(await ranks(server)) == (size if rank == size - 1 else 0)
        assert [each.port for each in await ranks(server)] == [doors[port] for port in ports]


async def test_without_a_key_an_engine_with_other_options_waits_for_the_earlier_ports(
    keyless: RendezvousServer, door: Door
) -> None:
    """A stranger could say that it is such an engine."""
    await enrol(keyless, worker(door.port, 7, 0, 1), key=None)
    with pytest.raises(LinkError, match="whose address still answers"):
        await enrol(keyless, worker(door.port, 8, 0, 2), NOW + 1, None)
    assert [each.cluster_id for each in await ranks(keyless, None)] == [7]


async def test_ranks_of_one_engine_agree(server: RendezvousServer, door: Door, other_door: Door) -> None:
    await enrol(server, worker(door.port, 7, 0, 2))
    for changed, words in (
        (worker(other_door.port, 8, 1, 3), "ranks is 3 at rank 1 and 2 at rank 0"),
        (worker(other_door.port, 8, 1, 2, page_size=32), "page_size is 32 at rank 1 and 16 at rank 0"),
        (worker(other_door.port, 8, 1, 2, more="x"), "more is 'x' at rank 1 and None at rank 0"),
    ):
        with pytest.raises(LinkError, match=words):
            await enrol(server, changed)
        assert await ranks(server) == []
    door.close()  # the engine is started again with other options
    await enrol(server, worker(other_door.port, 8, 1, 2, page_size=32))
    assert await ranks(server) == [], "rank 0 must register anew"
    await enrol(server, worker(9, 9, 0, 2, page_size=32), NOW + 1)
    assert [each.cluster_id for each in await ranks(server)] == [9, 8]


async def test_what_changes_while_an_address_is_tried_counts(
    server: RendezvousServer, door: Door, other_door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer line of the same rank comes while an older one waits for the end of that try."""
    await enrol(server, worker(door.port), NOW - 3)
    loop, tried, answered = asyncio.get_running_loop(), anyio.Event(), threading.Event()

    async def answers(address: PeerAddress) -> bool:
        loop.call_soon_threadsafe(tried.set)
        await anyio.to_thread.run_sync(answered.wait)
        return False

    monkeypatch.setattr(rendezvous, "is_answering", answers)
    async with anyio.create_task_group() as group:

        async def older() -> None:
            with pytest.raises(LinkError, match="rank 0 has sent something newer"):
                await enrol(server, worker(9, 8), NOW - 2)

        group.start_soon(older)
        await tried.wait()
        await enrol(server, worker(other_door.port), NOW - 1)
        answered.set()
    assert [(each.cluster_id, each.port) for each in await ranks(server)] == [(7, other_door.port)]


async def test_all_addresses_that_are_in_the_way_are_tried_at_once(
    server: RendezvousServer, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of several ranks was on a machine that is gone: none of its addresses answers, or refuses."""
    tried: list[int] = []
    all_are = threading.Event()

    async def answers(address: PeerAddress) -> bool:
        tried.append(address.port)
        if len(tried) == 8:
            all_are.set()
        await anyio.to_thread.run_sync(all_are.wait)
        return False

    for rank in range(8):
        await enrol(server, worker(rank + 1, rank, rank, 8), NOW - 1)
    monkeypatch.setattr(rendezvous, "is_answering", answers)
    await enrol(server, worker(door.port, 100, 0, 1, page_size=32))
    assert sorted(tried) == list(range(1, 9))
    assert [each.port for each in await ranks(server)] == [door.port]


# ---- what it costs ----


async def test_idle_connections_do_not_delay_an_honest_question(
    either: tuple[RendezvousServer, bytes | None], door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve an honest client because the oldest idle connections make room: none of them times out during this test."""
    monkeypatch.setattr(rendezvous, "CLIENT_SECONDS", 3600.0)
    (server, key), idle = either, list[anyio.abc.SocketStream]()
    await enrol(server, worker(door.port), key=key)
    try:
        idle += [await anyio.connect_tcp(HOST, server.port) for _ in range(300)]
        assert [each.port for each in await ranks(server, key)] == [door.port]
        for client in idle[: 300 - MAX_CLIENTS_OF_ONE]:
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await client.receive()
        assert [each.port for each in await ranks(server, key)] == [door.port]
    finally:
        for client in idle:
            await client.aclose()


async def test_a_client_has_its_time_from_the_accept_on(
    server: RendezvousServer, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line is there at once. What the answer waits for counts, too."""
    await enrol(server, worker(door.port), NOW - 1)
    monkeypatch.setattr(rendezvous, "CLIENT_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "is_answering", lambda _: anyio.sleep_forever())
    line = written(KEY, registration(await id_of(server)))
    with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):  # noqa: PT012
        async with await anyio.connect_tcp(HOST, server.port) as client:
            await client.send(line + b"\n")
            await client.receive()


def test_the_oldest_connections_make_room_for_the_newest() -> None:
    slots, gone = ClientSlots(MAX_CLIENTS_OF_ONE), list[str]()
    for i in range(MAX_CLIENTS_OF_ONE + 2):
        slots.enter("10.0.0.1", lambda i=i: gone.append(f"first {i}"))  # type: ignore[misc]
    other = slots.enter("10.0.0.2", lambda: gone.append("other"))
    assert (gone, len(slots), slots.displaced) == (["first 0", "first 1"], MAX_CLIENTS_OF_ONE + 1, 2)
    slots.leave(other)
    slots.leave(other)
    slots.leave(1)  # which made room
    assert len(slots) == MAX_CLIENTS_OF_ONE
    for i in range(MAX_CLIENTS - MAX_CLIENTS_OF_ONE + 3):
        slots.enter(f"10.1.{i // 256}.{i % 256}", lambda i=i: gone.append(f"one {i}"))  # type: ignore[misc]
    assert gone[2:] == ["first 2", "first 3", "first 4"]
    assert len(slots) == MAX_CLIENTS


@pytest.mark.parametrize(
    ("one", "another", "are_one"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("10.0.0.1", "10.0.0.2", False),
        ("", "no address", False),
    ],
)
def test_an_ipv6_network_counts_as_one_address(one: str, another: str, are_one: bool) -> None:
    assert (client_slots.place_of(one) == client_slots.place_of(another)) is are_one


async def test_a_line_is_at_most_16_kib(keyless: RendezvousServer) -> None:
    assert MAX_QUESTION == 16384
    assert b"refused" in await say(keyless.port, b"x" * MAX_QUESTION)
    async with await anyio.connect_tcp(HOST, keyless.port) as client:
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):  # noqa: PT012
            await client.send(b"x" * (MAX_QUESTION + 1))
            await client.receive()


def bombs() -> dict[str, bytes]:
    def line(**changes: Any) -> bytes:
        content = {**json.loads(written(None, registration())), **changes}
        return json.dumps(content).encode()

    rank = json.loads(written(None, registration()))["worker"]
    return {
        "names": line(**{f"n{i}": i for i in range(1000)}),
        "a large layout": line(worker={**rank, "layout": {f"n{i}": i for i in range(MAX_LAYOUT + 1)}}),
        "a long text in a layout": line(worker={**rank, "layout": {"n": "x" * (MAX_WORD + 1)}}),
        "a list for a layout": line(worker={**rank, "layout": list(range(2500))}),
        "nesting": b'{"type":"register","at":' + b"[" * 8000 + b"]" * 8000 + b"}",
        "a long type": line(type="x" * 15000),
        "a large number": line(at=10**4000),
        "not a number": b'{"type":"ask","at":NaN,"nonce":"00000000000000000000000000000000"}',
        "a rank beyond": line(worker={**rank, "rank": 1}),
        "a long host": line(worker={**rank, "address": {**rank["address"], "host": "h" * 15000}}),
        "control characters": rb'{"type":"\u001b[2J\r\nforged"}',
        "no text": b"\xff\xfe" * 8000,
    }


@pytest.mark.parametrize("name", bombs())
async def test_a_line_that_is_none_is_refused_in_one_short_line(
    name: str, either: tuple[RendezvousServer, bytes | None], caplog: pytest.LogCaptureFixture, door: Door
) -> None:
    """Also if it is a member's of the group, with its seal."""
    (server, key), line = either, bombs()[name]
    assert len(line) < MAX_QUESTION - 65
    if key is not None:
        line = rendezvous_lines.seal_of(key, line, None) + b" " + line
    answer = read(key, await say(server.port, line), ANSWER, MAX_ANSWER, line)
    assert isinstance(answer, Refused)
    told = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert len(told) == 1
    assert len(told[0]) <= 400
    assert told[0].isascii()
    assert told[0].isprintable()
    await enrol(server, worker(door.port), key=key)
    assert [each.port for each in await ranks(server, key)] == [door.port]


async def test_strangers_do_not_fill_the_log(server: RendezvousServer, caplog: pytest.LogCaptureFixture) -> None:
    now = 5.0
    server.incidents.clock = lambda: now
    caplog.set_level(logging.INFO)
    for _ in range(20):
        await say(server.port, b"{}")
    now += 1.0
    await say(server.port, b"{}")
    told = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert len(told) == 2
    assert told[1].endswith("(and 19 more)")


async def test_the_kv_caches_loop_runs_while_the_servers_is_held(
    keyless: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a line costs, it costs the server's own loop."""
    reached, held = threading.Event(), threading.Event()

    def hold(*_: Any, **__: Any) -> Any:
        reached.set()
        held.wait(60)
        raise Unreadable("it was held")

    monkeypatch.setattr(rendezvous, "parsed", hold)
    kv_loop = shared_loop.acquire()
    try:
        assert kv_loop is not thread_of(keyless)
        async with await anyio.connect_tcp(HOST, keyless.port) as client:
            await client.send(b"{}\n")
            await anyio.to_thread.run_sync(reached.wait)
            turns = await anyio.to_thread.run_sync(lambda: kv_loop.call(many_turns))
            assert turns == 100
            held.set()
            assert b"it was held" in await client.receive()
    finally:
        held.set()
        await anyio.to_thread.run_sync(shared_loop.release, kv_loop)


async def many_turns() -> int:
    turns = 0
    for _ in range(100):
        await anyio.lowlevel.checkpoint()
        turns += 1
    return turns


def test_an_answer_has_one_layout_and_can_be_read_with_as_many_ranks_as_there_may_be() -> None:
    table = EngineRanks()
    layout: dict[str, str | int] = {f"{i:0{MAX_WORD}}": "x" * MAX_WORD for i in range(MAX_LAYOUT)}
    for rank in range(MAX_RANKS):
        address = PeerAddress(cluster_id=2**64 - 1 - rank, host="h" * 61 + ".x" * 96, port=65535)
        table.add(Registered(rank=rank, ranks=MAX_RANKS, address=address, layout=layout), NOW)
    line = written(KEY, table.told(), b"question")
    assert line.count(b"x" * MAX_WORD) == MAX_LAYOUT
    told = read(KEY, line, ANSWER, MAX_ANSWER, b"question")
    assert isinstance(told, Ranks)
    assert len(told.addresses) == MAX_RANKS


# ---- without a key ----


async def test_without_a_key_all_is_on_loopback_addresses(keyless: RendezvousServer) -> None:
    for host in ("0.0.0.0", "10.0.0.7", "::", "prefill-0"):
        with pytest.raises(ParamInvalid, match="what is not a loopback address needs auth_key or trust"):
            RendezvousServer(host, 0, having(None))  # before it waits for anything
        with pytest.raises(ParamInvalid, match="what is not a loopback address needs auth_key or trust"):
            await ask(host, 8998, having(None))
    elsewhere = PeerAddress(cluster_id=7, host="10.0.0.7", port=5000)
    with pytest.raises(LinkError, match=r"10\.0\.0\.7 is not a loopback address"):
        await enrol(keyless, Registered(rank=0, ranks=1, address=elsewhere, layout=LAYOUT), key=None)
    assert await ranks(keyless, None) == []


def test_with_a_key_it_may_be_on_any_address() -> None:
    RendezvousServer("0.0.0.0", 0, having(KEY)).close()


async def test_both_ends_need_the_same_key(server: RendezvousServer, keyless: RendezvousServer) -> None:
    with pytest.raises(AuthError, match=r"an unproved rendezvous at .* refused: its seal is of another key"):
        await ranks(server, OTHER_KEY)
    with pytest.raises(LinkError, match="it has no seal: only this end has a key; all engines need the same"):
        await ranks(server, None)
    with pytest.raises(AuthError, match=r"an unproved rendezvous at .* refused: it has a seal"):
        await ranks(keyless, KEY)


# ---- a server that is none ----


@asynccontextmanager
async def answering(answer: Callable[[bytes], Awaitable[bytes] | bytes]) -> AsyncIterator[int]:
    async def serve(client: anyio.abc.SocketStream) -> None:
        async with client:
            line = (await client.receive()).rstrip(b"\n")
            said = answer(line)
            await client.send(said if isinstance(said, bytes) else await said)

    async with await anyio.create_tcp_listener(local_host=HOST) as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield listener.extra(anyio.abc.SocketAttribute.local_port)
        group.cancel_scope.cancel()


FALSE = Ranks(layout=LAYOUT, addresses=[PeerAddress(cluster_id=6, host="10.9.9.9", port=22)])


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (lambda _: written(None, FALSE) + b"\n", AuthError, "is not used: it has no seal"),
        (lambda line: written(OTHER_KEY, FALSE, line) + b"\n", AuthError, "is not used: its seal is of another key"),
        (lambda _: written(KEY, FALSE, b"another question") + b"\n", AuthError, "is not used: its seal is of another"),
        (lambda line: line + b"\n", AuthError, "is not used: its seal is of another key"),
        (lambda _: b'{"type":"refused","reason":"\x1b[2J"}\n', AuthError, "is not used: it has no seal"),
        (lambda _: b'{"type":"refused","reason":"go"}\n', AuthError, "an unproved rendezvous at .* refused: go"),
        (lambda _: b"x" * (MAX_ANSWER + 1), LinkTimeout, "does not answer"),
        (lambda _: b"", LinkTimeout, "does not answer"),
    ],
)
async def test_a_server_without_the_key_is_not_believed(
    answer: Callable[[bytes], bytes], error: type[Exception], words: str
) -> None:
    async with answering(answer) as port:
        with pytest.raises(error, match=words):
            await ask(HOST, port, having(KEY))


async def test_a_server_that_says_something_else_is_none() -> None:
    async with answering(lambda _: b"HTTP/1.1 400 Bad Request\r\n") as port:
        with pytest.raises(ProtocolError, match="is not a rendezvous"):
            await ask(HOST, port, having(None))
