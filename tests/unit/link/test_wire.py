"""Control messages over a byte stream: what is posted arrives in this order, and posting never waits."""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import cast

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from aiodatadist import PeerLost, ProtocolError
from aiodatadist._concurrency import forks
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._link.control.connection import Connection, connected
from aiodatadist._link.control.wire import MAX_BACKLOG, PIECE, UNVERIFIED_BODY, Wire
from aiodatadist._testing.views import gather_until
from aiodatadist._wire.frames import MAX_BODY, Decoder, Unknown, encode
from aiodatadist._wire.messages import MAX_INDEXES, Bye, Disconnect, Message, Note, Ping, Pong
from tests.unit.wire.examples import EACH, digest, hello, pull

LARGE = Note(payload="A" * 80_000)


class Stream:
    """A byte stream that takes what is sent while ``is_open``, and gives what it was made with."""

    def __init__(self, *incoming: bytes) -> None:
        self.incoming = list(incoming)
        self.sent: list[bytes] = []
        self.is_open = anyio.Event()
        self.error: Exception | None = None
        self.is_closed = False

    async def send(self, data: bytes) -> None:
        await self.is_open.wait()
        if self.error is not None:
            raise self.error
        self.sent.append(data)

    async def receive(self, max_bytes: int) -> bytes:
        if not self.incoming:
            raise anyio.EndOfStream
        data = self.incoming.pop(0)
        if len(data) > max_bytes:
            self.incoming.insert(0, data[max_bytes:])
        return data[:max_bytes]

    def arrived(self) -> list[Message | Unknown]:
        return Decoder().feed(b"".join(self.sent))


def wire(*incoming: bytes, is_open: bool = True) -> tuple[Wire, Stream]:
    stream = Stream(*incoming)
    if is_open:
        stream.is_open.set()
    return Wire(cast(anyio.abc.SocketStream, stream)), stream


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Wire, Wire]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = await connected(*listener.getsockname())
        accepted, _ = listener.accept()
    accepted.setblocking(False)
    client, server = await Connection.over(sock), await Connection.over(accepted)
    async with client, server:
        yield Wire(client), Wire(server)


def congested(one: Wire) -> bool:
    return one.is_congested


# ---- sending ----


async def test_each_kind_of_message_travels_both_ways() -> None:
    async with pair() as (one, other):
        for a, b in ((one, other), (other, one)):
            a.meet(hello(2))
            await a.send(*EACH)
            assert [await b.receive() for _ in EACH] == EACH


async def test_what_is_said_is_no_newer_than_what_the_peer_has_said() -> None:
    one, stream = wire()
    stream.is_open.set()
    for _ in range(2):  # before its hello, too
        await one.send(pull(checksum=True, priority=2))
        one.post(pull(checksum=True, priority=2))
        with pytest.raises(ProtocolError, match=r"'digest' messages came with version 4\.1, the peer has 4\.0"):
            one.post(digest())
        with pytest.raises(ProtocolError, match=r"'digest' messages came with version 4\.1, the peer has 4\.0"):
            await one.send(digest())
        one.meet(hello(2, minor=0))
    assert Decoder().feed(b"".join(stream.sent)) == [pull()] * 2
    one.meet(hello(2))
    await one.send(pull(checksum=True, priority=2))
    assert Decoder().feed(stream.sent[-1]) == [pull(checksum=True, priority=2)]


async def test_posted_messages_arrive_in_this_order_with_those_that_were_posted_meanwhile() -> None:
    async with pair() as (one, other), anyio.create_task_group() as group:
        one.post(Ping(call=1))
        one.post(Ping(call=2))
        one.pump_with(partial(Spawner(group).start_soon, one.pump))
        assert [await other.receive() for _ in range(2)] == [Ping(call=1), Ping(call=2)]
        await anyio.wait_all_tasks_blocked()
        one.post(Ping(call=3))
        assert await other.receive() == Ping(call=3)
        group.cancel_scope.cancel()


async def test_posting_never_waits_and_sends_nothing_by_itself() -> None:
    one, stream = wire()
    one.post(Bye())
    await anyio.wait_all_tasks_blocked()
    assert stream.sent == []


