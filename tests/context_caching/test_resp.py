"""Redis's protocol: replies that come in any pieces, values that land where they were meant to, and lines that end it."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Sequence

import pytest

from aiodatadist._context_caching.pools.buffers import HEAD, Buffer, Buffers
from aiodatadist._context_caching.pools.redis.resp import (
    PLAIN,
    SCRATCH,
    Exchange,
    Filled,
    OtherLength,
    Reply,
    Request,
    ResponseError,
    keyed,
    packed,
    reading,
    request,
    storing,
)


class Wire(asyncio.Transport):
    """A socket that takes nothing while it is full, and everything else at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_aborted = False
        self.is_full = False
        self.protocol: Exchange | None = None

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert (high, low) == (1, 0)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data
        if self.is_full and self.protocol is not None:
            self.protocol.pause_writing()

    def abort(self) -> None:
        self.is_aborted = True


def over(wire: Wire) -> Exchange:
    """Make an exchange as ``create_connection`` does."""
    wire.protocol = exchange = Exchange()
    exchange.connection_made(wire)
    return exchange


def receive(exchange: Exchange, data: bytes, most: int) -> None:
    """Deliver data as a transport does, at most ``most`` bytes at a time."""
    left = memoryview(data)
    while left:
        room = exchange.get_buffer(-1)
        piece = left[: min(most, len(room))]
        assert piece
        room[: len(piece)] = piece
        exchange.buffer_updated(len(piece))
        left = left[len(piece) :]


async def asking(exchange: Exchange, requests: Sequence[Request]) -> asyncio.Task[list[Reply]]:
    task = asyncio.create_task(exchange.ask(requests))
    await asyncio.sleep(0)
    return task


async def lent(*sizes: int) -> list[Buffer]:
    return await Buffers(1 << 24).lend(sizes)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 64, 1 << 20])
async def test_replies_may_come_in_any_pieces(most: int) -> None:
    exchange = over(wire := Wire())
    (buffer,) = await lent(3)
    task = await asking(
        exchange,
        [
            request("SET", "a", 1),
            request("EXISTS", "a"),
            request("GETRANGE", "a", 0, 3, into=buffer.with_tail()),
            request("GETRANGE", "b", 0, 3, into=buffer.with_tail()),
            request("GETRANGE", "c", 0, 3, into=buffer.with_tail()),
            request("SET", "d", 1),
            request("SET", "e", 1),
        ],
    )
    receive(exchange, b"+OK\r\n:1\r\n$3\r\n\r\n$\r\n$4\r\nabcd\r\n$0\r\n\r\n$-1\r\n-OOM too full\r\n", most)
    replies = await task
    assert replies[:6] == [b"OK", 1, Filled.FILLED, OtherLength(4), OtherLength(0), None]
    assert isinstance(replies[6], ResponseError)
    assert str(replies[6]) == "OOM too full"
    assert bytes(buffer.view()) == b"\r\n$"
    assert wire.sent.startswith(b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\n1\r\n*2\r\n$6\r\nEXISTS\r\n")


async def test_large_values_of_random_lengths_in_random_pieces() -> None:
    rng = random.Random(11)
    exchange = over(Wire())
    sizes = [rng.randrange(1, 3 * SCRATCH) for _ in range(20)]
    buffers = await lent(*sizes)
    task = await asking(exchange, [request("GETRANGE", "k", 0, b.nbytes, into=b.with_tail()) for b in buffers])
    values = [rng.randbytes(size) for size in sizes]
    stream = b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in values)
    while stream:
        n = rng.choice([1, 7, 4096, SCRATCH, 1 << 20])
        receive(exchange, stream[:n], n)
        stream = stream[n:]
    assert await task == [Filled.FILLED] * len(sizes)
    assert [bytes(buffer.view()) for buffer in buffers] == values


