"""Running engines as fixtures, shared by the tests of a module. Import the names where they are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aiodatadist._context_caching.pools.mooncake import store as mooncake_store
from tests.context_caching.servers import (
    MooncakeLender,
    MooncakeMaster,
    RedisServer,
    need_mooncake,
    need_redis,
    redis_cluster,
    running,
)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    need_redis()
    server = RedisServer()
    with running(server):
        yield server


@pytest.fixture(scope="module")
def redis_servers() -> Iterator[list[RedisServer]]:
    """Start a cluster of three."""
    need_redis()
    with redis_cluster() as servers:
        yield servers


@contextmanager
def store_open(master: MooncakeMaster) -> Iterator[None]:
    """Share a store among the pools that are opened inside. It stays open, because closing it takes a second."""
    mooncake_store.borrow(mooncake_store.Settings("127.0.0.1", f"127.0.0.1:{master.port}", 0, "tcp", ""))
    try:
        yield
    finally:
        mooncake_store.give_back()


@pytest.fixture(scope="module")
def mooncake_master() -> Iterator[MooncakeMaster]:
    """Start a master and two lenders."""
    need_mooncake()
    master = MooncakeMaster()
    with running(master, MooncakeLender(master), MooncakeLender(master)):
        yield master
