"""Servers that break off, or talk nonsense, in the middle of a value: one clear error, and everything is given back."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import pytest

from aiodatadist._context_caching.pools.contract import (
    GetStatus,
    KVPool,
    NodeInfo,
    PoolTimeout,
    PoolUnreachable,
    PutStatus,
)
from aiodatadist._context_caching.pools.redis.resp import Exchange, request
from aiodatadist.testing.pools import fetch, new_key, soon, store
from tests.context_caching.servers import MIB, need_redis
from tests.held import turns

LARGE = 48 * MIB
"""More than sockets take while the other end does not read."""


class Peer:
    """A connection, as the server sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_cluster: bool = False) -> None:
        self.reader = reader
        self.writer = writer
        self._is_cluster = is_cluster

    async def command(self) -> list[bytes]:
        """Return the next command, without the value of a SET. Commands that open a connection are answered here."""
        while True:
            words: list[bytes] = []
            for _ in range(int((await self.reader.readuntil())[1:])):
                size = int((await self.reader.readuntil())[1:])
                if len(words) == 2 and words[0] == b"SET":
                    return [*words, b"%d" % size]
                words.append((await self.reader.readexactly(size + 2))[:-2])
            if words[0] == b"INFO":
                self.writer.write(b"$17\r\ncluster_enabled:%d\r\n" % self._is_cluster)
            elif words[0] in {b"CLIENT", b"HELLO"}:
                self.writer.write(b"+OK\r\n")
            else:
                return words

    async def skip_value(self, command: list[bytes]) -> None:
        """Skip the value of a SET, and what follows it."""
        await self.reader.readexactly(int(command[2]) + len(b"\r\n$2\r\nNX\r\n"))


@asynccontextmanager
async def pool_at(
    misdeed: Callable[[Peer], Awaitable[object]], *, is_cluster: bool = False, **options: Any
) -> AsyncIterator[KVPool]:
    """Open a pool whose server answers the opening of a connection, and then runs the misdeed."""
    need_redis()
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - absent where redis-py is

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await misdeed(Peer(reader, writer, is_cluster))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the pool has closed it
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=64 * MIB)
    port = server.sockets[0].getsockname()[1]
    query = "&".join(f"{name}={value}" for name, value in options.items())
    async with aclosing(await RedisPool.open(f"redis://127.0.0.1:{port}?{query}")) as pool:
        yield pool
    server.close()
    await server.wait_closed()


async def resets(peer: Peer) -> None:
    await peer.command()
    await peer.reader.readexactly(3 * MIB)
    peer.writer.transport.abort()


async def ends_and_reads_on(peer: Peer) -> None:
    await peer.command()
    await peer.reader.readexactly(MIB)
    peer.writer.write_eof()
    while await peer.reader.read(MIB):
        pass


async def talks_nonsense(peer: Peer) -> None:
    await peer.command()
    peer.writer.write(b"HTTP/1.1 400 Bad Request\r\n")
    await peer.reader.read()


async def gives_half(peer: Peer) -> None:
    await peer.command()
    peer.writer.write(b"$%d\r\n" % LARGE + b"x" * MIB)
    await peer.writer.drain()


@pytest.mark.parametrize("misdeed", [resets, ends_and_reads_on, talks_nonsense, gives_half])
async def test_a_server_that_breaks_off_while_a_value_is_put(misdeed: Callable[[Peer], Awaitable[object]]) -> None:
    async with pool_at(misdeed, memory=LARGE) as pool:
        for _ in range(2):  # all of the memory is there again
            stages = await pool.stage([LARGE], deadline=soon())
            with pytest.raises(PoolUnreachable):
                await pool.put_many([new_key()], [stage for stage in stages if stage], deadline=soon())


@pytest.mark.parametrize("misdeed", [talks_nonsense, gives_half])
async def test_a_server_that_breaks_off_while_a_value_is_got(misdeed: Callable[[Peer], Awaitable[object]]) -> None:
    async with pool_at(misdeed, memory=LARGE) as pool:
        for _ in range(2):
            with pytest.raises(PoolUnreachable):
                await pool.get_many([new_key()], [LARGE], deadline=soon())


async def test_a_call_that_is_under_way_ends_with_the_pool() -> None:
    asked = anyio.Event()

    async def hangs(peer: Peer) -> None:
        await peer.command()
        asked.set()
        await peer.reader.read()

    async with pool_at(hangs) as pool:
        call = asyncio.create_task(pool.exists_many([new_key()], deadline=soon()))
        await asked.wait()
        await pool.aclose()
        with pytest.raises(PoolUnreachable):
            await call


