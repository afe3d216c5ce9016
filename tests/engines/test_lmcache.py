"""LMCache's own classes and loaders over the context cache."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiodatadist.context_caching import EmsInvalidArgument
from tests.context_caching.servers import RedisServer, need_redis, running
from tests.faults.test_full_memory import end_calls

pytest.importorskip("lmcache", reason="needs LMCache: make lmcache")
POOL = "memory:?bytes=64MiB"
CHUNK = 16
"""Tokens."""


@pytest.fixture(scope="module")
def lmcache() -> SimpleNamespace:
    """Load modules that are there only where LMCache is."""
    names = {
        "torch": "torch", "api": "lmcache.v1.distributed.api", "utils": "lmcache.utils", "config": "lmcache.v1.config",
        "l2": "lmcache.v1.distributed.l2_adapters", "plugin": "lmcache.v1.distributed.l2_adapters.plugin_l2_adapter",
        "metadata": "lmcache.v1.metadata", "memory": "lmcache.v1.memory_management",
        "adhoc": "lmcache.v1.memory_allocators.ad_hoc_memory_allocator",
        "connectors": "lmcache.v1.storage_backend.connector", "adapter": "aiodatadist.adapters.lmcache",
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own packages
        return SimpleNamespace(**{name: import_module(module) for name, module in names.items()})


def objects(lmcache: SimpleNamespace, *contents: int, tokens: int = CHUNK) -> list[Any]:
    """Return memory objects, each full of one number."""
    torch = lmcache.torch
    allocator = lmcache.adhoc.AdHocMemoryAllocator("cpu")
    made = [allocator.allocate(torch.Size([2, 3, tokens, 8]), torch.float32) for _ in contents]
    for each, content in zip(made, contents, strict=True):
        each.tensor.fill_(content)
    return made


def held(made: Any) -> set[float]:
    return {float(value) for value in made.tensor.unique()}


# ---- second-level storage ----


class Controller:
    """Submits tasks, waits at their event fds, and takes their results, as LMCache's controllers do."""

    def __init__(self, lmcache: SimpleNamespace, **settings: Any) -> None:
        self._lmcache = lmcache
        config = lmcache.plugin.PluginL2AdapterConfig.from_dict(
            {
                "module_path": "aiodatadist.adapters.lmcache", "class_name": "AioDataDistL2Adapter",
                "adapter_params": {"pool": POOL, **settings},
            }
        )  # fmt: skip
        self.adapter = lmcache.l2.create_l2_adapter(config)

    def keys(self, *numbers: int, **parts: Any) -> list[Any]:
        return [
            self._lmcache.api.ObjectKey(**{"chunk_hash": bytes([n]) * 8, "model_name": "m", "kv_rank": 1, **parts})
            for n in numbers
        ]

    @staticmethod
    def wait(event_fd: int, look: Callable[[], Any]) -> Any:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            found = look()
            if found:
                return found
            if select.select([event_fd], [], [], 1)[0]:
                os.eventfd_read(event_fd)
        raise AssertionError("the task did not end")

    def store(self, keys: list[Any], made: list[Any]) -> Any:
        task = self.adapter.submit_store_task(keys, made)
        done = self.wait(self.adapter.get_store_event_fd(), self.adapter.pop_completed_store_tasks)
        assert list(done) == [task]
        return done[task]

    def look_up(self, keys: list[Any]) -> list[int]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        fd = self.adapter.get_lookup_and_lock_event_fd()
        # an empty bitmap is false, so the answer is put in a list
        (found,) = self.wait(
            fd, lambda: [b for b in [self.adapter.query_lookup_and_lock_result(task)] if b is not None]
        )
        assert self.adapter.query_lookup_and_lock_result(task) is None, "an answer is given once"
        return list(found.get_indices_list())

    def load(self, keys: list[Any], into: list[Any]) -> list[int]:
        task = self.adapter.submit_load_task(keys, into)
        fd = self.adapter.get_load_event_fd()
        (found,) = self.wait(fd, lambda: [b for b in [self.adapter.query_load_result(task)] if b is not None])
        return list(found.get_indices_list())


Make = Callable[..., Controller]


@pytest.fixture
def make(lmcache: SimpleNamespace) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(**settings: Any) -> Controller:
            controller = Controller(lmcache, **settings)
            stack.enter_context(closing(controller.adapter))
            return controller

        yield made


def test_objects_are_stored_found_and_loaded(lmcache: SimpleNamespace, make: Make) -> None:
    one, other = make(), make()
    fds = {
        one.adapter.get_store_event_fd(),
        one.adapter.get_load_event_fd(),
        one.adapter.get_lookup_and_lock_event_fd(),
    }
    assert len(fds) == 3
    stored = objects(lmcache, 1, 2, 3)
    size = 2 * 3 * CHUNK * 8 * 4
    result = one.store(one.keys(1, 2, 3), stored)
    assert (result.is_successful(), result.bytes_transferred()) == (True, 3 * size)
    assert one.adapter.get_usage().total_bytes_used == 3 * size
    assert other.look_up(other.keys(1, 9, 3)) == [0, 2]
    into = objects(lmcache, 0, 0, 0, 0)
    assert other.load(other.keys(3, 9, 1, 2), into) == [0, 2, 3]
    assert [held(each) for each in into] == [{3.0}, {0.0}, {1.0}, {2.0}]
    other.adapter.submit_unlock(other.keys(1, 2, 3))
    for parts in ({"model_name": "n"}, {"kv_rank": 2}, {"object_group_id": 1}, {"cache_salt": "s"}):
        assert other.look_up(other.keys(1, **parts)) == []
    assert other.look_up(other.keys(200)) == []
    assert other.adapter.report_status() == {"is_healthy": True, "pool": POOL}