async def test_message_that_is_too_large_is_refused_and_harms_no_other() -> None:
    one, stream = wire()
    one.post(Ping(call=1))
    with pytest.raises(ProtocolError, match=f"the limit is {MAX_BODY}"):
        one.post(pull(src_blocks=[2**63] * MAX_INDEXES))
    one.post(Ping(call=2))
    async with anyio.create_task_group() as group:
        one.pump_with(partial(Spawner(group).start_soon, one.pump))
        await one.flush()
        group.cancel_scope.cancel()
    assert stream.arrived() == [Ping(call=1), Ping(call=2)]


async def test_flush_returns_when_everything_posted_is_with_the_kernel() -> None:
    one, stream = wire(is_open=False)
    await one.flush()
    one.post(Ping(call=1))
    order: list[str] = []

    async def flush() -> None:
        await one.flush()
        order.append(f"flushed {len(stream.arrived())}")

    async with anyio.create_task_group() as group:
        one.pump_with(partial(Spawner(group).start_soon, one.pump))
        group.start_soon(flush)
        await anyio.wait_all_tasks_blocked()
        one.post(Ping(call=2))  # while the first is being written
        await anyio.wait_all_tasks_blocked()
        order.append("open")
        stream.is_open.set()
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert order == ["open", "flushed 2"]


async def test_flush_waits_for_what_was_sent_at_once_and_the_kernel_has_not_taken() -> None:
    async with connections() as (client, server), anyio.create_task_group() as group:
        one, other, turns, received = client.wire(), server.wire(), 0, list[Message | Unknown]()
        other.trust()
        one.pump_with(partial(Spawner(group).start_soon, one.pump))

        async def receive() -> None:
            with suppress(PeerLost):
                while True:
                    received.append(await other.receive())

        while not client._writer.transport.get_write_buffer_size():
            one.post(Ping(call=1))
            for _ in range(10):
                one.post(Note(payload="x" * 5000))
            one.post(Bye())
            turns += 1
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
        async with anyio.create_task_group() as parting:
            parting.start_soon(one.flush)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(receive)
        await one.aclose()
    assert received.count(Bye()) == turns


