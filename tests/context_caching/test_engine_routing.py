"""Routing: a distribute key leads to one node, many of them spread evenly, and bad URLs are refused."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from types import SimpleNamespace

import pytest

from aiodatadist._context_caching.pools import addresses
from aiodatadist._context_caching.pools.contract import NodeInfo, PoolKey, PoolRefused, PoolUnreachable, PutStatus
from aiodatadist._context_caching.pools.keys import group, rendezvous
from aiodatadist._context_caching.pools.mooncake import store as mooncake_store
from aiodatadist._context_caching.pools.mooncake.pool import MooncakePool
from aiodatadist._testing.ports import free_port
from aiodatadist.context_caching import EmsInvalidArgument, open_pool
from aiodatadist.errors import ParamInvalid
from aiodatadist.testing.pools import new_key, soon, store
from tests.context_caching.engine_fixtures import mooncake_master, redis_server, redis_servers, store_open
from tests.context_caching.servers import MooncakeMaster, RedisServer, running

__all__ = ["mooncake_master", "redis_server", "redis_servers"]

KEYS = 3000


def assert_even(counts: Counter[str], nodes: int) -> None:
    assert sum(counts.values()) == KEYS
    assert len(counts) == nodes
    assert all(abs(count - KEYS / nodes) <= 0.1 * KEYS / nodes for count in counts.values()), counts


def held(server: RedisServer) -> int:
    return int(server.ask("DBSIZE").strip(b":\r\n"))


async def test_redis_nodes_have_about_as_many_distribute_keys_each(redis_servers: list[RedisServer]) -> None:
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - absent where redis-py is

    for server in redis_servers:
        server.ask("FLUSHALL")
    async with aclosing(await RedisPool.open(redis_servers[1].url)) as pool:
        keys = [PoolKey("even", f"block {i}", "rank 0") for i in range(KEYS)]
        assert set(await store(pool, keys, [b"value"] * KEYS)) == {PutStatus.STORED}
    assert_even(Counter({server.url: held(server) for server in redis_servers}), 3)


async def test_attribute_keys_of_one_distribute_key_are_on_one_redis_node(redis_servers: list[RedisServer]) -> None:
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - absent where redis-py is

    async with aclosing(await RedisPool.open(redis_servers[2].url)) as pool:
        for distribute_key in ("plain", "{a}", "}", ""):
            for server in redis_servers:
                server.ask("FLUSHALL")
            keys = [PoolKey(namespace, distribute_key, f"rank {{{i}}}") for i in range(50) for namespace in "ab"]
            assert set(await store(pool, keys, [b"value"] * 100)) == {PutStatus.STORED}
            assert sorted(held(server) for server in redis_servers) == [0, 0, 100]


async def test_attribute_keys_of_one_distribute_key_are_on_one_mooncake_segment(
    mooncake_master: MooncakeMaster,
) -> None:
    def used(nodes: list[NodeInfo]) -> dict[str, int | None]:
        return {node.name: node.used for node in nodes}

    with store_open(mooncake_master):
        async with aclosing(await MooncakePool.open(mooncake_master.url)) as pool:
            seen = set()
            for _ in range(20):  # all on one of two: once in half a million runs
                distribute_key, before = new_key().distribute_key, used(await pool.nodes(deadline=soon()))
                keys = [PoolKey("one", distribute_key, f"rank {i}") for i in range(20)]
                assert set(await store(pool, keys, [b"value" * 1000] * 20)) == {PutStatus.STORED}
                after = used(await pool.nodes(deadline=soon()))
                (grown,) = [name for name in after if after[name] != before[name]]
                seen.add(grown)
            assert seen == set(mooncake_master.segments())


def test_rendezvous_is_even_and_moves_only_what_it_must() -> None:
    nodes = [f"10.0.0.{i}:12345" for i in range(3)]
    names = [group(PoolKey("even", f"block {i}", "")) for i in range(KEYS)]
    places = {name: rendezvous(name, nodes) for name in names}
    assert_even(Counter(str(place) for place in places.values()), 3)
    fewer = {name: rendezvous(name, nodes[:2]) for name in names}
    assert all(fewer[name] == places[name] for name in names if places[name] != nodes[2])
    assert rendezvous("name", []) is None


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1", "redis://host:port"),
        ("redis://", "redis://host:port"),
        ("redis://127.0.0.1?cluster=maybe", "cluster is 'maybe'"),
        ("redis://127.0.0.1/3?cluster=yes", "db is 3"),
        ("redis://127.0.0.1?connections=0", "connections is 0"),
        ("redis://127.0.0.1?memory=many", "memory is 'many'"),
        ("redis://127.0.0.1?memory=1&memory=2", "twice"),
        ("redis://127.0.0.1?socket_timeout=3", "socket_timeout cannot be in the URL"),
        ("redis://127.0.0.1?health_check_interval=3", "health_check_interval cannot be in the URL"),
        (
            "redis://127.0.0.1?memroy=64MiB",
            "option memroy is unknown: the options are cluster, connections, memory, nat, or redis-py's connection options",
        ),
        ("redis://127.0.0.1/db", "the path of the URL is /db: must be the number of a database"),
        ("redis://127.0.0.1/1/2", "the path of the URL is /1/2"),
        ("redis://127.0.0.1?memory=1023KiB", "memory is 1047552 bytes: must be at least 1048576"),
        ("redis://127.0.0.1?ssl_ca_certs=/ca.pem", "ssl_ca_certs needs TLS: the URL must begin with rediss://"),
        (
            "rediss://127.0.0.1?ssl_ca_certs=/no/ca",
            r"ssl_ca_certs is '/no/ca': must be a readable file .*\(No such file",
        ),
        ("rediss://127.0.0.1?ssl_keyfile=/", r"ssl_keyfile is '/': must be a readable file"),
    ],
)
async def test_a_redis_url_that_makes_no_sense(redis_server: RedisServer, url: str, why: str) -> None:
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - absent where redis-py is

    with pytest.raises(ValueError, match=why):
        await RedisPool.open(url)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://127.0.0.1", "mooncake://host:port"),
        ("mooncake://127.0.0.1?segments=3", "option segments is unknown"),
        ("mooncake://127.0.0.1?metrics=http", "metrics is 'http'"),
        ("mooncake://127.0.0.1?metrics=70000", "metrics is 70000"),
        ("mooncake://127.0.0.1?memory=1MiB", "memory is 1048576 bytes"),
        (
            "mooncake://127.0.0.1?memory=9999999TiB",
            "memory is [0-9]+ bytes: must be at most [0-9]+, on this machine",
        ),
        ("mooncake://127.0.0.1?segment=16777215", "segment is 16777215 bytes: must be at least 16777216, or 0"),
        ("mooncake://127.0.0.1?segment=9999999TiB", "segment is [0-9]+ bytes: must be at most [0-9]+"),
        ("mooncake://127.0.0.1?protocol=ascend", "protocol is 'ascend': must be tcp or rdma"),
        ("mooncake://127.0.0.1:19003?metrics=19003", "both 19003: .*RPC port, by default 50051, .*HTTP port"),
        ("mooncake://127.0.0.1:9003", "both 9003"),
    ],
)
async def test_a_mooncake_url_that_makes_no_sense(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        await MooncakePool.open(url)


@pytest.fixture
def guarded() -> Iterator[RedisServer]:
    with running(server := RedisServer(options=["--requirepass", "open sesame"])):
        yield server


async def test_redis_is_opened_with_the_account_and_the_kind_that_the_url_says(
    redis_server: RedisServer, guarded: RedisServer
) -> None:
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - absent where redis-py is

    for url, why in (
        (f"{redis_server.url}?cluster=yes", "not part of a cluster"),
        (guarded.url, "Authentication required"),
        (f"redis://:wrong@127.0.0.1:{guarded.port}", "[Pp]assword"),
        ("redis://127.0.0.1:1", "127.0.0.1:1"),
    ):
        with pytest.raises(PoolUnreachable, match=why) as caught:
            await RedisPool.open(url)
        assert isinstance(caught.value, PoolRefused) == (url != "redis://127.0.0.1:1")
    async with aclosing(await RedisPool.open(f"redis://default:open%20sesame@127.0.0.1:{guarded.port}/1")) as pool:
        assert pool.capabilities.auth
        assert await store(pool, [new_key()], [b"value"]) == [PutStatus.STORED]


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        (":/127.0.0.1", "has no // after redis"),
        (":127.0.0.1", "has no // after redis"),
        ("://", "has no host"),
        ("://u:hunter2@:1", "has no host"),
        ("://a:1,b:2", "one host and port; the other servers of a cluster are found through it"),
        ("://a,b:2", "one host and port"),
        ("://u:hunter2@a:1,b:2", "one host and port"),
        ("://u:hunter2#x@h:1", r"port must be a number .*'#', '/', '\?', '@'.*percent-encoded"),
        ("://u:hunter2/x@h:1", "port must be a number .*percent-encoded"),
        ("://u:hunter2?x@h:1", "port must be a number .*percent-encoded"),
        ("://u:hunter2,b#x@h:1", "port must be a number .*percent-encoded"),
        ("://u:12#hunter2@h:1", "has a '#'.*percent-encoded"),
        ("://u:12/hunter2@h:1", "'@' after a '/'.*percent-encoded"),
        ("://u:12?hunter2@h:1", "option's name has an '@'.*percent-encoded"),
        ("://u:hunter2[x@h:1", "cannot be read.*percent-encoded"),
        ("://h:0", "port must be a number from 1 to 65535"),
        ("://h:65536", "port must be a number from 1 to 65535"),
    ],
)
def test_what_is_said_of_a_wrong_url_is_true_and_shows_no_password(rest: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        addresses.parse(f"redis{rest}", ("redis", "rediss"), 6379, frozenset(), others=True)
    assert "hunter" not in "".join(traceback.format_exception(caught.value)).partition("Error: ")[2]


def test_a_url_keeps_what_was_encoded() -> None:
    address = addresses.parse("redis://u:a%23b@[::1]:7/2?x=a@b&y=1", ("redis",), 6379, frozenset("y"), others=True)
    assert (address.host, address.port, address.options) == ("::1", 7, {"y": "1"})
    assert address.url == "redis://u:a%23b@[::1]:7/2?x=a%40b"
    assert addresses.parse("redis://h", ("redis",), 6379, frozenset(), others=True).port == 6379


async def test_a_port_without_a_listener_is_named_as_what_it_is(mooncake_master: MooncakeMaster) -> None:
    closed = free_port()
    with pytest.raises(PoolUnreachable, match=rf"RPC port, 127.0.0.1:{closed}.*must be.*by default 50051") as caught:
        await MooncakePool.open(f"mooncake://127.0.0.1:{closed}?metrics={mooncake_master.metrics}")
    assert "metrics=" not in str(caught.value)
    with pytest.raises(PoolUnreachable, match=rf"127.0.0.1:{closed}: .*is metrics={closed} its HTTP port"):
        await MooncakePool.open(f"mooncake://127.0.0.1:{mooncake_master.port}?metrics={closed}")


class Refusing:
    """A store of Mooncake's whose set-up fails."""

    def setup(self, *_: object) -> int:
        return -600

    def close(self) -> None:
        pass


