"""Pools under test, by name. An engine joins the acceptance checks with one entry in ``STORES``."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from aiodatadist._context_caching.pools.contract import NodeInfo, PoolKey
from aiodatadist._context_caching.pools.open import open_pool
from aiodatadist.context_caching import KVPool, MemoryPool
from tests.context_caching.engine_fixtures import mooncake_master, redis_server, redis_servers, store_open
from tests.context_caching.fakes import Foreign
from tests.context_caching.servers import (
    MIB,
    MooncakeLender,
    MooncakeMaster,
    RedisServer,
    need_mooncake,
    need_redis,
    redis_cluster,
    running,
)

__all__ = ["mooncake_master", "redis_server", "redis_servers"]

SMALL = 24 * MIB
"""Bytes that an engine's small store has for values."""


class Store(Protocol):
    """A place for values, of which there may be several clients."""

    async def client(self) -> KVPool:
        """Open another client of the same store. The store closes it."""


OpenStore = Callable[[int], AbstractAsyncContextManager[Store]]
"""Opens an empty store, in this process with so many bytes for values."""


@dataclass(frozen=True)
class SmallStore:
    """A store that is soon full.

    Attributes:
        nbytes: for values.
        is_exact: it evicts the least recently used, and no other.
        rejects: at first, while it makes room on its own time.
    """

    open: OpenStore
    nbytes: int
    is_exact: bool = False
    rejects: bool = False


# ---- in this process ----


class _Embedded:
    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    async def client(self) -> KVPool:
        return self._pool


@asynccontextmanager
async def _memory(nbytes: int) -> AsyncIterator[Store]:
    async with await MemoryPool.open(nbytes) as pool:
        yield _Embedded(pool)


@asynccontextmanager
async def _foreign(nbytes: int) -> AsyncIterator[Store]:
    """Open the embedded pool behind the envelope that values of servers have."""
    async with await MemoryPool.open(nbytes) as pool:
        yield _Embedded(Foreign(pool))


# ---- engines ----


class _Apart(KVPool):
    """A pool without values of another test: the server may have served other tests."""

    def __init__(self, pool: KVPool, mark: str) -> None:
        self._pool = pool
        self._mark = mark
        self.capabilities = pool.capabilities

    def _keys(self, keys: Sequence[PoolKey]) -> list[PoolKey]:
        return [key._replace(namespace=self._mark + key.namespace) for key in keys]

    async def stage(self, sizes: Sequence[int], *, deadline: float) -> Any:
        return await self._pool.stage(sizes, deadline=deadline)

    async def put_many(self, keys: Sequence[PoolKey], stages: Any, *, deadline: float) -> Any:
        return await self._pool.put_many(self._keys(keys), stages, deadline=deadline)

    async def get_many(self, keys: Sequence[PoolKey], sizes: Sequence[int], *, deadline: float) -> Any:
        return await self._pool.get_many(self._keys(keys), sizes, deadline=deadline)

    async def exists_many(self, keys: Sequence[PoolKey], *, lease: float = 0.0, deadline: float) -> list[bool]:
        return await self._pool.exists_many(self._keys(keys), lease=lease, deadline=deadline)

    async def remove_many(self, keys: Sequence[PoolKey], *, deadline: float) -> int:
        return await self._pool.remove_many(self._keys(keys), deadline=deadline)

    async def nodes(self, *, deadline: float) -> list[NodeInfo]:
        return await self._pool.nodes(deadline=deadline)

    async def healthy(self, *, deadline: float) -> bool:
        return await self._pool.healthy(deadline=deadline)

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Server:
    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self._url = url
        self._stack = stack
        self._mark = secrets.token_hex(4)

    async def client(self) -> KVPool:
        pool = await self._stack.enter_async_context(aclosing(await open_pool(self._url)))
        return _Apart(pool, self._mark)


@asynccontextmanager
async def _served(url: str) -> AsyncIterator[Store]:
    async with AsyncExitStack() as stack:
        yield _Server(url, stack)


def _redis(request: pytest.FixtureRequest) -> OpenStore:
    shared: RedisServer = request.getfixturevalue("redis_server")
    return lambda _: _served(shared.url)


def _cluster(request: pytest.FixtureRequest) -> OpenStore:
    servers: list[RedisServer] = request.getfixturevalue("redis_servers")
    return lambda _: _served(servers[0].url)


def _mooncake(request: pytest.FixtureRequest) -> OpenStore:
    master: MooncakeMaster = request.getfixturevalue("mooncake_open")
    return lambda _: _served(master.url)


STORES: dict[str, Callable[[pytest.FixtureRequest], OpenStore]] = {
    "memory": lambda _: _memory,
    "foreign": lambda _: _foreign,
    "redis": _redis,
    "cluster": _cluster,
    "mooncake": _mooncake,
}


@asynccontextmanager
async def _small_redis(nbytes: int) -> AsyncIterator[Store]:
    """Open a small Redis pool, in which several requests under way count towards the memory as well."""
    need_redis()
    with running(server := RedisServer(nbytes + 8 * MIB)):
        async with _served(f"{server.url}?memory={8 * MIB}") as store:
            yield store


@asynccontextmanager
async def _small_cluster(nbytes: int) -> AsyncIterator[Store]:
    need_redis()
    with redis_cluster(nbytes // 3 + 8 * MIB) as servers:
        async with _served(f"{servers[0].url}?memory={8 * MIB}") as store:
            yield store


@asynccontextmanager
async def _small_mooncake(nbytes: int) -> AsyncIterator[Store]:
    need_mooncake()
    master = MooncakeMaster()
    with running(master, *(MooncakeLender(master, nbytes // 2) for _ in range(2))):
        async with _served(f"{master.url}&memory={16 * MIB}") as store:
            yield store


SMALL_STORES = {
    "memory": SmallStore(_memory, 32 << 10, is_exact=True),
    "foreign": SmallStore(_foreign, 32 << 10, is_exact=True),
    "redis": SmallStore(_small_redis, SMALL),
    "cluster": SmallStore(_small_cluster, SMALL),
    "mooncake": SmallStore(_small_mooncake, 32 * MIB, rejects=True),
}


@pytest.fixture(scope="module")
def mooncake_open(mooncake_master: MooncakeMaster) -> Iterator[MooncakeMaster]:
    """With a store of this process's that stays open: what it keeps for itself is no leak of a test's."""
    with store_open(mooncake_master):
        yield mooncake_master


@pytest.fixture(params=SMALL_STORES)
def small_store(request: pytest.FixtureRequest) -> SmallStore:
    return SMALL_STORES[request.param]


@pytest.fixture(params=STORES)
def pool_factory(request: pytest.FixtureRequest) -> OpenStore:
    return STORES[request.param](request)
