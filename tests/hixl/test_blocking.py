"""``import hixl``: each call, its parameters, and the status of each thing that can be wrong with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest

from aiodatadist._counting import OF_PROCESS
from aiodatadist._testing.ports import free_port
from aiodatadist._testing.views import shared_thread
from aiodatadist.blocking import hixl
from aiodatadist.testing import soft_faults_cleared, soft_hold
from tests.hixl.pairs import SIZE, Bytes, options
from tests.off_loop import in_child

READ, WRITE = hixl.READ, hixl.WRITE
NEWER = {hixl.OPTION_LOCAL_COMM_RES: '{"version": "1.3"}'}


@dataclass
class End:
    """An engine, and memory that it has registered."""

    engine: hixl.Hixl
    name: str
    memory: Bytes
    handle: int


@contextmanager
def open_end(device: int, fill: int = 0, more: Mapping[str, str] = MappingProxyType({})) -> Iterator[End]:
    name, engine, memory = f"127.0.0.1:{free_port()}", hixl.Hixl(), Bytes(fill=fill)
    assert engine.initialize(name, options(device, **more)) == hixl.SUCCESS
    try:
        status, handle = engine.register_mem(hixl.MemDesc(memory.address, SIZE), hixl.MEM_DEVICE)
        assert status == hixl.SUCCESS
        yield End(engine, name, memory, handle)
    finally:
        engine.finalize()


@contextmanager
def connected(more: Mapping[str, str] = MappingProxyType({})) -> Iterator[tuple[End, End]]:
    with open_end(0, 7, more) as server, open_end(1, 0, more) as client:
        assert client.engine.connect(server.name, 5000) == hixl.SUCCESS
        yield server, client


def descs(here: End, there: End, *ranges: tuple[int, int, int]) -> list[hixl.TransferOpDesc]:
    return [hixl.TransferOpDesc(here.memory.address + a, there.memory.address + b, n) for a, b, n in ranges]


# ---- names and values ----


def test_statuses_and_constants_have_their_numbers() -> None:
    numbers = (0, 103900, 103901, 103902, 103903, 103904, 103905, 203900, 503900)
    names = "SUCCESS PARAM_INVALID TIMEOUT NOT_CONNECTED ALREADY_CONNECTED NOTIFY_FAILED UNSUPPORTED "
    names += "RESOURCE_EXHAUSTED FAILED"
    assert tuple(getattr(hixl, name) for name in names.split()) == numbers
    assert (hixl.FEATURE_SUPPORTED, hixl.FEATURE_NOT_SUPPORTED) == (1, 0)
    assert len(hixl.__all__) == 44


def test_exported_enumerations_are_equal_to_their_numbers_and_not_taken_from_them() -> None:
    assert (hixl.MEM_DEVICE, hixl.MEM_HOST, hixl.READ, hixl.WRITE, hixl.AUTO_CONNECT) == (0, 1, 0, 1, 0)
    assert str(hixl.MemType.MEM_HOST) == "MemType.MEM_HOST"
    assert [int(status) for status in hixl.AsyncConnectStatus] == list(range(7))
    assert [(status.name, int(status)) for status in hixl.TransferStatus] == [
        ("WAITING", 0), ("COMPLETED", 1), ("TIMEOUT", 2), ("FAILED", 3),
    ]  # fmt: skip
    assert hixl.TIMEOUT == 103901
    with open_end(0) as end, pytest.raises(TypeError):
        end.engine.register_mem(hixl.MemDesc(4096, 4096), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [-1, 1 << 64, 1.0, "1", None])
def test_numbers_are_unsigned_ones_of_64_bits(bad: Any) -> None:
    desc, op, args, result = (
        hixl.MemDesc(1, 2),
        hixl.TransferOpDesc(1, 2, 3),
        hixl.TransferArgs(),
        hixl.TransferResult(),
    )
    for value, names in ((desc, ("addr", "len")), (op, ("local_addr", "remote_addr", "len")), (args, ("user_data",))):
        for name in names:
            with pytest.raises(TypeError):
                setattr(value, name, bad)
            setattr(value, name, (1 << 64) - 1)
            assert getattr(value, name) == (1 << 64) - 1
    for make in (
        lambda: hixl.MemDesc(bad, 1),
        lambda: hixl.TransferOpDesc(1, bad, 1),
        lambda: setattr(result, "req", bad),
    ):
        with pytest.raises(TypeError):
            make()


def test_values_have_their_defaults() -> None:
    assert hixl.TransferArgs().user_data == 0
    args = hixl.GetTransferStatusArgs()
    assert (args.max_query_count, args.skip_waiting) == ((1 << 32) - 1, False)
    args = hixl.GetTransferStatusArgs(max_query_count=3, skip_waiting=True)
    assert (args.max_query_count, args.skip_waiting) == (3, True)
    result = hixl.TransferResult()
    assert (result.req, result.user_data, result.status) == (0, 0, hixl.TransferStatus.WAITING)
    with pytest.raises(AttributeError):
        result.status = hixl.TransferStatus.FAILED  # type: ignore[misc]
    note = hixl.NotifyDesc(name="a", notify_msg="b")
    note.name, note.notify_msg = "c", "d"
    assert (note.name, note.notify_msg) == ("c", "d")
    with pytest.raises(TypeError):
        hixl.NotifyDesc("a", 1)  # type: ignore[arg-type]


def test_both_features_are_there() -> None:
    assert hixl.get_capability(hixl.FeatureType.CLIENT_SERVER_COMM) == (hixl.SUCCESS, hixl.FEATURE_SUPPORTED)
    assert hixl.get_capability(hixl.AUTO_CONNECT) == (hixl.SUCCESS, hixl.FEATURE_SUPPORTED)
    with pytest.raises(TypeError):
        hixl.get_capability(0)  # type: ignore[arg-type]


# ---- transfers ----


def test_512_ranges_are_read_and_written() -> None:
    with connected() as (server, client):
        ranges = descs(client, server, *[(i * 4096, i * 4096, 4096) for i in range(512)])
        assert client.engine.transfer_sync(server.name, READ, ranges, timeout_in_millis=30_000) == hixl.SUCCESS
        assert bytes(client.memory.view[: 512 * 4096]) == b"\7" * (512 * 4096)
        assert not any(client.memory.view[512 * 4096 :])
        client.memory.view[:] = b"\1" * SIZE
        assert client.engine.transfer_sync(server.name, WRITE, ranges[:2]) == hixl.SUCCESS
        assert bytes(server.memory.view[: 3 * 4096]) == b"\1" * 8192 + b"\7" * 4096


def test_a_transfer_says_what_was_wrong() -> None:
    with connected() as (server, client):
        good = descs(client, server, (0, 0, 10))
        move, name = client.engine.transfer_sync, server.name
        other = f"127.0.0.1:{free_port()}"
        assert move(name, READ, []) == hixl.PARAM_INVALID
        assert move(name, READ, good, 0) == hixl.PARAM_INVALID
        assert move(name, READ, good, timeout_in_millis=-1) == hixl.PARAM_INVALID
        assert move("nonsense", READ, good) == hixl.PARAM_INVALID
        assert move(other, READ, good) == hixl.NOT_CONNECTED
        assert move(name, READ, [hixl.TransferOpDesc(0, server.memory.address, 1)]) == hixl.PARAM_INVALID
        assert move(name, READ, descs(client, server, (0, SIZE, 1))) == hixl.PARAM_INVALID
        assert client.engine.transfer_async(other, READ, good) == (hixl.NOT_CONNECTED, 0)
        assert client.engine.transfer_async(name, READ, []) == (hixl.PARAM_INVALID, 0)
        for bad in ((name, 0, good), (name, READ, 5), (1, READ, good), (name, READ, good, 1.5), (name, READ, [5])):
            with pytest.raises(TypeError):
                move(*bad)
        assert move(name, READ, good) == hixl.SUCCESS


def test_unregistered_memory_goes_through_buffers_only_if_the_call_waits() -> None:
    with connected() as (server, client):
        other = Bytes()
        ranges = [hixl.TransferOpDesc(other.address, server.memory.address, 100)]
        assert client.engine.transfer_sync(server.name, READ, ranges) == hixl.SUCCESS
        assert bytes(other.view[:101]) == b"\7" * 100 + b"\0"
        assert client.engine.transfer_async(server.name, READ, ranges) == (hixl.PARAM_INVALID, 0)


def wait(engine: hixl.Hixl, req: int) -> tuple[int, hixl.TransferStatus]:
    """Ask for a request until it has ended."""
    while (found := engine.get_transfer_status(req)) == (hixl.SUCCESS, hixl.TransferStatus.WAITING):
        pass
    return found


def test_a_request_is_told_of_once() -> None:
    with connected() as (server, client):
        engine, ranges = client.engine, descs(client, server, (0, 0, SIZE))
        with soft_faults_cleared(), soft_hold("HcclBatchGet") as hold:
            status, req = engine.transfer_async(server.name, READ, ranges)
            assert (status, req > 0) == (hixl.SUCCESS, True)
            for _ in range(3):
                assert engine.get_transfer_status(req) == (hixl.SUCCESS, hixl.TransferStatus.WAITING)
            hold.release()
        assert wait(engine, req) == (hixl.SUCCESS, hixl.TransferStatus.COMPLETED)
        assert engine.get_transfer_status(req) == (hixl.PARAM_INVALID, hixl.TransferStatus.FAILED)
        assert engine.get_transfer_status(0) == (hixl.FAILED, hixl.TransferStatus.FAILED)
        assert engine.get_all_transfer_status() == (hixl.UNSUPPORTED, [])
        with pytest.raises(TypeError):
            engine.get_transfer_status(-1)


def test_requests_are_listed_in_order_with_the_callers_number() -> None:
    with connected(NEWER) as (server, client):
        engine, ranges = client.engine, descs(client, server, (0, 0, SIZE))
        args = hixl.TransferArgs()
        with soft_faults_cleared(), soft_hold("HcclBatchGet") as hold:
            reqs = []
            for number in range(3):
                args.user_data = 100 + number
                reqs.append(engine.transfer_async(server.name, READ, ranges, args)[1])
            status, waiting = engine.get_all_transfer_status()
            assert status == hixl.SUCCESS
            assert [(each.req, each.user_data, each.status.name) for each in waiting] == [
                (req, 100 + i, "WAITING") for i, req in enumerate(reqs)
            ]
            assert engine.get_all_transfer_status(hixl.GetTransferStatusArgs(skip_waiting=True)) == (hixl.SUCCESS, [])
            assert engine.get_all_transfer_status(hixl.GetTransferStatusArgs(max_query_count=0)) == (hixl.SUCCESS, [])
            hold.release()
        told: list[hixl.TransferResult] = []
        while len(told) < 3:
            told += engine.get_all_transfer_status(hixl.GetTransferStatusArgs(2, True))[1]
        assert {each.status for each in told} == {hixl.TransferStatus.COMPLETED}
        assert sorted(each.user_data for each in told) == [100, 101, 102]
        assert engine.get_all_transfer_status() == (hixl.SUCCESS, [])


def test_disconnect_forgets_requests_and_ends_their_transfers() -> None:
    with connected() as (server, client):
        engine, ranges = client.engine, descs(client, server, (0, 0, SIZE))
        assert engine.transfer_sync(server.name, READ, ranges, 30_000) == hixl.SUCCESS
        statuses: list[int] = []
        leaving = threading.Thread(target=lambda: statuses.append(engine.disconnect(server.name, 30_000)))
        with (
            soft_faults_cleared(),
            soft_hold("HcclBatchGet", at="half") as copy,
            soft_hold("aclrtStreamAbort") as abort,
        ):
            _, req = engine.transfer_async(server.name, READ, ranges)
            asyncio.run(copy.arrived())
            leaving.start()
            asyncio.run(abort.arrived())
            assert not statuses
            assert engine.get_transfer_status(req)[1] is hixl.TransferStatus.WAITING
            abort.release()
            copy.release()
            leaving.join()
        assert statuses == [hixl.SUCCESS]
        assert engine.get_transfer_status(req) == (hixl.PARAM_INVALID, hixl.TransferStatus.FAILED)
        assert engine.transfer_sync(server.name, READ, ranges) == hixl.NOT_CONNECTED
        assert engine.connect(server.name) == hixl.SUCCESS
        assert engine.transfer_sync(server.name, READ, ranges) == hixl.SUCCESS


def test_several_threads_move_at_the_same_time() -> None:
    with connected() as (server, client):
        statuses: list[int] = []

        def move(part: int) -> None:
            for _ in range(10):
                ranges = descs(client, server, (part * 65536, part * 65536, 65536))
                statuses.append(client.engine.transfer_sync(server.name, READ, ranges, 30_000))

        threads = [threading.Thread(target=move, args=(part,)) for part in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [hixl.SUCCESS] * 80
        assert bytes(client.memory.view[: 8 * 65536]) == b"\7" * (8 * 65536)


# ---- life and connections ----


def test_before_initialize_and_after_finalize_calls_fail() -> None:
    engine = hixl.Hixl()
    engine.finalize()
    for _ in range(2):
        ranges = [hixl.TransferOpDesc(1, 1, 1)]
        assert engine.register_mem(hixl.MemDesc(0, 1), hixl.MEM_HOST) == (hixl.FAILED, 0)
        assert engine.deregister_mem(1) == hixl.FAILED
        assert engine.connect("127.0.0.1:9") == hixl.FAILED
        assert engine.disconnect("127.0.0.1:9") == hixl.FAILED
        assert engine.connect_async("127.0.0.1:9") == hixl.FAILED
        assert engine.disconnect_async("127.0.0.1:9") == hixl.FAILED
        assert engine.get_async_connect_status("127.0.0.1:9") == (hixl.FAILED, hixl.NOT_CONNECT)
        assert engine.get_all_async_connect_status() == (hixl.FAILED, {})
        assert engine.transfer_sync("127.0.0.1:9", READ, ranges) == hixl.FAILED
        assert engine.transfer_async("127.0.0.1:9", READ, ranges) == (hixl.FAILED, 0)
        assert engine.get_transfer_status(1) == (hixl.FAILED, hixl.TransferStatus.FAILED)
        assert engine.get_all_transfer_status() == (hixl.FAILED, [])
        assert engine.send_notify("127.0.0.1:9", hixl.NotifyDesc("", "")) == hixl.FAILED
        assert engine.get_notifies() == (hixl.FAILED, [])
        assert engine.initialize("127.0.0.1", {}) == hixl.SUCCESS
        assert engine.initialize("127.0.0.1", {"no": "matter"}) == hixl.SUCCESS
        assert engine.finalize() is None  # type: ignore[func-returns-value]
        engine.finalize()


@pytest.mark.parametrize(
    ("name", "given", "status"),
    [
        ("", {}, hixl.PARAM_INVALID),
        ("127.0.0.1:70000", {}, hixl.PARAM_INVALID),
        ("localhost:26000", {}, hixl.PARAM_INVALID),
        ("127.0.0.1", {"no": "such option"}, hixl.PARAM_INVALID),
        ("127.0.0.1", {hixl.OPTION_AUTO_CONNECT: ""}, hixl.PARAM_INVALID),
        ("127.0.0.1", {hixl.OPTION_GLOBAL_RESOURCE_CONFIG: "{"}, hixl.PARAM_INVALID),
        ("127.0.0.1", {hixl.OPTION_ENABLE_USE_FABRIC_MEM: "1"}, hixl.UNSUPPORTED),
        ("127.0.0.1", {hixl.OPTION_ENABLE_USE_FABRIC_MEM: "0"}, hixl.SUCCESS),
        ("[::1]", {hixl.OPTION_BUFFER_POOL: "0:0"}, hixl.SUCCESS),
        ("127.0.0.1:0", {"adxl.RdmaTrafficClass": "4", "adxl.BufferPool": "1:1"}, hixl.SUCCESS),
    ],
)
def test_initialize_checks_names_and_options(name: str, given: dict[str, str], status: int) -> None:
    engine = hixl.Hixl()
    assert engine.initialize(name, given) == status
    engine.finalize()


def test_initialize_takes_texts() -> None:
    for name, given in ((5, {}), ("127.0.0.1", {"AutoConnect": 1}), ("127.0.0.1", {1: "1"}), ("127.0.0.1", [5])):
        with pytest.raises(TypeError):
            hixl.Hixl().initialize(name, given)  # type: ignore[arg-type]


def test_connections_have_statuses() -> None:
    with open_end(0) as server, open_end(1) as client:
        engine, name = client.engine, server.name
        assert engine.disconnect(name) == hixl.NOT_CONNECTED
        assert engine.connect(remote_engine=name, timeout_in_millis=5000) == hixl.SUCCESS
        assert engine.connect(name) == hixl.ALREADY_CONNECTED
        assert engine.connect(client.name) == hixl.PARAM_INVALID
        assert engine.connect(name, 0) == hixl.PARAM_INVALID
        assert engine.connect(f"127.0.0.1:{free_port()}") in {hixl.FAILED, hixl.TIMEOUT}
        assert engine.deregister_mem(client.handle) == hixl.FAILED
        assert engine.disconnect(remote_engine=name, timeout_in_millis=5000) == hixl.SUCCESS
        assert engine.deregister_mem(client.handle) == hixl.SUCCESS
        assert engine.deregister_mem(client.handle) == hixl.SUCCESS
        assert engine.deregister_mem(0) == hixl.PARAM_INVALID


def settled(engine: hixl.Hixl, name: str) -> hixl.AsyncConnectStatus:
    """Ask for the state of a connection until nothing is queued or under way."""
    busy = {hixl.CONNECT_PENDING, hixl.CONNECTING, hixl.DISCONNECT_PENDING, hixl.DISCONNECTING}
    while True:
        status, state = engine.get_async_connect_status(name)
        assert status == hixl.SUCCESS
        if state not in busy:
            return state


def test_connections_are_made_and_ended_without_waiting() -> None:
    with open_end(0, 5) as server, open_end(1) as client:
        engine, name, other = client.engine, server.name, f"127.0.0.1:{free_port()}"
        assert engine.get_async_connect_status(name) == (hixl.SUCCESS, hixl.NOT_CONNECT)
        assert engine.connect_async(name, 5000) == hixl.SUCCESS
        assert engine.connect_async(other, 1000) == hixl.SUCCESS
        assert settled(engine, name) is hixl.CONNECTED
        assert settled(engine, other) is hixl.CONNECT_FAILED
        assert engine.get_all_async_connect_status() == (
            hixl.SUCCESS,
            {name: hixl.CONNECTED, other: hixl.CONNECT_FAILED},
        )
        assert engine.connect_async(name) == hixl.SUCCESS  # which it is
        assert settled(engine, name) is hixl.CONNECTED
        assert engine.transfer_sync(name, READ, descs(client, server, (0, 0, 9))) == hixl.SUCCESS
        for call in (engine.disconnect_async, engine.disconnect_async):  # successful or not
            assert call(name, 5000) == hixl.SUCCESS
            assert settled(engine, name) is hixl.NOT_CONNECT
        for calls in range(5):  # in order for one engine
            call = engine.disconnect_async if calls % 2 else engine.connect_async
            assert call(name, 5000) == hixl.SUCCESS
        assert settled(engine, name) is hixl.CONNECTED
        assert engine.connect_async("nonsense") == hixl.PARAM_INVALID
        assert engine.connect_async(name, 0) == hixl.PARAM_INVALID


def test_a_queue_of_connections_can_be_full() -> None:
    given = {"GlobalResourceConfig": '{"connect_pool.task_queue_capacity": 2, "connect_pool.thread_num": 1}'}
    with open_end(0, 0, given) as client:
        names = [f"127.0.0.1:{free_port()}" for _ in range(20)]
        statuses = [client.engine.connect_async(name, 5000) for name in names]
        assert statuses[:2] == [hixl.SUCCESS] * 2
        assert set(statuses) <= {hixl.SUCCESS, hixl.RESOURCE_EXHAUSTED}
        for name, status in zip(names, statuses, strict=True):
            assert settled(client.engine, name) is (hixl.CONNECT_FAILED if status == hixl.SUCCESS else hixl.NOT_CONNECT)


def test_notifications_come_to_the_server() -> None:
    with connected() as (server, client):
        for number in range(3):
            note = hixl.NotifyDesc(f"{number}", "message")
            assert client.engine.send_notify(server.name, note, timeout_in_millis=5000) == hixl.SUCCESS
        status, notes = server.engine.get_notifies()
        assert status == hixl.SUCCESS
        assert [(note.name, note.notify_msg) for note in notes] == [(str(i), "message") for i in range(3)]
        assert server.engine.get_notifies() == (hixl.SUCCESS, [])
        note = hixl.NotifyDesc("n" * 1025, "")
        assert client.engine.send_notify(server.name, note) == hixl.PARAM_INVALID
        assert server.engine.send_notify(client.name, hixl.NotifyDesc("", "")) == hixl.NOT_CONNECTED
        with pytest.raises(TypeError):
            client.engine.send_notify(server.name, "note")  # type: ignore[arg-type]


def test_a_child_that_was_forked_gets_failed() -> None:
    with connected() as (server, client):

        def move() -> None:
            raise SystemExit(client.engine.transfer_sync(server.name, READ, descs(client, server, (0, 0, 1))))

        def register() -> None:
            raise SystemExit(client.engine.register_mem(hixl.MemDesc(4096, 1), hixl.MEM_HOST)[0])

        assert in_child([move, register]) == [(SystemExit, str(hixl.FAILED))] * 2
        assert client.engine.transfer_sync(server.name, READ, descs(client, server, (0, 0, 1))) == hixl.SUCCESS


def test_the_reason_of_a_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(OF_PROCESS, "add", lambda kind, logger, words, *args, **_: told.append(words % args))
    with open_end(0) as end:
        assert end.engine.deregister_mem(0) == hixl.PARAM_INVALID
        assert end.engine.disconnect(f"127.0.0.1:{free_port()}") == hixl.NOT_CONNECTED
    assert told[0].startswith("hixl: deregister_mem: handle is 0")
    assert told[1].startswith("hixl: disconnect: engine 127.0.0.1:")
    assert told[1].endswith("(NOT_CONNECTED)")


def test_an_engine_that_is_dropped_is_finalized() -> None:
    name = f"127.0.0.1:{free_port()}"
    engine = hixl.Hixl()
    assert engine.initialize(name, {}) == hixl.SUCCESS
    del engine
    engine = hixl.Hixl()
    assert engine.initialize(name, {}) == hixl.SUCCESS
    engine.finalize()


def test_an_engine_that_is_dropped_on_the_loops_thread_is_finalized() -> None:
    """A collection of garbage may come anywhere. There the thread must not wait for itself."""
    name, other = f"127.0.0.1:{free_port()}", hixl.Hixl()
    assert other.initialize("127.0.0.1", options(1)) == hixl.SUCCESS
    engines = [hixl.Hixl()]
    assert engines[0].initialize(name, options(0)) == hixl.SUCCESS
    thread = shared_thread()
    assert thread is not None
    thread.post(engines.clear)
    engine = hixl.Hixl()
    while engine.initialize(name, options(0)) != hixl.SUCCESS:
        pass
    engine.finalize()
    other.finalize()


def test_a_call_that_runs_out_of_time_returns_when_no_byte_can_land() -> None:
    with connected() as (server, client):
        engine, ranges = client.engine, descs(client, server, (0, 0, SIZE))
        assert engine.transfer_sync(server.name, READ, ranges, 30_000) == hixl.SUCCESS
        statuses: list[int] = []
        moving = threading.Thread(target=lambda: statuses.append(engine.transfer_sync(server.name, READ, ranges, 50)))
        with (
            soft_faults_cleared(),
            soft_hold("HcclBatchGet", at="half") as copy,
            soft_hold("aclrtStreamAbort") as abort,
        ):
            moving.start()
            asyncio.run(copy.arrived())
            asyncio.run(abort.arrived())
            assert not statuses
            abort.release()
            copy.release()
            moving.join()
        assert statuses == [hixl.TIMEOUT]
        client.memory.view[:] = b"\1" * SIZE
        assert engine.transfer_sync(server.name, READ, descs(client, server, (0, 0, 10)), 30_000) == hixl.SUCCESS
        assert bytes(client.memory.view) == b"\7" * 10 + b"\1" * (SIZE - 10)