def test_a_mooncake_store_that_is_not_to_be_had_says_how_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_store, "shared", mooncake_store.Shared())
    monkeypatch.setattr(mooncake_store, "load", lambda: SimpleNamespace(MooncakeDistributedStore=Refusing))
    settings = mooncake_store.Settings("10.0.0.1", "10.0.0.2:50051", 0, "rdma", "mlx5_0")
    with pytest.raises(
        PoolUnreachable, match=r"code -600 \(host '10.0.0.1', .*MC_LOG_LEVEL=INFO.*standard error"
    ) as caught:
        mooncake_store.borrow(settings)
    assert "Settings(" not in str(caught.value)
    monkeypatch.setattr(Refusing, "setup", lambda *_: 0)
    mooncake_store.borrow(settings)
    with pytest.raises(ParamInvalid, match=r"with segment 0, and there is only one: it cannot have segment 7, too"):
        mooncake_store.borrow(settings._replace(segment=7))
    mooncake_store.give_back()


@pytest.mark.parametrize("package", ["redis", "xxhash"])
async def test_one_missing_package_is_one_sentence(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = "aiodatadist._context_caching.pools"
    for name in ("redis.pool", "redis.nodes", "redis.connection", "keys"):
        monkeypatch.delitem(sys.modules, f"{engines}.{name}", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EmsInvalidArgument) as caught:
        await open_pool("redis://127.0.0.1:1")
    assert caught.value.message() == (
        f"redis:// needs the package {package}, which is not installed: install the extra, pip install '.[redis]' in a "
        "clone, or pip install 'FILE[redis]' with a wheel's FILE"
    )


async def test_what_has_no_scheme_is_not_shown() -> None:
    with pytest.raises(EmsInvalidArgument, match="a URL without a scheme is not a kind of pool") as caught:
        await open_pool("hunter2@127.0.0.1:1")
    assert "hunter2" not in str(caught.value)
