"""A slot that moves from one server of a cluster to another while values are stored and read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from aiodatadist._context_caching.pools.contract import GetStatus, KVPool, PoolKey, PutStatus
from aiodatadist._context_caching.pools.keys import flat
from aiodatadist.testing.pools import content, soon, store
from tests.context_caching.engine_fixtures import redis_servers
from tests.context_caching.servers import RedisServer, eventually

__all__ = ["redis_servers"]

MIB = 1 << 20
HERE = PoolKey("moving", "block", "was here before")
GONE = PoolKey("moving", "block", "has gone already")
NEW = PoolKey("moving", "block", "comes while it moves")
ALL = [HERE, GONE, NEW]
VALUES = [content(i, MIB) for i in range(3)]


class Move:
    """A move of the slot that all these keys share, as ``redis-cli --cluster reshard`` makes it."""

    def __init__(self, servers: list[RedisServer]) -> None:
        self.servers = servers
        self.slot = servers[0].ask("CLUSTER", "KEYSLOT", flat(HERE)).strip(b":\r\n").decode()
        refusals = {server: server.ask("GET", flat(HERE)) for server in servers}
        (self.source,) = [server for server, reply in refusals.items() if not reply.startswith(b"-MOVED")]
        self.target = servers[servers.index(self.source) - 1]

    def begin(self) -> None:
        assert self.target.ask("CLUSTER", "SETSLOT", self.slot, "IMPORTING", name(self.source)) == b"+OK\r\n"
        assert self.source.ask("CLUSTER", "SETSLOT", self.slot, "MIGRATING", name(self.target)) == b"+OK\r\n"

    def take(self, key: PoolKey) -> None:
        to = "127.0.0.1", str(self.target.port)
        assert self.source.ask("MIGRATE", *to, flat(key), "0", "5000") == b"+OK\r\n"

    def end(self) -> None:
        for server in (self.target, self.source):
            assert server.ask("CLUSTER", "SETSLOT", self.slot, "NODE", name(self.target)) == b"+OK\r\n"
        other = next(s for s in self.servers if s not in (self.source, self.target))
        moved = f"-MOVED {self.slot} 127.0.0.1:{self.target.port}\r\n".encode()
        eventually(lambda: other.ask("GET", flat(HERE)) == moved, "every client knows where the slot is")


def name(server: RedisServer) -> str:
    return server.ask("CLUSTER", "MYID").splitlines()[1].decode()


async def assert_whole(pool: KVPool, keys: list[PoolKey], values: list[bytes]) -> None:
    found = await pool.get_many(keys, [MIB] * len(keys), deadline=soon())
    for value, wanted in zip(found, values, strict=True):
        assert not isinstance(value, GetStatus), value
        assert bytes(value.view()) == wanted
        value.release()


@asynccontextmanager
async def moving(servers: list[RedisServer]) -> AsyncIterator[tuple[KVPool, Move]]:
    """Enter the middle of a move, with values on both sides."""
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - absent where redis-py is

    for server in servers:
        server.ask("FLUSHALL")
    async with aclosing(await RedisPool.open(servers[0].url)) as pool:
        assert await store(pool, [HERE, GONE], VALUES[:2]) == [PutStatus.STORED] * 2
        move = Move(servers)
        move.begin()
        move.take(GONE)
        yield pool, move


async def test_while_it_moves_values_are_found_where_they_are(redis_servers: list[RedisServer]) -> None:
    async with moving(redis_servers) as (pool, move):
        seen = pool._seen  # type: ignore[attr-defined]
        assert await store(pool, ALL, [bytes(MIB)] * 2 + VALUES[2:]) == [
            PutStatus.PRESENT,
            PutStatus.PRESENT,
            PutStatus.STORED,
        ]
        await assert_whole(pool, ALL, VALUES)
        assert await pool.exists_many(ALL, deadline=soon()) == [True] * 3
        assert move.target.ask("CLUSTER", "COUNTKEYSINSLOT", move.slot) == b":2\r\n"  # new ones are on the new server
        assert await pool.remove_many(ALL, deadline=soon()) == 3
        assert await pool.exists_many(ALL, deadline=soon()) == [False] * 3
        assert pool._seen == seen  # type: ignore[attr-defined]  # the cluster is still what it was
        move.end()


@pytest.mark.parametrize("first", ["get", "exists", "put", "remove"])
async def test_when_it_has_moved_the_next_call_finds_it(redis_servers: list[RedisServer], first: str) -> None:
    async with moving(redis_servers) as (pool, move):
        await assert_whole(pool, [HERE, GONE], VALUES[:2])
        move.take(HERE)
        move.end()
        if first == "get":
            await assert_whole(pool, [HERE, GONE], VALUES[:2])
        elif first == "exists":
            assert await pool.exists_many(ALL, deadline=soon()) == [True, True, False]
        elif first == "put":
            assert await store(pool, [NEW, HERE], VALUES[:2]) == [PutStatus.STORED, PutStatus.PRESENT]
        else:
            assert await pool.remove_many(ALL, deadline=soon()) == 2


async def test_a_new_pool_in_the_middle_of_it_finds_everything(redis_servers: list[RedisServer]) -> None:
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - absent where redis-py is

    async with moving(redis_servers) as (_, move):
        for server in redis_servers:
            async with aclosing(await RedisPool.open(server.url)) as pool:
                await assert_whole(pool, [HERE, GONE], VALUES[:2])
        move.take(HERE)
        move.end()