async def test_an_idle_connection_keeps_no_memory_of_what_it_read() -> None:
    async def serves(peer: Peer) -> None:
        while True:
            words = await peer.command()
            peer.writer.write(b"$%d\r\n%b\r\n" % (int(words[3]), b"x" * int(words[3])))

    async with pool_at(serves, memory=2 * MIB, connections=1) as pool:
        (first,) = await pool.get_many([new_key()], [2 * MIB], deadline=soon())
        assert not isinstance(first, GetStatus)
        memory = weakref.ref(first._buffer._memory)  # type: ignore[attr-defined]
        first.release()
        (second,) = await pool.get_many([new_key()], [2 * MIB - 1], deadline=soon())  # for which the other makes room
        assert not isinstance(second, GetStatus)
        assert memory() is None
        second.release()


async def breaks_at_some_keys(peer: Peer) -> None:
    """Break in the middle of a value if its key ends with ``never``. Serve all other keys well."""
    while True:
        words = await peer.command()
        if words[1].endswith(b"never"):
            peer.writer.write(b"$1000\r\nabc")
            await peer.writer.drain()
            return
        if words[0] == b"SET":
            await peer.skip_value(words)
            peer.writer.write(b"+OK\r\n")
        else:
            peer.writer.write(b"$3\r\nabc\r\n")


async def test_a_connection_that_breaks_costs_its_own_value_and_no_others() -> None:
    keys = [new_key("never" if i == 3 else "a") for i in range(8)]
    async with pool_at(breaks_at_some_keys) as pool:
        assert await store(pool, keys, [b"abc"] * 8) == [
            PutStatus.FAILED if i == 3 else PutStatus.STORED for i in range(8)
        ]
        assert await fetch(pool, keys, [3] * 8) == [GetStatus.MISS if i == 3 else b"abc" for i in range(8)]
        with pytest.raises(PoolUnreachable):  # nothing at all was answered
            await fetch(pool, keys[3:4], [3])


async def test_a_value_whose_connection_broke_once_is_asked_for_again() -> None:
    asked = 0

    async def breaks_once(peer: Peer) -> None:
        nonlocal asked
        while True:
            await peer.command()
            asked += 1
            if asked == 5:
                peer.writer.write(b"$3\r\na")
                await peer.writer.drain()
                return
            peer.writer.write(b"$3\r\nabc\r\n")

    async with pool_at(breaks_once) as pool:
        assert await fetch(pool, [new_key() for _ in range(8)], [3] * 8) == [b"abc"] * 8


class Slow:
    """A server that holds values back until ``go_on``.

    Attributes:
        connections: how many there have been.
        held: how many values are wanted.
    """

    def __init__(self, patience: int, holds_all: bool = False) -> None:
        self.connections = self.held = 0
        self.is_busy, self.go_on = anyio.Event(), anyio.Event()
        self._patience = patience
        self._holds_all = holds_all

    async def __call__(self, peer: Peer) -> None:
        self.connections += 1
        while True:
            words = await peer.command()
            is_value = words[0] == b"GETRANGE"
            if is_value or self._holds_all:
                self.held += 1
                if self.held == self._patience:
                    self.is_busy.set()
                await self.go_on.wait()
            peer.writer.write(b"$0\r\n\r\n" if is_value else b"+PONG\r\n" if words[0] == b"PING" else b":1\r\n")


async def test_a_server_that_is_busy_with_values_answers_what_is_small() -> None:
    slow = Slow(2)
    async with pool_at(slow, connections=2) as pool, anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(fetch, pool, [new_key()] * 2, [MIB] * 2)
        await slow.is_busy.wait()
        end = anyio.current_time() + 5
        assert await pool.healthy(deadline=end)
        assert await pool.exists_many([new_key()] * 3, deadline=end) == [True] * 3
        assert await pool.remove_many([new_key()], deadline=end) == 1
        (node,) = await pool.nodes(deadline=end)
        assert node == NodeInfo(node.name)  # alive, although it does not say how much it has
        slow.go_on.set()


async def test_connections_to_a_server_are_as_many_as_they_may_be_and_no_more() -> None:
    slow = Slow(5, holds_all=True)
    async with pool_at(slow, connections=3) as pool, anyio.create_task_group() as group:
        for _ in range(9):
            group.start_soon(lambda: pool.exists_many([new_key()], deadline=soon()))
            group.start_soon(fetch, pool, [new_key()] * 4, [MIB] * 4)
        await slow.is_busy.wait()
        slow.go_on.set()
    assert slow.connections == 3 + 2


