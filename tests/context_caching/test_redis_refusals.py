"""A server that refuses a command, in its own words: no key counts as removed that is still there."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from aiodatadist._context_caching.pools.contract import GetStatus, KVPool, PoolRefused, PoolUnreachable, PutStatus
from aiodatadist.testing.pools import fetch, new_key, soon, store
from tests.context_caching.engine_fixtures import redis_server
from tests.context_caching.servers import RedisServer, need_redis, running

__all__ = ["redis_server"]


@asynccontextmanager
async def refusing(server: RedisServer, *commands: str) -> AsyncIterator[KVPool]:
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - absent where redis-py is

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


@pytest.mark.parametrize("account", ["", "mine:secret@"])
async def test_redis_py_connects_nowhere_and_says_nothing(
    redis_server: RedisServer, account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections hold the options of the URL. What they do besides differs from version to version."""
    from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection  # noqa: PLC0415 - as above

    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - as above

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("redis-py was asked to do something")

    for kind in (AbstractConnection, Connection, SSLConnection):
        for name in ("connect", "_connect", "disconnect", "on_connect", "send_command", "read_response"):
            if name in vars(kind):
                monkeypatch.setattr(kind, name, refuse)
    assert redis_server.ask("ACL", "SETUSER", "mine", "on", ">secret", "~*", "+@all") == b"+OK\r\n"
    url = redis_server.url.replace("://", f"://{account}")
    async with aclosing(await RedisPool.open(f"{url}/3?client_name=named")) as pool:
        assert b"name=named" in (told := redis_server.ask("CLIENT", "LIST"))
        assert b"db=3" in told
        key = new_key()
        assert await store(pool, [key], [b"value"]) == [PutStatus.STORED]
        assert await fetch(pool, [key], [5]) == [b"value"]
    with pytest.raises(PoolRefused, match="WRONGPASS"):
        await RedisPool.open(redis_server.url.replace("://", "://mine:other@"))
    with pytest.raises(PoolRefused, match="out of range"):
        await RedisPool.open(f"{redis_server.url}/4711")
    with pytest.raises(ValueError, match="option lib_name cannot be in the URL"):
        await RedisPool.open(f"{redis_server.url}?lib_name=other")


async def test_a_server_with_too_many_clients_is_out_of_reach_and_says_why() -> None:
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - as above

    need_redis()
    with running(server := RedisServer(options=["--maxclients", "1"])):
        async with aclosing(await RedisPool.open(server.url)):
            with pytest.raises(PoolUnreachable, match="max number of clients reached"):
                await RedisPool.open(server.url)


REFUSE_WRITES = {
    "READONLY": (["REPLICAOF", "127.0.0.1", "1"], ["REPLICAOF", "NO", "ONE"]),
    "NOPERM": (["ACL", "SETUSER", "default", "-set"], ["ACL", "SETUSER", "default", "+@all"]),
    "NOREPLICAS": (["CONFIG", "SET", "min-replicas-to-write", "1"], ["CONFIG", "SET", "min-replicas-to-write", "0"]),
}


@pytest.mark.parametrize("kind", REFUSE_WRITES)
async def test_a_server_that_refuses_writes_is_told_once_and_is_not_healthy_until_it_takes_them(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - as above

    refuse, accept = REFUSE_WRITES[kind]
    kept, new = new_key(), [new_key() for _ in range(3)]
    async with aclosing(await RedisPool.open(redis_server.url)) as pool:
        await store(pool, [kept], [b"value"])
        assert await pool.healthy(deadline=soon())
        assert redis_server.ask(*refuse).startswith(b"+OK")
        try:
            with caplog.at_level(logging.WARNING, "aiodatadist"):
                for _ in range(2):
                    assert await store(pool, new, [b"value"] * 3) == [PutStatus.FAILED] * 3
            (told,) = caplog.messages
            assert f"redis at 127.0.0.1:{redis_server.port} refuses put: {kind} " in told
            assert await fetch(pool, [kept], [5]) == [b"value"]
            for _ in range(2):
                assert not await pool.healthy(deadline=soon())
        finally:
            assert redis_server.ask(*accept).startswith(b"+OK")
        assert await pool.healthy(deadline=soon())
        assert await fetch(pool, new, [5] * 3) == [GetStatus.MISS] * 3, "a health check stores nothing"
        assert await store(pool, new, [b"value"] * 3) == [PutStatus.STORED] * 3
        assert await pool.healthy(deadline=soon())


async def test_a_full_server_is_told_once_and_stays_healthy_since_it_has_what_it_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - as above

    need_redis()
    with running(server := RedisServer(policy="noeviction")):
        kept = new_key()
        async with aclosing(await RedisPool.open(server.url)) as pool:
            await store(pool, [kept], [b"value"])
            assert server.ask("CONFIG", "SET", "maxmemory", "1") == b"+OK\r\n"
            with caplog.at_level(logging.WARNING, "aiodatadist"):
                for _ in range(2):
                    assert await store(pool, [new_key()], [b"value"]) == [PutStatus.REJECTED]
            (told,) = caplog.messages
            assert "refuses put: OOM " in told
            assert await pool.healthy(deadline=soon())
            assert await fetch(pool, [kept], [5]) == [b"value"]


async def test_a_server_that_refuses_reads_is_told_once(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with refusing(redis_server, "getrange") as pool:
        with caplog.at_level(logging.WARNING, "aiodatadist"):
            for _ in range(2):
                assert await fetch(pool, [new_key()], [5]) == [GetStatus.FAILED]
    (told,) = caplog.messages
    assert "refuses get: NOPERM " in told


def test_refusals_are_counted_and_told_again_after_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    from aiodatadist._context_caching.pools.redis.refusals import REPEAT_SECONDS, Refusals  # noqa: PLC0415 - as above

    refusals = Refusals()
    with caplog.at_level(logging.WARNING, "aiodatadist"):
        for now in (5.0, 6.0, 5.0 + REPEAT_SECONDS):
            refusals.note("put", "one:1", "READONLY no", now)
        refusals.note("put", "two:2", "READONLY no", 7.0)
        refusals.note("put", "one:1", "OOM\x1b[31m no", 7.0)
    assert refusals.counts == {("put", "READONLY"): 4, ("put", "OOM\\x1b[31m"): 1}
    assert len(caplog.messages) == 4
    assert caplog.messages[1] == (
        "redis at one:1 refuses put: READONLY no (3 commands so far; logged again after 60 s at the earliest)"
    )
    assert "\x1b" not in caplog.text
