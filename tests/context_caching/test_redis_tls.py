"""Redis over TLS: values larger than what a socket takes at once, and no end that cannot prove what it is."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import pytest
import trustme

from aiodatadist._context_caching.pools.contract import (
    GetStatus,
    KVPool,
    PoolRefused,
    PoolTimeout,
    PoolUnreachable,
    PutStatus,
)
from aiodatadist._testing.ports import free_port
from aiodatadist.testing.pools import new_key, soon, store
from tests.context_caching.servers import RedisServer, need_redis, running

TLS_HANDSHAKE = 0x16
"""The first byte of a client that begins TLS."""
SIZES = [1, 4095, 3 << 20, 17 << 20]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with an authority's certificate, and a certificate for 127.0.0.1 with its key."""
    folder = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(folder / "other.pem"))
    cert = ca.issue_cert("127.0.0.1")
    cert.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    cert.private_key_pem.write_to_path(str(folder / "key.pem"))
    return folder


@pytest.fixture(scope="module")
def tls_port(authority: Path) -> Iterator[int]:
    need_redis()
    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "no", "--tls-ca-cert-file", str(authority / "ca.pem")]
    options += ["--tls-cert-file", str(authority / "cert.pem"), "--tls-key-file", str(authority / "key.pem")]
    with running(RedisServer(options=options)):
        yield port


@asynccontextmanager
async def opened(port: int, ca: Path) -> AsyncIterator[KVPool]:
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - absent where redis-py is

    pool = await RedisPool.open(f"rediss://127.0.0.1:{port}?ssl_ca_certs={ca}")
    try:
        yield pool
    finally:
        await pool.aclose()


async def test_values_of_all_sizes_come_back(tls_port: int, authority: Path) -> None:
    rng = random.Random(5)
    values = [rng.randbytes(size) for size in SIZES]
    keys = [new_key() for _ in SIZES]
    async with opened(tls_port, authority / "ca.pem") as pool:
        assert await store(pool, keys, values) == [PutStatus.STORED] * len(SIZES)
        found = await pool.get_many(keys, SIZES, deadline=soon())
        for value, content in zip(found, values, strict=True):
            assert not isinstance(value, GetStatus)
            assert bytes(value.view()) == content
            value.release()


async def test_a_call_that_is_given_up_leaves_no_byte_for_the_next(tls_port: int, authority: Path) -> None:
    async with opened(tls_port, authority / "ca.pem") as pool:
        keys = [new_key() for _ in range(4)]
        values = [bytes([i]) * (8 << 20) for i in range(4)]
        assert await store(pool, keys, values) == [PutStatus.STORED] * 4
        for _ in range(3):
            with pytest.raises(PoolTimeout):
                await pool.get_many(keys, [8 << 20] * 4, deadline=anyio.current_time() + 0.003)
        found = await pool.get_many(keys, [8 << 20] * 4, deadline=soon())
        for value, content in zip(found, values, strict=True):
            assert not isinstance(value, GetStatus)
            assert bytes(value.view()) == content
            value.release()


async def test_a_server_that_cannot_prove_who_it_is_gets_nothing(tls_port: int, authority: Path) -> None:
    with pytest.raises(PoolUnreachable, match=r"(?i)certificate"):
        async with opened(tls_port, authority / "other.pem"):
            pass


# ---- a URL without TLS ----


async def refusal_of(port: int) -> str:
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - absent where redis-py is

    with anyio.fail_after(30), pytest.raises(PoolRefused) as caught:
        await RedisPool.open(f"redis://127.0.0.1:{port}", timeout=60)
    return str(caught.value)


async def test_a_redis_port_with_tls_is_recognised(tls_port: int) -> None:
    assert "speaks TLS: the URL must begin with rediss://" in await refusal_of(tls_port)


@pytest.mark.parametrize("says", [b"\x15\x03\x01\x00\x02\x02\x46", b""], ids=["alert", "nothing"])
async def test_a_port_with_tls_that_stays_open_is_recognised_at_once(says: bytes) -> None:
    """Answer as TLS terminators do: some send an alert, some wait for the rest of what they take for a record."""
    need_redis()

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            first = await stream.receive()
            if first[0] == TLS_HANDSHAKE:
                await stream.send(b"\x16\x03\x03\x00\x7a\x02")
            elif says:
                await stream.send(says)
            await anyio.sleep_forever()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        assert "speaks TLS: the URL must begin with rediss://" in await refusal_of(port)
        group.cancel_scope.cancel()


async def test_a_server_that_hangs_is_out_of_time_and_not_taken_for_one_with_tls() -> None:
    from aiodatadist._context_caching.pools.redis import tls_port  # noqa: PLC0415 - as above
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - as above

    need_redis()
    asked = anyio.Event()

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            if (await stream.receive())[0] == TLS_HANDSHAKE:
                asked.set()
            await anyio.sleep_forever()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        with pytest.raises(PoolTimeout, match="connecting to redis"):
            await RedisPool.open(f"redis://127.0.0.1:{port}", timeout=2 * tls_port.QUIET_SECONDS)
        assert asked.is_set()
        group.cancel_scope.cancel()
