"""A pool's servers that send us elsewhere: the password goes to members of a cluster only, by that cluster's own list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from aiodatadist._context_caching.pools.contract import GetStatus, PoolTimeout, PoolUnreachable, PutStatus
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
        ("mooncake://192.0.2.1:50051", ""),
    ],
)
def test_what_invites_others_is_remarked_on(url: str, remark: str) -> None:
    remarks = remarks_on(url)
    assert [words.startswith(remark) for words in remarks] == [True] * bool(remark)
    assert "hunter2" not in str(remarks)


@pytest.mark.autojump
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://:hunter2@192.0.2.1:6379", "its password travels unencrypted to another machine"),
        ("rediss://192.0.2.1:6379?ssl_cert_reqs=none", "turns the check of the server's certificate off"),
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