async def test_peer_that_does_not_read_makes_it_congested_until_it_reads() -> None:
    one, stream = wire(is_open=False)
    size = len(encode(LARGE))
    async with anyio.create_task_group() as group:
        one.pump_with(partial(Spawner(group).start_soon, one.pump))
        for count in range(1, MAX_BACKLOG // size + 2):
            one.post(LARGE)
            assert congested(one) == (count * size > MAX_BACKLOG)
            await anyio.wait_all_tasks_blocked()
        assert congested(one), "what is being written counts, too"
        stream.is_open.set()
        await one.flush()
        assert not congested(one)
        group.cancel_scope.cancel()
    assert sum(map(len, stream.sent)) > MAX_BACKLOG


async def test_more_than_any_socket_holds_goes_through_while_the_peer_reads() -> None:
    count = 400
    async with pair() as (one, other), anyio.create_task_group() as group:
        other.trust()
        one.pump_with(partial(Spawner(group).start_soon, one.pump))
        for i in range(count):
            one.post(LARGE)
            one.post(Ping(call=i + 1))
        assert congested(one)
        for i in range(count):
            assert await other.receive() == LARGE
            assert await other.receive() == Ping(call=i + 1)
        await one.flush()
        assert not congested(one)
        group.cancel_scope.cancel()


# ---- receiving ----


async def test_messages_come_one_at_a_time_however_they_are_cut() -> None:
    data = b"".join(encode(message) for message in EACH)
    for cut in (1, 7, 1000, len(data)):
        one, _ = wire(*(data[i : i + cut] for i in range(0, len(data), cut)))
        assert [await one.receive() for _ in EACH] == EACH


async def test_message_in_front_of_nonsense_is_heard_before_the_complaint() -> None:
    one, _ = wire(encode(Bye()) + b"GET /")
    assert await one.receive() == Bye()
    with pytest.raises(ProtocolError, match="does not speak our protocol"):
        await one.receive()


async def test_stranger_cannot_send_much_and_a_known_peer_can() -> None:
    large = encode(LARGE)
    one, _ = wire(large)
    with pytest.raises(ProtocolError, match=f"the limit is {UNVERIFIED_BODY}"):
        await one.receive()
    one, _ = wire(encode(hello(1)), large)
    assert await one.receive() == hello(1)
    one.trust()
    assert await one.receive() == LARGE


# ---- when the peer is not there ----


async def test_peer_that_left_is_lost_to_the_reader() -> None:
    async with pair() as (one, other):
        await other.send(Disconnect(reason="x"))
        await other.aclose()
        assert await one.receive() == Disconnect(reason="x")
        with pytest.raises(PeerLost, match="the peer's process is gone"):
            await one.receive()


async def test_wire_that_was_closed_here_wakes_its_reader() -> None:
    async with pair() as (one, _), anyio.create_task_group() as group:

        async def listen() -> None:
            with pytest.raises(PeerLost):
                await one.receive()

        group.start_soon(listen)
        await anyio.wait_all_tasks_blocked()
        await one.aclose()


@pytest.mark.parametrize("error", [anyio.BrokenResourceError, anyio.ClosedResourceError])
async def test_peer_that_left_is_lost_to_the_writer(error: type[Exception]) -> None:
    one, stream = wire()
    stream.error = error()
    with pytest.raises(PeerLost):
        await one.send(Bye())
    one.post(Bye())
    with pytest.raises(PeerLost):
        await one.pump()


async def test_peer_that_left_is_lost_to_the_pump() -> None:
    async with pair() as (one, other):
        await other.aclose()
        for _ in range(1000):
            one.post(LARGE)
        with pytest.raises(PeerLost):
            await one.pump()


async def test_peer_that_left_is_waited_for_by_no_flush() -> None:
    one, stream = wire()
    stream.error = anyio.BrokenResourceError()
    one.post(LARGE)
    with pytest.raises(PeerLost):
        await one.pump()
    one.post(Ping(call=1))
    with anyio.fail_after(20):
        await one.flush()


async def test_who_closes_can_send_first_what_was_posted_in_this_turn() -> None:
    async with connections() as (client, server):
        one, other = client.wire(), server.wire()
        for message in (Ping(call=1), Bye()):
            one.post(message)
        assert one.hurry()
        await one.aclose()
        assert [await other.receive(), await other.receive()] == [Ping(call=1), Bye()]


class AtOnce(Stream):
    """A stream that records the data of each call which hands it to the kernel."""

    def __init__(self, *incoming: bytes) -> None:
        super().__init__(*incoming)
        self.calls: list[list[Message | Unknown]] = []

    def take(self, data: bytes) -> bool:
        self.calls.append(Decoder().feed(data))
        return True


async def test_what_is_posted_together_is_sent_in_one_call() -> None:
    stream = AtOnce()
    one, pings = Wire(cast(anyio.abc.SocketStream, stream), stream.take), [Ping(call=i) for i in range(1, 6)]
    with one.together():
        for ping in pings[:3]:
            one.post(ping)
        assert stream.calls == []
    assert stream.calls == [pings[:3]]
    gather_until(one, 0.0)  # time passes
    one.post(pings[3])
    assert stream.calls == [pings[:3], pings[3:4]]
    with one.together():
        one.post(pings[4])
    assert stream.calls[2:] == [pings[4:]]


async def test_answers_to_messages_that_came_together_are_sent_in_one_call() -> None:
    """However long each takes."""
    stream = AtOnce(b"".join(encode(Ping(call=i)) for i in range(1, 4)))
    one = Wire(cast(anyio.abc.SocketStream, stream), stream.take)
    for number in range(1, 4):
        assert await one.receive() == Ping(call=number)
        gather_until(one, 0.0)
        one.post(Pong(call=number))
    assert stream.calls == []
    await anyio.lowlevel.checkpoint()
    assert stream.calls == [[Pong(call=i) for i in range(1, 4)]]


async def test_what_came_together_is_decoded_a_few_messages_at_a_time() -> None:
    """Decode messages a few at a time: those who react to the first give way before the last one is looked at."""
    frames = [encode(Ping(call=i)) for i in range(1, 501)]
    one, _ = wire(b"".join(frames))
    decoded = list[int]()
    for number in range(1, 501):
        assert await one.receive() == Ping(call=number)
        decoded.append(len(one._ready))
    assert max(decoded) <= PIECE // len(frames[0])


async def test_a_forked_child_does_not_send_what_its_parent_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connections() as (client, server):
        one, other = client.wire(), server.wire()
        gather_until(one, math.inf)
        one.post(Ping(call=1))
        with monkeypatch.context() as child:
            child.setattr(forks, "generation", forks.generation + 1)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            assert one._backlog == [encode(Ping(call=1))]
        one.hurry()
        await one.aclose()
        assert await other.receive() == Ping(call=1)
        with pytest.raises(PeerLost):
            await other.receive()


# ---- reacting in the call that brings it ----


@asynccontextmanager
async def connections() -> AsyncIterator[tuple[Connection, Connection]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = await connected(*listener.getsockname())
        accepted, _ = listener.accept()
    accepted.setblocking(False)
    client, server = await Connection.over(sock), await Connection.over(accepted)
    async with client, server:
        yield client, server


@asynccontextmanager
async def heard() -> AsyncIterator[tuple[Wire, Wire, list[Message | Unknown]]]:
    """Yield a wire that reacts to pings at once, the wire that it hears from, and the pings. Nothing is posted in between."""
    async with connections() as (client, server):
        reacted: list[Message | Unknown] = []
        hearing = server.wire()
        hearing.trust()

        def react(message: Message | Unknown) -> bool:
            if isinstance(message, Ping):
                reacted.append(message)
            if message == Ping(call=13):
                raise ValueError("13")
            return isinstance(message, Ping)

        hearing.react_at_once(react)
        yield Wire(client), hearing, reacted


async def test_what_is_reacted_to_at_once_is_not_received_and_all_else_is() -> None:
    async with heard() as (one, other, reacted), anyio.create_task_group() as group:
        received: list[Message | Unknown] = []

        async def receive() -> None:
            while True:
                received.append(await other.receive())
                if received[-1] == Bye():
                    return

        group.start_soon(receive)
        for message in (Ping(call=1), LARGE, Ping(call=2), Disconnect(reason="")):
            await anyio.wait_all_tasks_blocked()
            await one.send(message)
            with anyio.fail_after(10):
                while message not in [*reacted, *received]:
                    await anyio.lowlevel.checkpoint()
        assert (reacted, received) == ([Ping(call=1), Ping(call=2)], [LARGE, Disconnect(reason="")])
        await one.send(Ping(call=3), Ping(call=4))  # two in one piece keep their order
        await one.send(Bye())
    assert reacted == [Ping(call=1), Ping(call=2)]
    assert received[2:] == [Ping(call=3), Ping(call=4), Bye()]


async def test_what_comes_while_something_waits_to_be_received_waits_behind_it() -> None:
    async with heard() as (one, other, reacted):
        await one.send(Bye())
        await one.send(Ping(call=1))
        assert [await other.receive(), await other.receive()] == [Bye(), Ping(call=1)]
        assert reacted == []


async def test_a_reaction_that_fails_fails_who_receives() -> None:
    async with heard() as (one, other, reacted), anyio.create_task_group() as group:

        async def receive() -> None:
            with pytest.raises(ValueError, match="13"):
                await other.receive()

        group.start_soon(receive)
        await anyio.wait_all_tasks_blocked()
        await one.send(Ping(call=13))
    assert reacted == [Ping(call=13)]


def test_only_a_whole_small_message_alone_is_seen_at_once_and_it_is_not_taken() -> None:
    decoder, ping = Decoder(), encode(Ping(call=1))
    for data in (b"", ping[:3], ping[:-1], ping[1:], ping + ping, ping + b"K", encode(LARGE), b"x" * len(ping)):
        assert decoder.peek(data) is None
    assert decoder.peek(ping) == Ping(call=1)
    assert decoder.feed(ping[:5]) == []
    assert decoder.peek(ping) is None
    assert decoder.feed(ping[5:]) == [Ping(call=1)]
    assert decoder.peek(ping) == Ping(call=1)
    assert Decoder(max_body=10).peek(ping) is None


async def test_what_is_no_message_is_told_to_who_receives() -> None:
    for wrong in (
        b"GET / HTTP/1.1\r\n",
        encode(Ping(call=1)).replace(b"ping", b"pong"),
        encode(Ping(call=1))[:-1] + b"x",
    ):
        async with heard() as (one, other, reacted), anyio.create_task_group() as group:

            async def receive(other: Wire = other) -> None:
                with pytest.raises(ProtocolError):
                    await other.receive()

            group.start_soon(receive)
            await anyio.wait_all_tasks_blocked()
            await one.stream.send(wrong)
        assert reacted == []
