"""Ranges by address between two engines: what arrives, what is out of reach, and what each call says of it."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest

from aiodatadist import LLMConfig, NotLinked, ParamInvalid
from aiodatadist._testing.ports import free_port
from aiodatadist.hixl import Hixl, MemDesc, MemType, NotifyDesc, Status, TransferOp, TransferOpDesc, status_of
from tests.hixl.pairs import SIZE, Bytes, End, connected, descs, open_end, options
from tests.profiles import at_night
from tests.strict.marks import STRICT

READ, WRITE = TransferOp.READ, TransferOp.WRITE
transports = pytest.mark.parametrize("transport", ["hccl", "tcp", "loopback", at_night("auto")])


async def said(call: Any) -> Status:
    """Return the status of what a call raises; SUCCESS if it raises nothing."""
    try:
        await call
    except Exception as error:
        return status_of(error)
    return Status.SUCCESS


async def status_of_transfer(end: End, *args: Any, **kwargs: Any) -> Status:
    """Return the status of a transfer, whether it is refused or fails."""
    try:
        await end.engine.transfer(*args, **kwargs)
    except Exception as error:
        return status_of(error)
    return Status.SUCCESS


@transports
@pytest.mark.parametrize("op", [READ, WRITE])
async def test_ranges_of_many_lengths_arrive_and_no_other_byte_changes(transport: str, op: TransferOp) -> None:
    async with connected(transport) as (server, client):
        draw = random.Random(7)
        client.view[:] = draw.randbytes(SIZE)
        source, target = (server, client) if op is READ else (client, server)
        before, expected = bytes(source.view), bytearray(target.view)
        ranges, at = [], 0
        while at < SIZE - 70000:
            nbytes, fro = draw.choice([1, 100, 4096, 65536]), draw.randrange(SIZE - 65536)
            expected[at : at + nbytes] = before[fro : fro + nbytes]
            ranges.append((at, fro, nbytes) if op is READ else (fro, at, nbytes))
            at += nbytes + draw.randrange(5000)
        report = await client.engine.transfer(server.name, op, descs(client, server, *ranges))
        assert bytes(target.view) == expected
        assert report.bytes == sum(nbytes for _, _, nbytes in ranges)
        assert bytes(source.view) == before


async def test_neighbours_travel_together() -> None:
    async with connected() as (server, client):
        ranges = [(i * 16384, i * 16384, 16384) for i in range(SIZE // 16384)]
        report = await client.engine.transfer(server.name, READ, descs(client, server, *ranges))
        assert report.ranges < len(ranges) // 4
        assert client.view == server.view


@transports
async def test_a_call_may_use_several_registered_ranges_of_either_end(transport: str) -> None:
    async with connected(transport) as (server, client):
        more = [Bytes(fill=7), Bytes(fill=8)]
        mine = Bytes()
        for memory in more:  # after connecting: in reach all the same
            await server.engine.register_mem(memory.desc, MemType.MEM_DEVICE)
        await client.engine.register_mem(mine.desc, MemType.MEM_DEVICE)
        ranges = [
            TransferOpDesc(mine.address + 100, more[0].address, 1000),
            TransferOpDesc(client.memory.address, more[1].address + 1000, 2000),
            TransferOpDesc(mine.address + 5000, server.memory.address + 4096, 4096),
        ]
        for _ in range(2):  # once asked of the peer, once known
            await client.engine.transfer(server.name, READ, ranges)
            assert bytes(mine.view[100:1100]) == b"\7" * 1000
            assert bytes(client.view[:2000]) == b"\x08" * 2000
            assert mine.view[5000:9096] == server.view[4096:8192]
            mine.view[:] = client.view[:] = bytes(SIZE)


async def test_each_end_may_use_its_own_connection_only() -> None:
    async with connected() as (server, client):
        client.view[:100] = bytes([9]) * 100
        assert (
            await status_of_transfer(server, client.name, READ, descs(server, client, (0, 0, 100)))
            is Status.NOT_CONNECTED
        )
        await server.engine.connect(client.name)
        await server.engine.transfer(client.name, READ, descs(server, client, (0, 0, 100)))
        assert bytes(server.view[:100]) == bytes([9]) * 100
        await client.engine.disconnect(server.name)
        assert (
            await status_of_transfer(client, server.name, READ, descs(client, server, (0, 0, 9)))
            is Status.NOT_CONNECTED
        )
        await server.engine.transfer(client.name, WRITE, descs(server, client, (0, 200, 100)))
        assert bytes(client.view[200:300]) == bytes([9]) * 100


@transports
async def test_a_peer_reaches_registered_memory_only(transport: str) -> None:
    """Each end refuses ranges that it did not register, whichever side of the range they are on, and nothing moves."""
    async with connected(transport, BufferPool="0:0") as (server, client):
        here, there = client.memory.address, server.memory.address
        other = Bytes(fill=5)
        before = bytes(client.view), bytes(server.view)
        for op in (READ, WRITE):
            for remote, nbytes in (
                (there - 1, 100), (there + SIZE - 99, 100), (there + SIZE, 1), (other.address, 10), (12345, 1),
                (there, SIZE + 1), (there, 1 << 63), ((1 << 64) - 5, 5),
            ):  # fmt: skip
                for first in ([], [TransferOpDesc(here, there, 1)]):
                    ranges = [*first, TransferOpDesc(here + 50, remote, min(nbytes, SIZE - 50))]
                    if nbytes > SIZE:
                        ranges[-1] = TransferOpDesc(here, remote, nbytes)
                    assert await status_of_transfer(client, server.name, op, ranges) is Status.PARAM_INVALID
            for local, nbytes in ((here - 1, 2), (here + SIZE - 1, 2), (other.address, 10)):
                ranges = [TransferOpDesc(local, there, nbytes)]
                assert await status_of_transfer(client, server.name, op, ranges) is Status.PARAM_INVALID
        assert (bytes(client.view), bytes(server.view)) == before
        assert bytes(other.view) == b"\5" * SIZE
        assert await said(client.engine.send_notify(server.name, NotifyDesc("it", "works"))) is Status.SUCCESS


async def test_wrong_arguments_are_refused_before_anything_starts() -> None:
    async with connected() as (server, client):
        good = descs(client, server, (0, 0, 10))
        move = client.engine.transfer
        for bad in ([], [TransferOpDesc(0, 1, 1)], [TransferOpDesc(1, 0, 1)], [*good, TransferOpDesc(1, 1, 0)]):
            with pytest.raises(ParamInvalid):
                move(server.name, READ, bad)
        for args in ((server.name, 0, good), (server.name, READ, [1]), (server.name, READ, None), (5, READ, good)):
            with pytest.raises(TypeError):
                move(*args)
        with pytest.raises(ParamInvalid, match="must be ip:port"):
            move("host:1", READ, good)
        with pytest.raises(ParamInvalid, match="port above 0"):
            move("127.0.0.1", READ, good)
        with pytest.raises(NotLinked, match=r"engine 127.0.0.1:9 is not connected .* connect\(\)"):
            move("127.0.0.1:9", READ, good)


# ---- memory ----


async def test_the_same_range_has_the_same_handle_and_others_must_be_apart() -> None:
    async with open_end(0) as end:
        assert await end.engine.register_mem(end.memory.desc, MemType.MEM_DEVICE) == end.handle
        start = end.memory.address
        for addr, nbytes in (
            (start, SIZE - 1),
            (start + SIZE - 1, 2),
            (start - 1, 2),
            (start + 5, 5),
            (0, 5),
            (start, 0),
        ):
            assert (
                await said(end.engine.register_mem(MemDesc(addr, nbytes), MemType.MEM_DEVICE)) is Status.PARAM_INVALID
            )
        assert await said(end.engine.register_mem(MemDesc((1 << 64) - 1, 2), MemType.MEM_HOST)) is Status.PARAM_INVALID
        with pytest.raises(TypeError):
            await end.engine.register_mem(end.memory.desc, 0)  # type: ignore[arg-type]
        assert await said(end.engine.deregister_mem(0)) is Status.PARAM_INVALID
        for _ in range(2):
            await end.engine.deregister_mem(end.handle)
        await end.engine.deregister_mem(12345)
        assert await end.engine.register_mem(end.memory.desc, MemType.MEM_DEVICE) > 0


async def test_memory_stays_registered_while_a_peer_may_reach_it() -> None:
    async with connected() as (server, client):
        assert await said(server.engine.deregister_mem(server.handle)) is Status.FAILED
        assert await said(client.engine.deregister_mem(client.handle)) is Status.FAILED
        await client.engine.transfer(server.name, READ, descs(client, server, (0, 0, 10)))
        await client.engine.disconnect(server.name)
        await client.engine.deregister_mem(client.handle)
        ranges = descs(client, server, (0, 0, 10))
        await client.engine.connect(server.name)
        assert await status_of_transfer(client, server.name, READ, ranges, staging=False) is Status.PARAM_INVALID


async def test_memory_that_was_registered_again_is_found_by_the_next_connection() -> None:
    async with open_end(0, fill=1) as server, open_end(1) as client:
        other = Bytes(fill=2)
        for memory, value in ((server.memory, 1), (other, 2)):
            handle = await server.engine.register_mem(memory.desc, MemType.MEM_DEVICE)
            await client.engine.connect(server.name)
            ranges = [TransferOpDesc(client.memory.address, memory.address, 100)]
            await client.engine.transfer(server.name, READ, ranges)
            assert bytes(client.view[:100]) == bytes([value]) * 100
            await client.engine.disconnect(server.name)
            await server.engine.cluster.wait_link_closed(client.engine.cluster.cluster_id)
            await server.engine.deregister_mem(handle)


# ---- connections ----


async def test_connections_are_made_once_and_ended_once() -> None:
    async with connected() as (server, client):
        connect, disconnect = client.engine.connect, client.engine.disconnect
        assert await said(connect(server.name)) is Status.ALREADY_CONNECTED
        await client.engine.transfer(server.name, READ, descs(client, server, (0, 0, 10)))
        await disconnect(server.name)
        assert await said(disconnect(server.name)) is Status.NOT_CONNECTED
        assert await said(connect(client.name)) is Status.PARAM_INVALID
        for timeout in (0, -1, 1 << 31):
            assert await said(connect(server.name, timeout)) is Status.PARAM_INVALID
            assert await said(disconnect(server.name, timeout)) is Status.PARAM_INVALID
        assert await said(connect(f"127.0.0.1:{free_port()}")) in {Status.FAILED, Status.TIMEOUT}
        await connect(server.name)
        await client.engine.transfer(server.name, READ, descs(client, server, (0, 0, 10)))


async def test_an_engine_of_another_name_is_not_connected_to() -> None:
    """The name is what a peer proves its place by: another engine at the address is refused."""
    async with open_end(0) as server, open_end(1) as client:
        port = server.name.rpartition(":")[2]
        assert await said(client.engine.connect(f"127.0.0.2:{port}")) in {Status.FAILED, Status.TIMEOUT}


async def test_a_client_needs_no_port() -> None:
    async with open_end(0, fill=3) as server, Hixl("127.0.0.1", options(1)) as client:
        mine = Bytes()
        await client.register_mem(mine.desc, MemType.MEM_DEVICE)
        await client.connect(server.name)
        await client.transfer(server.name, READ, [TransferOpDesc(mine.address, server.memory.address, 50)])
        assert bytes(mine.view[:51]) == b"\3" * 50 + b"\0"


@pytest.mark.parametrize("transport", ["hccl", "tcp"])
async def test_with_auto_connect_transfers_connect_by_themselves(transport: str) -> None:
    async with open_end(0, transport, fill=4) as server, open_end(1, transport, AutoConnect="1") as client:
        ranges = descs(client, server, (0, 0, 100))
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(client.engine.transfer(server.name, READ, ranges))
        assert bytes(client.view[:100]) == b"\4" * 100
        await client.engine.disconnect(server.name)
        await client.engine.transfer(server.name, WRITE, ranges)
        missing = descs(client, server, (0, 0, 1))
        name = f"127.0.0.1:{free_port()}"
        assert await status_of_transfer(client, name, READ, missing) in {Status.FAILED, Status.TIMEOUT}


async def test_an_engine_is_used_while_it_is_initialised_only() -> None:
    engine = Hixl("127.0.0.1", options(0))
    with pytest.raises(RuntimeError, match="not initialised"):
        engine.transfer("127.0.0.1:1", READ, [])
    await engine.finalize()
    await engine.initialize()
    await engine.initialize()
    await engine.finalize()
    await engine.finalize()
    with pytest.raises(RuntimeError, match="not initialised"):
        await engine.connect("127.0.0.1:1")
    async with engine:
        assert engine.name == "127.0.0.1"


async def test_two_engines_of_one_name_are_refused() -> None:
    async with open_end(0) as one:
        assert await said(Hixl(one.name, options(1)).initialize()) is Status.PARAM_INVALID
    async with Hixl("127.0.0.1:0", options(0)), Hixl("127.0.0.1:0", options(1)):
        pass


async def test_an_engine_takes_a_configuration() -> None:
    config = LLMConfig(device_id=1, transport="tcp", tcp_streams=1)
    async with Hixl("127.0.0.1", config) as engine:
        assert engine.cluster.config.tcp_streams == 1
        assert engine.cluster.config is not config


# ---- notifications ----


@transports
async def test_notifications_come_in_order_and_behind_what_was_written(transport: str) -> None:
    async with connected(transport) as (server, client):
        assert server.engine.get_notifies() == []
        client.view[:10] = bytes([6]) * 10
        await client.engine.transfer(server.name, WRITE, descs(client, server, (0, 0, 10)))
        for number in range(200):  # more than a link holds back
            await client.engine.send_notify(server.name, NotifyDesc(f"name {number}", "\u4e2d" * 341 + "x"))
        assert bytes(server.view[:10]) == bytes([6]) * 10
        notes = server.engine.get_notifies()
        assert [note.name for note in notes] == [f"name {number}" for number in range(200)]
        assert {note.notify_msg for note in notes} == {"\u4e2d" * 341 + "x"}
        await client.engine.send_notify(server.name, NotifyDesc("", ""))
        assert (await anext(server.engine.notifications())).name == ""
        assert client.engine.get_notifies() == []


async def test_a_notification_has_limits() -> None:
    async with connected() as (server, client):
        send = client.engine.send_notify
        for note in (NotifyDesc("a" * 1025, ""), NotifyDesc("", "\u4e2d" * 342)):
            assert await said(send(server.name, note)) is Status.PARAM_INVALID
        assert await said(send(server.name, NotifyDesc("", ""), 0)) is Status.PARAM_INVALID
        assert await said(send(f"127.0.0.1:{free_port()}", NotifyDesc("", ""))) is Status.NOT_CONNECTED
        assert await said(server.engine.send_notify(client.name, NotifyDesc("", ""))) is Status.NOT_CONNECTED
        with pytest.raises(TypeError):
            await send(server.name, "text")  # type: ignore[arg-type]


async def test_a_payload_that_is_no_notification_is_dropped() -> None:
    async with connected() as (server, client):
        for payload in (b"", b"\0", b"\0\5abc", b"\xff\xff", b"\4\1" + b"n" * 1025):
            await client.engine.cluster.notify(server.engine.cluster.cluster_id, payload)
        await client.engine.send_notify(server.name, NotifyDesc("good", ""))
        assert [note.name for note in server.engine.get_notifies()] == ["good"]


# ---- staging buffers ----


@pytest.mark.parametrize("transport", ["hccl", "tcp"])
@pytest.mark.parametrize("op", [READ, WRITE])
async def test_unregistered_memory_goes_through_staging_buffers(transport: str, op: TransferOp) -> None:
    async with connected(transport, BufferPool="2:1") as (server, client):
        mine = bytearray(random.Random(3).randbytes(SIZE + 100))
        start = Bytes(SIZE)  # at an address that is not registered
        start.view[:] = mine[:SIZE]
        want = bytearray(start.view if op is READ else server.view)
        ranges = [(5, 9, SIZE - 9), (1, 2, 3)]
        source, target = (server.view, start.view) if op is READ else (start.view, server.view)
        frozen = bytes(source)
        for a, b, n in ranges:
            to, fro = (a, b) if op is READ else (b, a)
            want[to : to + n] = frozen[fro : fro + n]
        moved = [TransferOpDesc(start.address + a, server.memory.address + b, n) for a, b, n in ranges]
        async with asyncio.TaskGroup() as group:  # more calls than buffers
            for _ in range(5):
                group.create_task(client.engine.transfer(server.name, op, moved))
        assert bytes(target) == want
        assert bytes(source) == frozen


async def test_staging_needs_buffers_and_one_kind_of_memory() -> None:
    async with connected() as (server, client):
        other = Bytes()
        unknown = TransferOpDesc(other.address, server.memory.address, 10)
        mixed = [unknown, *descs(client, server, (0, 0, 10))]
        assert await status_of_transfer(client, server.name, READ, [unknown]) is Status.SUCCESS
        assert await status_of_transfer(client, server.name, READ, [unknown], staging=False) is Status.PARAM_INVALID
        assert await status_of_transfer(client, server.name, READ, mixed) is Status.PARAM_INVALID
        leaving = TransferOpDesc((1 << 64) - 5, server.memory.address, 10)
        assert await status_of_transfer(client, server.name, READ, [leaving]) is Status.PARAM_INVALID
    async with connected(BufferPool="0:0") as (server, client):
        unknown = TransferOpDesc(other.address, server.memory.address, 10)
        assert await status_of_transfer(client, server.name, READ, [unknown]) is Status.PARAM_INVALID


@pytest.mark.skipif(STRICT in {"hccs", "aicpu"}, reason="over HCCS a peer's memory of the host is out of reach")
async def test_memory_of_the_host_is_moved_beside_unregistered_memory() -> None:
    async with connected(kind=MemType.MEM_HOST) as (server, client):
        other = Bytes()
        unknown = TransferOpDesc(other.address, server.memory.address + 4096, 10)
        await client.engine.transfer(server.name, READ, [unknown, *descs(client, server, (0, 4096, 20))])
        assert other.view[:10] == server.view[4096:4106]
        assert client.view[:20] == server.view[4096:4116]


async def test_a_peer_reaches_no_staging_buffer() -> None:
    async with connected(BufferPool="1:1") as (server, client):
        staged = [entry for entry in server.engine.cluster.engine.registry.table if not entry.remote_accessible]  # type: ignore[attr-defined]
        assert len(staged) == 1
        ranges = [TransferOpDesc(client.memory.address, staged[0].addresses[0], 10)]
        assert await status_of_transfer(client, server.name, READ, ranges) is Status.PARAM_INVALID


# ---- options ----


async def test_options_without_effect_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    resources = {
        "comm_resource_config.protocol_desc": ["roce:device"],
        "unknown.key": 1,
        "connect_pool.thread_num": "4",
    }
    given = {"GlobalResourceConfig": json.dumps(resources), "LocalCommRes": '{"version": "1.3"}', **options(0)}
    async with Hixl("127.0.0.1", given):
        pass
    told = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert len(told) == 2
    assert any("protocol_desc" in line for line in told)
    assert any("1.3" in record.getMessage() for record in caplog.records)


async def test_idle_connections_above_the_high_mark_are_closed_down_to_the_low_one() -> None:
    keys = {"max_channel": 4, "high_waterline": 0.5, "low_waterline": 0.25}
    pool = json.dumps({f"channel_pool.{key}": value for key, value in keys.items()})
    given: dict[str, Any] = {"AutoConnect": "1", "GlobalResourceConfig": pool}
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(open_end(0, "loopback", fill=number + 1)) for number in range(4)]
        client = await stack.enter_async_context(open_end(0, "loopback", **given))
        links = client.engine.cluster.statistics
        for number, server in enumerate(servers[:2]):
            await client.engine.transfer(server.name, READ, descs(client, server, (0, 0, 10)))
            assert len(links().links) == number + 1
        closed = client.engine.cluster.wait_link_closed
        await client.engine.transfer(servers[2].name, READ, descs(client, servers[2], (0, 0, 10)))
        for server in servers[:2]:  # two is the high mark, and one the low one
            await closed(server.engine.cluster.cluster_id)
        await client.engine.transfer(servers[0].name, READ, descs(client, servers[0], (0, 0, 10)))
        assert bytes(client.view[:10]) == b"\1" * 10