def test_objects_of_another_length_are_not_there(lmcache: SimpleNamespace, make: Make) -> None:
    one = make()
    one.store(one.keys(1), objects(lmcache, 1))
    assert one.load(one.keys(1), objects(lmcache, 0, tokens=CHUNK - 1)) == []


def test_objects_that_are_deleted(lmcache: SimpleNamespace, make: Make) -> None:
    one = make()
    one.store(one.keys(1, 2), objects(lmcache, 1, 2))
    one.adapter.delete(one.keys(1))
    until = time.monotonic() + 20
    while one.look_up(one.keys(1, 2)) != [1]:
        assert time.monotonic() < until


def test_a_store_that_finds_no_room_has_failed(lmcache: SimpleNamespace, make: Make) -> None:
    one = make(pool="memory:?bytes=1MiB")
    large = objects(lmcache, 1, tokens=1 << 14)
    result = one.store(one.keys(1, 2), [*large, *objects(lmcache, 2)])
    assert not result.is_successful()
    assert one.look_up(one.keys(1, 2)) == [1]


def test_many_tasks_from_two_threads(lmcache: SimpleNamespace, make: Make) -> None:
    one = make()
    numbers = range(1, 51)

    def store() -> None:
        for number in numbers:
            one.adapter.submit_store_task(one.keys(number), objects(lmcache, number))

    thread = threading.Thread(target=store)
    thread.start()
    stored: dict[int, Any] = {}
    while len(stored) < len(numbers):
        stored |= one.wait(one.adapter.get_store_event_fd(), one.adapter.pop_completed_store_tasks)
    thread.join()
    assert all(result.is_successful() for result in stored.values())
    into = objects(lmcache, *[0] * len(numbers))
    assert one.load(one.keys(*numbers), into) == list(range(len(numbers)))
    assert [held(each) for each in into] == [{float(number)} for number in numbers]


def test_a_pool_that_dies_in_the_middle(lmcache: SimpleNamespace, make: Make) -> None:
    need_redis()
    server = RedisServer()
    with running(server):
        one = make(pool=server.url, seconds=2)
        assert one.store(one.keys(1), objects(lmcache, 1)).is_successful()
        server.kill()
        assert not one.store(one.keys(2), objects(lmcache, 2)).is_successful()
        assert one.look_up(one.keys(1)) == one.load(one.keys(1), objects(lmcache, 0)) == []
        assert not one.adapter.report_status()["is_healthy"]


def test_closing_with_tasks_under_way_leaves_nothing(lmcache: SimpleNamespace, make: Make) -> None:
    make()  # what the first one of a process opens stays
    end_calls()
    before = {each.name for each in threading.enumerate()}, len(list(Path("/proc/self/fd").iterdir()))
    controller = Controller(lmcache)
    into = objects(lmcache, *[0] * 20)
    for number in range(20):
        controller.adapter.submit_store_task(controller.keys(number), objects(lmcache, number))
        controller.adapter.submit_load_task(controller.keys(number), into[number : number + 1])
    controller.adapter.close()
    controller.adapter.close()
    for each in into:
        each.tensor.fill_(-1)
    end_calls()
    assert {each.name for each in threading.enumerate()} == before[0]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before[1]
    assert all(held(each) == {-1.0} for each in into)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"pol": POOL}, ValueError, "adapter_params.*\n.*pol"),
        ({"seconds": 0}, ValueError, "greater than 0"),
        ({"pool": "nothing://x"}, EmsInvalidArgument, "nothing"),
    ],
)
def test_settings_that_are_wrong(
    lmcache: SimpleNamespace, make: Make, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**settings)
    assert "pool" in lmcache.adapter.AioDataDistL2AdapterConfig.help()


# ---- remote backend ----


class Allocator:
    """LMCache's local backend, as far as a connector knows it."""

    def __init__(self, lmcache: SimpleNamespace) -> None:
        self.metadata = lmcache.metadata.LMCacheMetadata(
            model_name="m", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=lmcache.torch.float32, kv_shape=(3, 2, CHUNK, 2, 4), chunk_size=CHUNK,
        )  # fmt: skip
        self._allocator = lmcache.adhoc.AdHocMemoryAllocator("cpu")
        self.is_full = False
        self.asked = 0

    def allocate(self, *words: Any) -> Any | None:
        self.asked += 1
        return None if self.is_full else self._allocator.allocate(*words)


