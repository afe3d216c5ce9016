"""The proxy does to connections what it is told, and nothing else."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from aiodatadist._testing.proxy import Flow
from aiodatadist.errors import ParamInvalid
from aiodatadist.testing import (
    Bandwidth,
    ChaosProxy,
    Corrupt,
    Drop,
    Latency,
    LimitData,
    Reorder,
    Repeat,
    ResetPeer,
    Slicer,
    SlowClose,
    Timeout,
    Toxic,
)
from tests.clock import took
from tests.held import turns
from tests.stopwatch import lasting

DATA = random.Random(0).randbytes(300_000)


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


class Client:
    """A connection through the proxy, to a server that sends everything back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def echo(self, data: bytes) -> bytes:
        sending = asyncio.create_task(self._send(data))
        try:
            return await self._reader.readexactly(len(data))
        finally:
            await sending

    async def _send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def rest(self) -> bytes:
        return await self._reader.read()

    def close(self) -> None:
        self._writer.close()

    def eof(self) -> None:
        self._writer.write_eof()


@asynccontextmanager
async def proxied() -> AsyncIterator[ChaosProxy]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    try:
        async with ChaosProxy(server.sockets[0].getsockname()[:2], seed=1) as proxy:
            yield proxy
    finally:
        server.close()


@asynccontextmanager
async def connected(proxy: ChaosProxy) -> AsyncIterator[Client]:
    client = Client(*await asyncio.open_connection(*proxy.address))
    try:
        yield client
    finally:
        client.close()


async def is_reset(proxy: ChaosProxy) -> bool:
    """Return True if a new connection is reset, while it is made or afterwards."""
    try:
        async with connected(proxy) as client:
            await client.rest()
    except ConnectionError:
        return True
    return False


@asynccontextmanager
async def client_of_proxy() -> AsyncIterator[tuple[Client, ChaosProxy]]:
    async with proxied() as proxy, connected(proxy) as client:
        yield client, proxy


async def test_all_bytes_pass_in_both_directions_and_the_end_as_well() -> None:
    async with client_of_proxy() as (client, proxy):
        assert await client.echo(DATA) == DATA
        assert proxy.passed == 2 * len(DATA)
        assert proxy.connections == 1
        client.eof()
        assert await client.rest() == b""
    assert proxy.connections == 0


@pytest.mark.parametrize("toxic", [Latency(0.01, 0.01), Slicer(4000, 3999), Bandwidth(10e6), SlowClose(0.01)])
async def test_what_only_takes_longer_changes_no_byte(toxic: Toxic) -> None:
    async with client_of_proxy() as (client, proxy):
        with proxy.under(toxic):
            assert await client.echo(DATA) == DATA


@pytest.mark.autojump
async def test_latency_is_that_of_each_direction_and_no_limit_of_bandwidth() -> None:
    async with client_of_proxy() as (client, proxy):
        with proxy.under(Latency(10)), took(20):  # one after the other, pieces would take longer
            assert await client.echo(DATA[:100_000]) == DATA[:100_000]


async def test_one_direction_alone() -> None:
    async with client_of_proxy() as (client, proxy):
        with proxy.under(Timeout(), direction="downstream"):
            waiting = asyncio.create_task(client.echo(b"1234"))
            while proxy.passed < 4:  # noqa: ASYNC110 - to the server
                await asyncio.sleep(0.001)
            assert not waiting.done()
        assert await waiting == b"1234"


async def test_what_is_held_back_comes_when_the_timeout_is_removed() -> None:
    async with client_of_proxy() as (client, proxy):
        with proxy.under(Timeout()):
            waiting = asyncio.create_task(client.echo(b"1234"))
            await anyio.wait_all_tasks_blocked()
            assert proxy.passed == 0
        assert await waiting == b"1234"


@pytest.mark.autojump
async def test_a_timeout_closes_the_connection_after_its_time() -> None:
    async with client_of_proxy() as (client, proxy):
        with proxy.under(Timeout(60)), took(60):
            with pytest.raises(asyncio.IncompleteReadError):
                await client.echo(b"1234")
            assert await client.rest() == b""


async def test_bandwidth_is_kept() -> None:
    async with client_of_proxy() as (client, proxy):
        with proxy.under(Bandwidth(100_000), direction="upstream"), lasting(5.0, 0.2):
            await client.echo(DATA[:25_000])


async def test_limited_data_is_passed_to_the_byte_and_the_connection_closed() -> None:
    async with client_of_proxy() as (client, proxy):
        proxy.add(LimitData(1000), "downstream")
        with pytest.raises(asyncio.IncompleteReadError) as caught:
            await client.echo(DATA[:5000])
        assert caught.value.partial == DATA[:1000]


