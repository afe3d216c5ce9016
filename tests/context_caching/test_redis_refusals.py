"""A server that refuses a command, in its own words: no key counts as removed that is still there."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from aiodatadist.context_caching.pools.contract import KVPool, PoolUnreachable, PutStatus
from aiodatadist.testing.pools import fetch, new_key, soon, store
from tests.context_caching.engine_fixtures import redis_server
from tests.context_caching.servers import RedisServer

__all__ = ["redis_server"]


@asynccontextmanager
async def refusing(server: RedisServer, *commands: str) -> AsyncIterator[KVPool]:
    from aiodatadist.context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - absent where redis-py is

    async with aclosing(await RedisPool.open(server.url)) as pool:
        assert server.ask("ACL", "SETUSER", "default", *(f"-{command}" for command in commands)) == b"+OK\r\n"
        try:
            yield pool
        finally:
            assert server.ask("ACL", "SETUSER", "default", "+@all") == b"+OK\r\n"


async def test_what_was_not_removed_is_an_error(redis_server: RedisServer) -> None:
    keys = [new_key() for _ in range(3)]
    async with refusing(redis_server, "unlink") as pool:
        assert await store(pool, keys, [b"value"] * 3) == [PutStatus.STORED] * 3
        with pytest.raises(PoolUnreachable, match=r"^3 of 3 keys were not removed: NOPERM [^;]*$"):
            await pool.remove_many(keys, deadline=soon())
        assert await fetch(pool, keys, [5] * 3) == [b"value"] * 3
    async with refusing(redis_server) as pool:
        assert await pool.remove_many([*keys, new_key()], deadline=soon()) == 3


async def test_keys_that_a_server_does_not_tell_of_are_absent_and_it_is_said_once(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [new_key() for _ in range(3)]
    async with refusing(redis_server, "exists") as pool:
        await store(pool, keys, [b"value"] * 3)
        with caplog.at_level(logging.WARNING, "aiodatadist"):
            assert await pool.exists_many(keys, deadline=soon()) == [False] * 3
    (told,) = caplog.messages
    assert told.startswith("3 of 3 keys count as absent: NOPERM ")
