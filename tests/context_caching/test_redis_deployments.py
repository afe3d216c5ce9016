"""Redis as services run it: behind sentinels, on a Unix socket, with few rights, behind NAT."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from aiodatadist._context_caching.pools.contract import KVPool, NodeInfo, PoolRefused, PoolUnreachable, PutStatus
from aiodatadist._context_caching.pools.open import open_pool
from aiodatadist._testing.ports import free_port
from aiodatadist._testing.servers import RedisSentinel
from aiodatadist.testing.pools import content, fetch, new_key, soon, store
from tests.context_caching.engine_fixtures import redis_server
from tests.context_caching.servers import RedisServer, eventually, make_cluster, need_redis, running
from tests.context_caching.test_redis_tls import authority

__all__ = ["authority", "redis_server"]
ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def pool_at(url: str) -> AsyncIterator[KVPool]:
    pool = await open_pool(url)
    try:
        yield pool
    finally:
        await pool.aclose()


async def works(pool: KVPool) -> None:
    """Check that all calls of a pool work."""
    keys, values = [new_key(f"v{i}") for i in range(5)], [content(i, 5000) for i in range(5)]
    assert await store(pool, keys, values) == [PutStatus.STORED] * 5
    assert await fetch(pool, keys, [5000] * 5) == values
    assert await pool.exists_many([*keys, new_key("none")], deadline=soon()) == [True] * 5 + [False]
    assert await pool.remove_many(keys[:2], deadline=soon()) == 2
    assert await pool.healthy(deadline=soon())
    assert all(node.is_alive for node in await pool.nodes(deadline=soon()))


# ---- schemes ----


async def test_valkey_is_another_name(redis_server: RedisServer) -> None:
    async with pool_at(f"valkey://127.0.0.1:{redis_server.port}") as pool:
        await works(pool)


async def test_a_server_on_a_unix_socket() -> None:
    need_redis()
    server = RedisServer()
    path = Path(server.folder, "redis server.sock")
    server.add("--unixsocket", str(path))
    with running(server):
        server.ask("CONFIG", "SET", "requirepass", "secret")
        async with pool_at(f"unix://:secret@{server.folder}/redis%20server.sock?db=3&connections=2") as pool:
            await works(pool)
            (node,) = await pool.nodes(deadline=soon())
            assert node.name == str(path)
        with pytest.raises(PoolRefused, match="WRONGPASS"):
            await open_pool(f"unix://:wrong@{server.folder}/redis%20server.sock")
    with pytest.raises(PoolUnreachable, match=r"redis server\.sock"):
        await open_pool(f"unix://{server.folder}/redis%20server.sock")


# ---- rights ----


def allow(server: RedisServer, commands: Sequence[str]) -> None:
    """Make an account that may use these commands only, and none without."""
    said = server.ask("ACL", "SETUSER", "kv", "on", ">pw", "~*", "-@all", *(f"+{each}" for each in commands))
    assert said == b"+OK\r\n"
    assert server.ask("ACL", "SETUSER", "default", "off") == b"+OK\r\n"


def commands(kind: str) -> tuple[str, ...]:
    from aiodatadist._context_caching.pools.redis import topology  # noqa: PLC0415 - absent where redis-py is

    found: tuple[str, ...] = getattr(topology, kind)
    return found


async def test_an_account_that_may_use_what_is_documented_and_no_more() -> None:
    need_redis()
    server = RedisServer()
    with running(server):
        allow(server, commands("COMMANDS"))
        async with pool_at(f"redis://kv:pw@127.0.0.1:{server.port}") as pool:
            await works(pool)
            (node,) = await pool.nodes(deadline=soon())
            assert node == NodeInfo(f"127.0.0.1:{server.port}"), "it is not told how full the server is"


async def test_an_account_of_a_cluster_that_may_use_what_is_documented_and_no_more() -> None:
    need_redis()
    server = RedisServer(is_in_cluster=True)
    with running(server):
        make_cluster([server])
        allow(server, [*commands("COMMANDS"), *commands("IN_A_CLUSTER")])
        async with pool_at(f"redis://kv:pw@127.0.0.1:{server.port}") as pool:
            assert pool.capabilities.placement, "it is known to be one"
            await works(pool)


@pytest.mark.parametrize("page", ["engines.md", "engines.zh.md"])
def test_the_documented_commands_are_these(page: str) -> None:
    need_redis()
    text = (ROOT / "docs" / page).read_text()
    listed = re.findall(r"^ACL SETUSER .*$", text, re.MULTILINE)
    wanted = [commands("COMMANDS"), (*commands("COMMANDS"), *commands("IN_A_CLUSTER")), commands("AT_SENTINELS")]
    assert [tuple(re.findall(r"\+(\S+)", line)) for line in listed] == wanted


async def test_an_account_without_one_of_them_is_told_which() -> None:
    need_redis()
    server = RedisServer()
    with running(server):
        allow(server, [each for each in commands("COMMANDS") if each != "ping"])
        async with pool_at(f"redis://kv:pw@127.0.0.1:{server.port}") as pool:
            assert not await pool.healthy(deadline=soon())


# ---- sentinels ----


def replica_of(master: RedisServer, *options: str) -> RedisServer:
    return RedisServer(options=["--replicaof", "127.0.0.1", str(master.port), *options])


@pytest.fixture
def watched() -> Iterator[tuple[RedisServer, RedisServer, RedisSentinel]]:
    """Start a master, a replica, and a sentinel."""
    need_redis()
    master = RedisServer()
    replica = replica_of(master, "--repl-diskless-sync-delay", "0")
    sentinel = RedisSentinel("kv", master)
    with running(master, replica, sentinel):
        yield master, replica, sentinel


async def until(look: Callable[[], bool]) -> None:
    """Wait until other processes have come so far."""
    await anyio.to_thread.run_sync(lambda: eventually(look, "servers agree"))


async def test_a_pool_follows_the_master_that_sentinels_choose(
    watched: tuple[RedisServer, RedisServer, RedisSentinel],
) -> None:
    master, replica, sentinel = watched
    await until(lambda: b"master_link_status:up" in replica.ask("INFO", "replication"))
    await until(lambda: b"slaves=1" in sentinel.ask("INFO", "sentinel"))
    async with pool_at(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/kv") as pool:
        await works(pool)
        (node,) = await pool.nodes(deadline=soon())
        assert node.name == f"127.0.0.1:{master.port}"
        key = new_key("kept")
        assert await store(pool, [key], [b"value"]) == [PutStatus.STORED]
        assert b":1\r\n" in await anyio.to_thread.run_sync(lambda: master.ask("WAIT", "1", "5000"))
        master.kill()
        await until(lambda: str(replica.port).encode() in sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "kv"))
        await until(lambda: b"role:master" in replica.ask("INFO", "replication"))
        assert await pool.healthy(deadline=soon())
        assert await fetch(pool, [key], [5]) == [b"value"]
        await works(pool)
        (node,) = await pool.nodes(deadline=soon())
        assert node.name == f"127.0.0.1:{replica.port}"


async def test_a_master_that_became_a_replica_is_left_for_the_new_one(
    watched: tuple[RedisServer, RedisServer, RedisSentinel],
) -> None:
    master, replica, sentinel = watched
    await until(lambda: b"slaves=1" in sentinel.ask("INFO", "sentinel"))
    async with pool_at(f"redis+sentinel://127.0.0.1:{sentinel.port}/kv") as pool:
        await works(pool)
        await until(lambda: b"+OK" in sentinel.ask("SENTINEL", "FAILOVER", "kv"))
        await until(lambda: b"role:slave" in master.ask("INFO", "replication"))
        await until(lambda: str(replica.port).encode() in sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "kv"))
        assert await store(pool, [new_key("after")], [b"value"]) == [PutStatus.STORED], "in the same call"


async def test_sentinels_that_know_no_such_service_or_do_not_answer(
    watched: tuple[RedisServer, RedisServer, RedisSentinel],
) -> None:
    _, _, sentinel = watched
    with pytest.raises(PoolUnreachable, match="knows no other"):
        await open_pool(f"redis+sentinel://127.0.0.1:{sentinel.port}/other")
    with pytest.raises(PoolUnreachable, match=r"127\.0\.0\.1:1"):
        await open_pool("redis+sentinel://127.0.0.1:1/kv")


async def test_sentinels_have_their_own_account(watched: tuple[RedisServer, RedisServer, RedisSentinel]) -> None:
    master, _, sentinel = watched
    allow(master, commands("COMMANDS"))
    allow(sentinel, commands("AT_SENTINELS"))
    own = "sentinel_username=kv&sentinel_password=pw"
    async with pool_at(f"redis+sentinel://kv:pw@127.0.0.1:{sentinel.port}/kv?{own}") as pool:
        await works(pool)
    with pytest.raises((PoolRefused, PoolUnreachable), match="WRONGPASS"):
        await open_pool(f"redis+sentinel://kv:pw@127.0.0.1:{sentinel.port}/kv?{own}x")
    with pytest.raises(PoolRefused, match="WRONGPASS"):
        await open_pool(f"redis+sentinel://kv:wrong@127.0.0.1:{sentinel.port}/kv?{own}")


async def test_tls_goes_to_sentinels_and_to_servers(authority: Path) -> None:
    need_redis()
    files = {"tls-ca-cert-file": "ca.pem", "tls-cert-file": "cert.pem", "tls-key-file": "key.pem"}
    given = [(name, str(authority / file)) for name, file in files.items()]
    port, watcher_port = free_port(), free_port()
    both = [*given, ("tls-auth-clients", "no"), ("tls-replication", "yes")]
    server = RedisServer(
        options=["--tls-port", str(port), *(word for name, value in both for word in (f"--{name}", value))]
    )
    lines = [f"tls-port {watcher_port}", *(f"{name} {value}" for name, value in both)]
    sentinel = RedisSentinel("kv", server, options=lines, port=port)
    with running(server, sentinel):
        ca = authority / "ca.pem"
        async with pool_at(f"rediss+sentinel://127.0.0.1:{watcher_port}/kv?ssl_ca_certs={ca}") as pool:
            await works(pool)
        with pytest.raises(PoolUnreachable, match=r"(?i)certificate"):
            await open_pool(f"rediss+sentinel://127.0.0.1:{watcher_port}/kv?ssl_ca_certs={authority / 'other.pem'}")


# ---- NAT ----


async def test_a_cluster_that_announces_addresses_behind_nat() -> None:
    need_redis()
    server = RedisServer(
        is_in_cluster=True, options=["--cluster-announce-ip", "127.0.0.99", "--cluster-announce-port", "7"]
    )
    with running(server):
        make_cluster([server])
        async with pool_at(f"{server.url}?nat=127.0.0.99:7=127.0.0.1:{server.port}") as pool:
            await works(pool)
        async with pool_at(server.url) as pool:
            assert await store(pool, [new_key()], [b"value"]) == [PutStatus.FAILED]


async def test_a_master_that_sentinels_know_by_an_address_behind_nat() -> None:
    need_redis()
    server = RedisServer()
    sentinel = RedisSentinel("kv", server, port=7)
    with running(server, sentinel):
        nat = f"127.0.0.1:7=127.0.0.1:{server.port}"
        async with pool_at(f"redis+sentinel://127.0.0.1:{sentinel.port}/kv?nat={nat}") as pool:
            await works(pool)


# ---- URLs ----


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://127.0.0.1?nat=1.2.3.4", "nat has '1.2.3.4': must be announced:port=reached:port"),
        ("redis://127.0.0.1?nat=1.2.3.4:5=x", "nat has 'x': must be host:port"),
        ("redis://127.0.0.1?nat=a:1=b:1,a:1=c:1", "nat has a:1 twice"),
        ("redis://127.0.0.1?sentinel_password=x", "option sentinel_password needs sentinels"),
        ("redis://a,b", "the URL must have one host and port"),
        ("redis+sentinel://127.0.0.1", "the URL names no service, or no sentinel: must be redis.sentinel://host:port"),
        ("redis+sentinel:///kv", "the URL names no service, or no sentinel"),
        ("redis+sentinel://127.0.0.1/kv/x", "the URL names no service, or no sentinel"),
        ("redis+sentinel://127.0.0.1:0/kv", "the URL has '127.0.0.1:0': must be host:port"),
        ("redis+sentinel://127.0.0.1,/kv", "the URL has '': must be host:port"),
        ("redis+sentinel://127.0.0.1/k%0av", "the service has characters that no service has"),
        ("redis+sentinel://127.0.0.1/kv?cluster=yes", "cluster is yes: servers behind sentinels are no cluster"),
        ("redis+sentinel://127.0.0.1/kv?ssl_ca_certs=/ca", "ssl_ca_certs needs TLS"),
        ("redis+sentinel://u:p#x@127.0.0.1/kv", "in a password percent-encoded"),
        ("unix://host/path", "must be ///path/of/the/socket"),
        ("unix:///", "must be ///path/of/the/socket"),
        ("unix:redis.sock", "must be unix:///path/of/the/socket"),
        ("unix:///run/redis.sock?cluster=yes", "option cluster is for servers with an address"),
        ("unix:///run/redis.sock?ssl_ca_certs=/ca", "ssl_ca_certs needs TLS"),
    ],
)
async def test_urls_that_make_no_sense(url: str, why: str) -> None:
    need_redis()
    with pytest.raises(ValueError, match=why) as caught:
        await open_pool(url)
    assert "p#x" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["redis+sentinel", "rediss+sentinel", "unix"])
@pytest.mark.parametrize(
    "password", ["p4ss/w0rd", "p4ss?w0rd", "p4ss/w?x=0rd", "p4ss#w0rd", "p4ss,w/0rd", "p4ss:1/w0rd"]
)
@pytest.mark.parametrize("behind", ["127.0.0.1:26379", "127.0.0.1/kv", "/run/redis.sock"])
async def test_no_part_of_a_password_that_is_not_encoded_is_shown(scheme: str, password: str, behind: str) -> None:
    """Its beginning looks like a host: everything before the first slash does."""
    need_redis()
    with pytest.raises(ValueError, match=r"percent-encoded|must be ///path") as caught:
        await open_pool(f"{scheme}://:{password}@{behind}")
    assert "p4ss" not in str(caught.value)
    assert "0rd" not in str(caught.value)