async def test_connections_that_a_firewall_forgot_in_silence_cost_one_call_and_not_one_each() -> None:
    peers: list[Peer] = []
    forgotten: set[Peer] = set()
    are_all_used = anyio.Event()

    async def serves(peer: Peer) -> None:
        peers.append(peer)
        while True:
            await peer.command()
            if len(peers) == 4:
                are_all_used.set()
            await are_all_used.wait()
            if peer not in forgotten:
                peer.writer.write(b":1\r\n")

    async with pool_at(serves, connections=4) as pool:
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(lambda: pool.exists_many([new_key()], deadline=soon()))
        forgotten.update(peers)
        with pytest.raises(PoolTimeout):
            await pool.exists_many([new_key()], deadline=anyio.current_time() + 0.1)
        assert await pool.exists_many([new_key()], deadline=anyio.current_time() + 5) == [True]
        assert len(peers) == 5


@pytest.mark.parametrize(("answers", "kept"), [((), 0), (("of another server",), 1)])
async def test_idle_connections_stay_if_another_server_was_faster(answers: tuple[str, ...], kept: int) -> None:
    slow = Slow(2, holds_all=True)
    async with pool_at(slow) as pool:
        node = pool._seeds[0]  # type: ignore[attr-defined]
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(node.ask, request("PING"))
            await slow.is_busy.wait()
            slow.go_on.set()
        slow.go_on = anyio.Event()
        asking = asyncio.create_task(node.ask(request("PING"), answers=answers))
        while slow.held < 3:
            await turns(1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert len(node._idle) == kept
        slow.go_on.set()


async def test_a_connection_that_comes_about_when_the_pool_is_closed_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[bytes]] = []
    asked, connecting, go_on = anyio.Event(), anyio.Event(), anyio.Event()

    async def answers_all_but_the_first(peer: Peer) -> None:
        while True:
            commands.append(await peer.command())
            asked.set()
            if len(commands) > 1:
                peer.writer.write(b":1\r\n")

    async with pool_at(answers_all_but_the_first) as pool:
        from aiodatadist._context_caching.pools.redis.connection import RedisConnection  # noqa: PLC0415 - absent where redis-py is

        connect = RedisConnection._connect

        async def connect_late(self: RedisConnection) -> Exchange:
            connecting.set()
            await go_on.wait()
            return await connect(self)

        monkeypatch.setattr(RedisConnection, "_connect", connect_late)
        first = asyncio.create_task(pool.exists_many([new_key()], deadline=soon()))
        await asked.wait()
        second = asyncio.create_task(pool.exists_many([new_key()], deadline=soon()))
        await connecting.wait()
        await pool.aclose()
        go_on.set()
        for call in (first, second):
            with pytest.raises(PoolUnreachable):
                await call
    assert len(commands) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        "MOVED 12",
        "MOVED 12 nowhere",
        "MOVED x 127.0.0.1:1",
        "MOVED 12 127.0.0.1:70000",
        "ASK 12",
        "ASK 1 2 3",
        "MOVED 1 a..b:1",
    ],
)
async def test_a_redirect_to_nowhere_is_a_refusal(refusal: str) -> None:
    async def sends_elsewhere(peer: Peer) -> None:
        while True:
            words = await peer.command()
            if words[0] == b"CLUSTER":
                port = peer.writer.get_extra_info("sockname")[1]
                nodes = b"a 127.0.0.1:%d@1 myself,master - 0 0 1 connected 0-16383\n" % port
                peer.writer.write(b"$%d\r\n%b\r\n" % (len(nodes), nodes))
            else:
                if words[0] == b"SET":
                    await peer.skip_value(words)
                peer.writer.write(f"-{refusal}\r\n".encode())

    async with pool_at(sends_elsewhere, is_cluster=True) as pool:
        assert await pool.exists_many([new_key()], deadline=soon()) == [False]
        assert await store(pool, [new_key()], [b"value"]) == [PutStatus.FAILED]
        assert await fetch(pool, [new_key()], [5]) == [GetStatus.FAILED]
        with pytest.raises(PoolUnreachable, match="1 of 1 keys were not removed"):
            await pool.remove_many([new_key()], deadline=soon())


@pytest.mark.parametrize("reply", [b":1\r\n", b"$3\r\nabc\r\n", b"$2\r\n\xff\xff\r\n", b"-ERR unknown command\r\n"])
async def test_a_cluster_that_says_nothing_sensible_of_itself_is_not_healthy(reply: bytes) -> None:
    async def babbles(peer: Peer) -> None:
        while True:
            await peer.command()
            peer.writer.write(reply)

    async with pool_at(babbles, is_cluster=True) as pool:
        assert not await pool.healthy(deadline=soon())
        with pytest.raises(PoolUnreachable):
            await pool.exists_many([new_key()], deadline=soon())