@pytest.mark.parametrize("most", [1, 1000, 1 << 20])
@pytest.mark.parametrize("nbytes", [1, SCRATCH - 12, SCRATCH, 3 * SCRATCH + 5])
async def test_of_a_value_of_another_length_only_the_length_is_kept(nbytes: int, most: int) -> None:
    exchange = over(Wire())
    (buffer,) = await lent(2)
    task = await asking(exchange, [reading("a", buffer), request("INFO"), reading("b", buffer)])
    other = b"$%d\r\n%b\r\n" % (nbytes, b"\r\n" * (nbytes // 2) + b"x" * (nbytes % 2))
    receive(exchange, other + b"$3\r\nabc\r\n$2\r\nxy\r\n", most)
    assert await task == [OtherLength(nbytes), b"abc", Filled.FILLED]
    assert bytes(buffer.view()) == b"xy"


@pytest.mark.parametrize(
    ("asks_for_value", "head"), [(True, b"$536870912\r\nabc"), (False, b"$%d\r\nabc" % (PLAIN + 1))]
)
async def test_a_length_that_a_server_makes_up_takes_no_memory(asks_for_value: bool, head: bytes) -> None:
    exchange = over(wire := Wire())
    (buffer,) = await lent(2)
    task = await asking(exchange, [reading("a", buffer) if asks_for_value else request("INFO")])
    tracemalloc.start()
    try:
        receive(exchange, head, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert wire.is_aborted is not asks_for_value
    exchange.connection_lost(None)
    with pytest.raises(ConnectionError):
        await task


async def test_the_end_of_a_value_that_is_not_wanted_is_looked_at() -> None:
    exchange = over(wire := Wire())
    (buffer,) = await lent(2)
    task = await asking(exchange, [reading("a", buffer)])
    receive(exchange, b"$4\r\nabcdef", 1)
    with pytest.raises(ConnectionError, match="after a value"):
        await task
    assert wire.is_aborted


async def test_commands_for_very_many_keys_are_what_one_would_type() -> None:
    (buffer,) = await lent(12345)
    for name in ("k", "namespace:{schlüssel}:a"):
        assert keyed("UNLINK")(name) == request("UNLINK", name)
        assert reading(name, buffer) == request("GETRANGE", name, 0, 12345, into=buffer.with_tail())


@pytest.mark.parametrize(
    "stream",
    [
        b"*1\r\n+a\r\n",
        b"$x\r\n",
        b"$-2\r\n",
        b"$99999999999\r\n",
        b"$1\r\nabc",
        b":1x\r\n",
        b"+" + b"x" * (SCRATCH - 1),
    ],
    ids=lambda stream: repr(stream[:12]),
)
async def test_what_is_no_reply_ends_the_connection(stream: bytes) -> None:
    exchange = over(wire := Wire())
    task = await asking(exchange, [request("PING")])
    receive(exchange, stream, 1 << 20)
    with pytest.raises(ConnectionError, match="not Redis's protocol"):
        await task
    assert wire.is_aborted
    with pytest.raises(ConnectionResetError):
        await exchange.ask([request("PING")])


async def test_a_reply_that_was_not_asked_for_ends_the_connection() -> None:
    exchange = over(wire := Wire())
    receive(exchange, b"+OK\r\n", 64)
    assert wire.is_aborted


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_connection_that_is_lost_ends_the_wait(is_full: bool) -> None:
    exchange = over(wire := Wire())
    wire.is_full = is_full
    task = await asking(exchange, [request("PING")])
    exchange.connection_lost(None)
    with pytest.raises(ConnectionResetError):
        await task
    await exchange.closed()


async def test_a_full_socket_is_waited_for() -> None:
    exchange = over(wire := Wire())
    wire.is_full = True
    (buffer,) = await lent(3 << 20)
    buffer.view()[:] = b"v" * (3 << 20)
    task = await asking(exchange, [storing("k", buffer)])
    rounds = 0
    while len(wire.sent) < 3 << 20:
        rounds += 1
        exchange.resume_writing()
        await asyncio.sleep(0)
    assert rounds >= 2
    wire.is_full = False
    exchange.resume_writing()
    await asyncio.sleep(0)
    receive(exchange, b"+OK\r\n", 64)
    assert await task == [b"OK"]


@pytest.mark.parametrize("name", ["k", "k" * (HEAD - 40), "k" * (2 * HEAD)])
async def test_a_value_leaves_in_one_piece_if_its_name_is_not_long(name: str) -> None:
    (buffer,) = await lent(8192)
    buffer.view()[:] = b"v" * 8192
    asked = storing(name, buffer)
    assert len(asked.pieces) == (1 if len(name) < HEAD else 3)
    assert b"".join(packed([asked])) == b"*4\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$8192\r\n%b\r\n$2\r\nNX\r\n" % (
        len(name),
        name.encode(),
        b"v" * 8192,
    )
    assert asked.key == name.encode()
