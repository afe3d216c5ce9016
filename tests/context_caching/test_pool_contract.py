"""Every pool keeps the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

import pytest

from aiodatadist._context_caching.pools.contract import KVPool, PutStatus
from aiodatadist._context_caching.pools.embedded import MemoryPool
from aiodatadist._context_caching.pools.mooncake.pool import MooncakePool
from aiodatadist.testing.pools import MIB, FullPoolContract, PoolContract, content, fetch, new_key, store
from tests.context_caching.engine_fixtures import mooncake_master, redis_server, redis_servers, store_open
from tests.context_caching.servers import (
    MooncakeLender,
    MooncakeMaster,
    RedisServer,
    need_mooncake,
    need_redis,
    running,
)

__all__ = ["mooncake_master", "redis_server", "redis_servers"]


@asynccontextmanager
async def redis_pool(url: str, memory: int) -> AsyncIterator[KVPool]:
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - absent where redis-py is

    async with aclosing(await RedisPool.open(f"{url}?memory={memory}")) as pool:
        yield pool


class TestMemory(PoolContract):
    @asynccontextmanager
    async def open_pool(self) -> AsyncIterator[KVPool]:
        async with await MemoryPool.open(self.lendable) as pool:
            yield pool


class TestRedis(PoolContract):
    @pytest.fixture(autouse=True)
    def _server(self, redis_server: RedisServer) -> None:
        self.url = redis_server.url

    def open_pool(self) -> AbstractAsyncContextManager[KVPool]:
        return redis_pool(self.url, self.lendable)


class TestFullRedis(FullPoolContract):
    @asynccontextmanager
    async def open_small_pool(self) -> AsyncIterator[KVPool]:
        need_redis()
        with running(server := RedisServer(30 * MIB)):
            async with redis_pool(server.url, 16 * MIB) as pool:
                yield pool

    async def test_a_server_that_does_not_evict_rejects(self) -> None:
        need_redis()
        with running(server := RedisServer(12 * MIB, "noeviction")):
            async with redis_pool(server.url, 16 * MIB) as pool:
                keys, values = [new_key() for _ in range(20)], [content(i, MIB) for i in range(20)]
                statuses = []
                for key, value in zip(keys, values, strict=True):
                    statuses += await store(pool, [key], [value])
                assert set(statuses) == {PutStatus.STORED, PutStatus.REJECTED}
                assert statuses == sorted(statuses, reverse=True)
                assert await fetch(pool, keys[:1], [MIB]) == values[:1]


class TestRedisCluster(PoolContract):
    @pytest.fixture(autouse=True)
    def _servers(self, redis_servers: list[RedisServer]) -> None:
        self.url = redis_servers[0].url

    def open_pool(self) -> AbstractAsyncContextManager[KVPool]:
        return redis_pool(self.url, self.lendable)


@asynccontextmanager
async def mooncake_pool(url: str, memory: int) -> AsyncIterator[KVPool]:
    async with aclosing(await MooncakePool.open(f"{url}&memory={memory}")) as pool:
        yield pool


@pytest.fixture(scope="class")
def mooncake_url(mooncake_master: MooncakeMaster) -> Iterator[str]:
    with store_open(mooncake_master):
        yield mooncake_master.url


class TestMooncake(PoolContract):
    @pytest.fixture(autouse=True)
    def _master(self, mooncake_url: str) -> None:
        self.url = mooncake_url

    def open_pool(self) -> AbstractAsyncContextManager[KVPool]:
        return mooncake_pool(self.url, self.lendable)


class TestFullMooncake(FullPoolContract):
    @asynccontextmanager
    async def open_small_pool(self) -> AsyncIterator[KVPool]:
        need_mooncake()
        with running(master := MooncakeMaster(), MooncakeLender(master, 16 * MIB), MooncakeLender(master, 16 * MIB)):
            async with mooncake_pool(master.url, 16 * MIB) as pool:
                yield pool