async def connector_of(lmcache: SimpleNamespace, allocator: Allocator, **settings: Any) -> Any:
    """Make a connector as LMCache loads it from its configuration."""
    plugin = "remote_storage_plugin.aiodatadist"
    extra = {
        f"{plugin}.module_path": "aiodatadist.adapters.lmcache", f"{plugin}.class_name": "AioDataDistRemoteConnector",
        "aiodatadist.pool": POOL, **{f"aiodatadist.{name}": value for name, value in settings.items()},
    }  # fmt: skip
    config = lmcache.config.LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, remote_storage_plugins=["aiodatadist"], extra_config=extra
    )
    manager = lmcache.connectors.ConnectorManager(
        "plugin://aiodatadist", asyncio.get_running_loop(), allocator, config, allocator.metadata, "aiodatadist"
    )
    return await asyncio.to_thread(manager.create_connector)  # as its remote backend does


def engine_keys(lmcache: SimpleNamespace, *numbers: int) -> list[Any]:
    return [
        lmcache.utils.CacheEngineKey(
            model_name="m", world_size=1, worker_id=0, chunk_hash=number, dtype=lmcache.torch.float32
        )
        for number in numbers
    ]


async def test_chunks_are_put_and_got(lmcache: SimpleNamespace) -> None:
    allocator = Allocator(lmcache)
    connector = await connector_of(lmcache, allocator)
    try:
        keys = engine_keys(lmcache, 1, 2, 3, 4)
        assert not await connector.exists(keys[0])
        await connector.put(keys[0], objects(lmcache, 1)[0])
        await connector.batched_put(keys[1:3], [*objects(lmcache, 2), *objects(lmcache, 3, tokens=5)])
        assert await connector.exists(keys[0])
        assert await asyncio.to_thread(connector.exists_sync, keys[1])
        assert await connector.batched_async_contains("id", keys) == 3
        assert await asyncio.to_thread(connector.batched_contains, keys) == 3
        assert held(await connector.get(keys[0])) == {1.0}
        got = await connector.batched_get([keys[2], keys[3], keys[1]])
        assert [each and held(each) for each in got] == [{3.0}, None, {2.0}]
        assert list(got[0].get_shapes()[0]) == [2, 3, 5, 8], "chunks may have fewer tokens"
        assert [held(each) for each in await connector.batched_get_non_blocking("id", keys)] == [{1.0}, {2.0}, {3.0}]
        assert len(await connector.batched_get_non_blocking("id", [keys[0], keys[3], keys[1]])) == 1
        assert await asyncio.to_thread(connector.remove_sync, keys[0])
        assert await connector.get(keys[0]) is None
        allocator.is_full = True
        assert await connector.get(keys[1]) is None
        assert await connector.ping() == 0
        assert await connector.list() == []
        flags = (connector.support_ping, connector.support_batched_get, connector.support_batched_put)
        assert all(flag() for flag in flags)
    finally:
        await connector.close()


@pytest.mark.parametrize(
    "shapes", [[2, 3, 2**30, 8], [2**30] * 4, [-2, -3, 8, 8], [2, 3, 2 * CHUNK, 8], [2, 3, 1, 8]], ids=str
)
async def test_a_forged_header_allocates_nothing(lmcache: SimpleNamespace, shapes: list[int]) -> None:
    """LMCache would evict what it has, and wait for ever, until there is room for the shape."""
    allocator = Allocator(lmcache)
    connector = await connector_of(lmcache, allocator)
    try:
        (key,), (chunk,) = engine_keys(lmcache, 77), objects(lmcache, 7)
        forged = SimpleNamespace(
            byte_array=chunk.byte_array, get_dtypes=chunk.get_dtypes, get_memory_format=chunk.get_memory_format,
            get_shapes=lambda: [lmcache.torch.Size(shapes)],
        )  # fmt: skip
        await connector.put(key, forged)
        assert await connector.get(key) is None
        assert allocator.asked == 0
        await asyncio.to_thread(connector.remove_sync, key)
    finally:
        await connector.close()


async def test_a_get_that_is_cancelled_keeps_its_memory_until_it_ends(lmcache: SimpleNamespace) -> None:
    connector = await connector_of(lmcache, Allocator(lmcache))
    try:
        keys = engine_keys(lmcache, *range(10, 40))
        await connector.batched_put(keys, objects(lmcache, *range(30)))
        task = asyncio.ensure_future(connector.batched_get(keys))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held(await connector.get(keys[3])) == {3.0}
    finally:
        await connector.close()


async def test_a_connector_whose_pool_dies(lmcache: SimpleNamespace) -> None:
    need_redis()
    server = RedisServer()
    with running(server):
        connector = await connector_of(lmcache, Allocator(lmcache), pool=server.url, seconds=2)
        try:
            keys = engine_keys(lmcache, 1)
            await connector.put(keys[0], objects(lmcache, 1)[0])
            assert await connector.exists(keys[0])
            server.kill()
            assert await connector.get(keys[0]) is None
            assert not await connector.exists(keys[0])
            assert await connector.ping() == 1
        finally:
            await connector.close()


async def test_a_setting_that_is_wrong(lmcache: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"aiodatadist\.\*"):
        await connector_of(lmcache, Allocator(lmcache), pol=1)