@pytest.mark.parametrize("way", ["toxic", "reset", "down"])
async def test_open_connections_are_reset(way: str) -> None:
    async with client_of_proxy() as (client, proxy):
        await client.echo(b"1234")
        if way == "toxic":
            proxy.add(ResetPeer(0.01))
        elif way == "reset":
            proxy.reset()
        else:
            with proxy.down():
                assert proxy.connections == 1  # until its tasks have run
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_while_it_is_down_new_connections_are_reset_and_later_ones_are_not() -> None:
    async with proxied() as proxy:
        with proxy.down():
            assert await is_reset(proxy)
        async with connected(proxy) as client:
            assert await client.echo(b"1234") == b"1234"


async def test_one_bit_of_a_piece_is_flipped() -> None:
    async with client_of_proxy() as (client, proxy):
        with proxy.under(Corrupt(), direction="upstream"):
            found = await client.echo(bytes(1000))
    assert sum(byte.bit_count() for byte in found) == 1


async def test_the_same_seed_flips_the_same_bits() -> None:
    found = []
    for _ in range(2):
        async with client_of_proxy() as (client, proxy):
            with proxy.under(Corrupt()):
                found.append(await client.echo(bytes(100)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("toxic", "comes"), [(Drop(), b""), (Repeat(), b"12341234"), (Reorder(), b"1234"), (Drop(0), b"1234")], ids=str
)
async def test_a_piece_is_lost_or_comes_twice_or_is_kept_to_the_end(toxic: Toxic, comes: bytes) -> None:
    async with client_of_proxy() as (client, proxy):
        with proxy.under(toxic, direction="upstream"):
            await client._send(b"1234")
            client.eof()
            assert await client.rest() == comes


async def test_a_piece_comes_behind_the_next_one() -> None:
    async with proxied() as proxy:
        with socket.socket() as unused:
            flow = Flow(proxy, "upstream", unused, unused)
        with proxy.under(Reorder()):
            assert flow.lost_or_moved(b"1") == []
            assert flow.lost_or_moved(b"2") == [b"2", b"1"]
            assert flow.lost_or_moved(b"3") == []
        assert flow.lost_or_moved(b"4") == [b"4", b"3"]
        assert flow.lost_or_moved(b"5") == [b"5"]


async def test_a_piece_that_waits_for_the_next_one_comes_when_the_toxic_is_gone() -> None:
    async with client_of_proxy() as (client, proxy):
        with proxy.under(Reorder(), direction="downstream"):
            echoing = asyncio.create_task(client.echo(b"1234"))
            while proxy.passed < 4:  # noqa: ASYNC110 - nothing tells of a piece that has passed
                await asyncio.sleep(0)
            await turns(100)
            assert not echoing.done()
        assert await echoing == b"1234"


async def test_without_a_server_the_client_is_reset() -> None:
    async with proxied() as proxy:
        proxy.upstream = ("127.0.0.1", 1)
        assert await is_reset(proxy)


async def test_a_sender_is_not_read_faster_than_its_receiver_reads() -> None:
    async with client_of_proxy() as (client, proxy):
        with proxy.under(Timeout()):
            sending = asyncio.create_task(client._send(bytes(64 << 20)))
            await turns(5000)
            assert not sending.done()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending


async def test_the_end_of_the_proxy_resets_what_is_open() -> None:
    async with proxied() as proxy:
        client = Client(*await asyncio.open_connection(*proxy.address))
        await client.echo(b"1234")
    with pytest.raises(ConnectionResetError):
        await client.rest()
    client.close()
    with pytest.raises(RuntimeError, match="not open"):
        _ = proxy.address


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Latency(-1), "Latency.seconds is -1"),
        (lambda: Latency(1, float("nan")), "Latency.jitter is nan"),
        (lambda: Bandwidth(0), "Bandwidth.bytes_per_second is 0: must be a finite number, at least 1"),
        (lambda: Slicer(4, 4), "Slicer.variation is 4: must be at least 0, and below average, 4"),
        (lambda: Corrupt(1.5), "Corrupt.share is 1.5: must be from 0 to 1"),
        (lambda: Drop(-1), "Drop.share is -1: must be a finite number, at least 0"),
        (lambda: Repeat(2), "Repeat.share is 2: must be from 0 to 1"),
        (lambda: Reorder(2), "Reorder.share is 2: must be from 0 to 1"),
        (lambda: Timeout(float("inf")), "Timeout.seconds is inf"),
        (lambda: LimitData(-1), "LimitData.nbytes is -1"),
        (lambda: ResetPeer(-1), "ResetPeer.seconds"),
        (lambda: SlowClose(-1), "SlowClose.seconds"),
    ],
)
def test_a_toxic_that_makes_no_sense_is_refused(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(ParamInvalid, match=words.replace("(", r"\(")):
        make()
