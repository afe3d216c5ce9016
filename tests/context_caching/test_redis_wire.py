"""Servers that break off, or talk nonsense, in the middle of a value: one clear error, and everything is given back."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import pytest

from aiodatadist.context_caching.pool import GetStatus, KVPool, PoolUnreachable
from aiodatadist.testing.pools import new_key, soon
from tests.context_caching.servers import MIB, need_redis

LARGE = 48 * MIB
"""More than sockets take while nobody reads."""


class Peer:
    """One connection, as the server sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def command(self) -> list[bytes]:
        """The next one, but for the value of a SET. What belongs to the opening of a connection is answered."""
        while True:
            words: list[bytes] = []
            for _ in range(int((await self.reader.readuntil())[1:])):
                size = int((await self.reader.readuntil())[1:])
                if len(words) == 2 and words[0] == b"SET":
                    return [*words, b"%d" % size]
                words.append((await self.reader.readexactly(size + 2))[:-2])
            if words[0] == b"INFO":
                self.writer.write(b"$17\r\ncluster_enabled:0\r\n")
            elif words[0] in {b"CLIENT", b"HELLO"}:
                self.writer.write(b"+OK\r\n")
            else:
                return words


@asynccontextmanager
async def pool_at(misdeed: Callable[[Peer], Awaitable[object]], **options: Any) -> AsyncIterator[KVPool]:
    """A pool whose server answers the opening of a connection, and then does that."""
    need_redis()
    from aiodatadist.context_caching.engines.redis import RedisPool  # noqa: PLC0415 - absent where redis-py is

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await misdeed(Peer(reader, writer))
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
