"""A pool's servers that send us elsewhere: the password goes to members of a cluster only, by that cluster's own list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from aiodatadist._cli.doctor.pools import pool_findings
from aiodatadist._context_caching.pools.contract import GetStatus, PoolTimeout, PoolUnreachable, PutStatus
from aiodatadist._context_caching.pools.redis.nodes import MAX_SERVERS, MAX_VIEW, Account, Node, NodeDown, parse_nodes
from aiodatadist._context_caching.pools.redis.pool import RedisPool
from aiodatadist._context_caching.pools.redis.resp import request
from aiodatadist._context_caching.pools.remarks import remarks_on
from aiodatadist.context_caching import open_pool
from aiodatadist.testing.pools import fetch, new_key, soon, store
from tests.context_caching.servers import need_redis
from tests.context_caching.test_redis_wire import Peer, pool_at


class Trap:
    """A place to which a server sends clients. It counts who comes."""

    def __init__(self) -> None:
        self.came = 0
        self.port = 0

    async def _serve(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.came += 1
        writer.transport.abort()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Trap]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield self


@pytest.mark.parametrize("is_cluster", [False, True], ids=["one server", "a cluster"])
@pytest.mark.parametrize("kind", ["MOVED", "ASK"])
async def test_a_server_sends_no_client_to_an_address_outside_its_cluster(kind: str, is_cluster: bool) -> None:
    """A server that is part of no cluster, or names an address that is not in the list, has failed."""
    async with Trap().open() as trap:

        async def sends_away(peer: Peer) -> None:
            while True:
                words = await peer.command()
                if words[0] == b"CLUSTER":
                    port = peer.writer.get_extra_info("sockname")[1]
                    nodes = b"a 127.0.0.1:%d@1 myself,master - 0 0 1 connected 0-16383\n" % port
                    peer.writer.write(b"$%d\r\n%b\r\n" % (len(nodes), nodes))
                    continue
                if words[0] == b"SET":
                    await peer.skip_value(words)
                peer.writer.write(f"-{kind} 1 127.0.0.1:{trap.port}\r\n".encode())

        async with pool_at(sends_away, is_cluster=is_cluster) as pool:
            assert await store(pool, [new_key()], [b"value"]) == [PutStatus.FAILED]
            assert await fetch(pool, [new_key()], [5]) == [GetStatus.FAILED]
            assert await pool.exists_many([new_key()], deadline=soon()) == [False]
            with pytest.raises(PoolUnreachable, match="1 of 1 keys were not removed"):
                await pool.remove_many([new_key()], deadline=soon())
        assert trap.came == 0


async def test_a_member_without_slots_is_followed() -> None:
    """A slot that moves to a new server has its values there before that server owns any slot."""
    need_redis()
    values: list[bytes] = []

    async def takes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer, is_cluster=True)
        try:
            while True:
                words = await peer.command()
                if words[0] == b"SET":
                    await peer.skip_value(words)
                    values.append(words[1])
                writer.write(b"+OK\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()

    async with await asyncio.start_server(takes, "127.0.0.1", 0) as server:
        new = server.sockets[0].getsockname()[1]

        async def asks_there(peer: Peer) -> None:
            while True:
                words = await peer.command()
                if words[0] == b"CLUSTER":
                    port = peer.writer.get_extra_info("sockname")[1]
                    nodes = (
                        f"a 127.0.0.1:{port}@1 myself,master - 0 0 1 connected 0-16383\n"
                        f"b 127.0.0.1:{new}@1 master - 0 0 2 connected\n"
                    ).encode()
                    peer.writer.write(b"$%d\r\n%b\r\n" % (len(nodes), nodes))
                elif words[0] == b"SET":
                    await peer.skip_value(words)
                    peer.writer.write(f"-ASK 1 127.0.0.1:{new}\r\n".encode())

        async with pool_at(asks_there, is_cluster=True) as pool:
            assert await store(pool, [new_key()], [b"value"]) == [PutStatus.STORED]
    assert len(values) == 1


@pytest.mark.parametrize(
    ("url", "remark"),
    [
        ("redis://:hunter2@192.0.2.1:6379", "its password travels unencrypted"),
        ("redis://cache.example:6379?password=hunter2", "its password travels unencrypted"),
        ("redis://:hunter2@127.0.0.1:6379", ""),
        ("redis://:hunter2@[::1]:6379", ""),
        ("redis://user@192.0.2.1:6379", ""),
        ("rediss://:hunter2@192.0.2.1:6379", ""),
        ("rediss://192.0.2.1?ssl_cert_reqs=none", "ssl_cert_reqs in its URL turns the check"),
        ("rediss://192.0.2.1?ssl_check_hostname=False", "ssl_check_hostname in its URL turns the check"),
        ("rediss://192.0.2.1?ssl_check_hostname=true&ssl_cert_reqs=required", ""),
        ("valkey://:hunter2@192.0.2.1:6379", "its password travels unencrypted to another machine: use rediss://"),
        ("valkey://:hunter2@localhost:6379", ""),
        ("valkeys://:hunter2@192.0.2.1:6379", ""),
        ("valkeys://192.0.2.1?ssl_cert_reqs=none", "ssl_cert_reqs in its URL turns the check"),
        ("redis+sentinel://:hunter2@127.0.0.1,192.0.2.1:26379/kv", "its password travels unencrypted"),
        ("redis+sentinel://[2001:db8::1]:26379/kv?sentinel_password=hunter2", "its password travels unencrypted"),
        ("redis+sentinel://:hunter2@127.0.0.1:26379,[::1],localhost/kv", ""),
        ("redis+sentinel://192.0.2.1/kv", ""),
        ("rediss+sentinel://:hunter2@192.0.2.1/kv", ""),
        ("rediss+sentinel://192.0.2.1,192.0.2.2/kv?ssl_cert_reqs=none", "ssl_cert_reqs in its URL turns the check"),
        ("mooncake://192.0.2.1:50051", ""),
    ],
)
def test_what_invites_others_is_remarked_on(url: str, remark: str) -> None:
    remarks = remarks_on(url)
    assert [words.startswith(remark) for words in remarks] == [True] * bool(remark)
    assert "hunter2" not in str(remarks)


@pytest.mark.parametrize("scheme", ["redis", "valkey", "redis+sentinel", "unix", "mooncake"])
@pytest.mark.parametrize("password", ["hunter2", "hun/t3r2", "hun?t3r2", "hun#t3r2", "hun/t3r?x=2", "[hunt3r2"])
def test_the_doctor_shows_no_part_of_a_password(scheme: str, password: str) -> None:
    need_redis()
    said = repr(pool_findings(f"{scheme}://:{password}@127.0.0.1:1"))
    assert "hun" not in said
    assert "t3r" not in said


@pytest.mark.autojump
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://:hunter2@192.0.2.1:6379", "its password travels unencrypted to another machine"),
        ("rediss://192.0.2.1:6379?ssl_cert_reqs=none", "turns the check of the server's certificate off"),
        ("valkey://:hunter2@192.0.2.1:6379", "its password travels unencrypted to another machine"),
        ("redis+sentinel://:hunter2@192.0.2.1/kv", "redis at 192.0.2.1:26379: its password travels unencrypted"),
        ("rediss+sentinel://192.0.2.1/kv?ssl_cert_reqs=none", "turns the check of the server's certificate off"),
    ],
)
async def test_a_pool_that_is_opened_says_so_once(
    url: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need_redis()

    async def unreachable(*_: object, **__: object) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr("aiodatadist._context_caching.pools.redis.connection.RedisConnection.talk", unreachable)
    monkeypatch.setattr("aiodatadist._context_caching.pools.redis.tls_port.speaks_tls", unreachable)
    with pytest.raises(PoolTimeout):
        await open_pool(url)
    assert caplog.text.count(words) == 1
    assert "hunter2" not in caplog.text


def _says(nodes: Callable[[int], str]) -> Callable[[Peer], Awaitable[None]]:
    """Return a server that says this of its cluster, given its port, and has nothing else to say."""

    async def serve(peer: Peer) -> None:
        while True:
            words = await peer.command()
            if words[0] == b"SET":
                await peer.skip_value(words)
            text = nodes(peer.writer.get_extra_info("sockname")[1]).encode()
            peer.writer.write(b"$%d\r\n%b\r\n" % (len(text), text) if words[0] == b"CLUSTER" else b":0\r\n")

    return serve


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        (f"a 10.0.0.1:1@1 master - 0 0 1 connected {'0-16383 ' * 2}\n", "a slot has more than one owner"),
        ("a 10.0.0.1:1@1 master - 0 0 1 connected 5-3\n", "5-3 are no slots"),
        ("a 10.0.0.1:1@1 master - 0 0 1 connected 16384\n", "16384 are no slots"),
        ("a 10.0.0.1:1@1 master - 0 0 1 connected\n" * (MAX_SERVERS + 1), "it has 4097 servers: the limit is 4096"),
        ("a" * (MAX_VIEW + 1), "it has 1048577 characters: the limit is 1048576"),
        ("a 10.0.0\0.1:1@1 master - 0 0 1 connected 0-16383\n", "is not a host"),
        ("a 10.0.0.1:1@1,kv\0 master - 0 0 1 connected 0-16383\n", "is not a host"),
        (f"a 10.0.0.1:1@1,{'x' * 254} master - 0 0 1 connected 0-16383\n", "is not a host"),
    ],
)
def test_what_a_server_says_of_its_cluster_is_bounded(nodes: str, why: str) -> None:
    """Otherwise 16 MiB of slots would stop the event loop for half an hour."""
    need_redis()

    with pytest.raises(ValueError, match=why):
        parse_nodes(nodes, "10.0.0.1")


async def test_a_server_that_names_impossible_addresses_has_failed() -> None:
    """The calls end as if it did not answer, and not with an error of the name service."""
    async with pool_at(
        _says(lambda port: f"a 127.0.0.1\0:{port}@1 master - 0 0 1 connected 0-16383\n"), is_cluster=True
    ) as pool:
        for call in (store(pool, [new_key()], [b"value"]), fetch(pool, [new_key()], [5])):
            with pytest.raises(PoolUnreachable, match="does not say who is in its cluster"):
                await call
        assert not await pool.healthy(deadline=soon())


@pytest.mark.parametrize("host", ["a\0b", "x" * 300, "..", "\x1b[31m"])
async def test_a_host_that_is_none_is_a_server_that_does_not_answer(host: str) -> None:
    need_redis()

    with pytest.raises(NodeDown):
        await Node(host, 1, Account({}, False, 1)).ask(request("PING"))


async def test_servers_that_have_left_are_forgotten() -> None:
    """A server that names another address each time costs no memory for each."""
    names = (f"127.0.1.{number}" for number in range(1, 200))
    nodes = _says(lambda _: f"a {next(names)}:1@1 master - 0 0 1 connected 0-16383\n")
    async with pool_at(nodes, is_cluster=True) as pool:
        for _ in range(20):
            await pool.healthy(deadline=soon())
        assert isinstance(pool, RedisPool)
        assert len(pool._account.settings) <= 3


async def test_a_number_that_is_too_long_counts_as_unknown() -> None:
    """Python reads no int of more than 4300 digits."""
    told = b"cluster_enabled:0\r\nused_memory:%b\r\nmaxmemory:%b\r\n" % (b"8" * 5000, b"9" * 5000)

    async def boasts(peer: Peer) -> None:
        while True:
            for _ in range(2 * int((await peer.reader.readuntil())[1:])):
                await peer.reader.readuntil()
            peer.writer.write(b"$%d\r\n%b\r\n" % (len(told), told))

    async with pool_at(boasts) as pool:
        (node,) = await pool.nodes(deadline=soon())
        assert (node.is_alive, node.capacity, node.used) == (True, None, None)


async def test_an_answer_to_a_removal_is_shown_short_and_printable() -> None:
    async def talks(peer: Peer) -> None:
        while True:
            await peer.command()
            peer.writer.write(b"$70000\r\n" + b"\x1b" * 70000 + b"\r\n")

    async with pool_at(talks) as pool:
        with pytest.raises(PoolUnreachable, match="1 of 1 keys were not removed") as caught:
            await pool.remove_many([new_key()], deadline=soon())
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()
