"""Blocks of a busy loop's KV cache in a context cache: each order comes out once, and no pool holds the loop up."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import anyio
import numpy as np
import pytest

from aiodatadist import LLMException, ParamInvalid
from aiodatadist._adapters.cache_service import CacheService, CacheSettings, check_pool
from aiodatadist._adapters.ended import Ended
from aiodatadist._blocking.loop_door import LoopDoor
from aiodatadist._device import Device
from aiodatadist.context_caching import CcConfig_v1, EmsInvalidArgument
from tests.context_caching.servers import RedisServer, need_redis, running
from tests.held import held_transfer
from tests.stopwatch import lasting

BLOCKS, TOKENS, LAYERS = 16, 8, 2
SHAPE = (LAYERS, 2, BLOCKS, TOKENS, 32)
POOL = "memory:?bytes=64MiB"


class End:
    """A service and its arrays; those of end ``n`` hold ``16 * n + block``. They lie in ``memory``, or in numpy's own."""

    def __init__(self, number: int, model: str = "m", memory: memoryview | None = None, **settings: Any) -> None:
        self.service = CacheService(CacheSettings(**{"pool": POOL, **settings}))
        made = np.zeros(SHAPE, np.uint8) if memory is None else np.frombuffer(memory, np.uint8).reshape(SHAPE)
        self.layers = [list(layer) for layer in made]
        for layer in self.layers:
            for array in layer:
                array[:] = (16 * number + np.arange(BLOCKS))[:, None, None]
        self.service.open(CcConfig_v1(rank_id=0, device_id=0, model_id=model), self.layers)
        self.found = Ended()

    def holds(self, block: int) -> set[int]:
        return {int(value) for layer in self.layers for array in layer for value in np.unique(array[block])}

    def take(self) -> Ended:
        ended = self.service.take()
        self.found.sent |= ended.sent
        self.found.received |= ended.received
        self.found.failed |= ended.failed
        self.found.counters += ended.counters
        return self.found

    def until(self, is_so: Callable[[Ended], object]) -> Ended:
        while not is_so(self.take()):
            time.sleep(0.001)
        return self.found

    def look_up(self, hashes: list[int]) -> int:
        self.service.look_up("question", hashes)
        while (count := self.service.found("question")) is None:
            time.sleep(0.001)
        self.service.forget("question")
        assert not self.service.is_looked_up("question")
        return count

    def save(self, hashes: list[int], blocks: list[int], request: str = "s") -> Ended:
        self.service.save(request, hashes, blocks)
        self.service.finish(request)
        return self.until(lambda ended: request in ended.sent)

    def load(self, hashes: list[int], blocks: list[int], request: str = "l") -> Ended:
        self.service.load(request, hashes, blocks)
        return self.until(lambda ended: request in ended.received)


Make = Callable[..., End]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def made(*words: Any, **settings: Any) -> End:
            end = End(*words, **settings)
            stack.enter_context(closing(end.service))
            return end

        yield made


@pytest.fixture
def make_on_device(make: Make) -> Iterator[Make]:
    """Make ends in a device's memory, whose copies can be held."""
    with asyncio.Runner() as runner:
        device = runner.run(Device.open(0))
        yield lambda number: make(number, memory=device.allocate(math.prod(SHAPE)).view())
        runner.run(device.aclose())


def test_what_one_saves_another_loads(make: Make) -> None:
    one, other, third = make(0), make(1), make(2, "another model")
    assert other.look_up([1, 2, 3]) == 0
    assert one.save([1, 2], [5, 7]).counters == {"save_done": 1, "saved_blocks": 2}
    assert (other.look_up([1, 2, 3]), third.look_up([1, 2, 3])) == (2, 0)
    ended = other.load([1, 2], [0, 9])
    assert (other.holds(0), other.holds(9), other.holds(1)) == ({5}, {7}, {17})
    assert ended.failed == {}
    assert ended.counters == {"load_done": 1, "loaded_blocks": 2}


def test_what_is_not_there_is_named(make: Make) -> None:
    one, other = make(0), make(1)
    one.save([1], [5])
    ended = other.load([1, 2, 3], [0, 4, 9])
    assert ended.failed == {"l": (4, 9)}
    assert ended.counters == {"load_missed": 1, "loaded_blocks": 1, "missed_blocks": 2}
    assert other.holds(0) == {5}


def test_a_scheduler_only_looks_up(make: Make) -> None:
    one = make(0)
    with closing(CacheService(CacheSettings(pool=POOL))) as scheduler:
        scheduler.open(CcConfig_v1(rank_id=0, device_id=0, model_id="m"))
        one.save([1, 2], [5, 7])
        scheduler.look_up("r", [1, 2, 3])
        while scheduler.found("r") is None:
            time.sleep(0.001)
        assert scheduler.found("r") == 2


def test_a_request_that_saved_nothing_is_let_go_at_once(make: Make) -> None:
    one = make(0)
    one.service.finish("r")
    assert one.until(lambda ended: ended.sent).sent == {"r"}


def test_saves_let_go_of_blocks_that_are_about_to_be_overwritten(make: Make, make_on_device: Make) -> None:
    one, other = make_on_device(0), make(1)
    with held_transfer("aclrtMemcpyAsync") as copy, ThreadPoolExecutor(1) as thread:
        for block in range(8):
            one.service.save("r", [100 + block], [block])
        anyio.run(copy.arrived)
        letting_go = thread.submit(one.service.let_go, ["r", "another"])
        anyio.run(copy.told_to_stop)
        assert not letting_go.done(), "a block is still read"
        copy.release()
        letting_go.result()
        for layer in one.layers:
            for array in layer:
                array[:] = 255
    one.service.finish("r")
    one.until(lambda ended: "r" in ended.sent)
    there = other.look_up([100 + block for block in range(8)])
    if there:
        other.load([100 + block for block in range(there)], list(range(there)))
        assert [other.holds(block) for block in range(there)] == [{block} for block in range(there)]


def test_a_load_that_is_cancelled_comes_out(make: Make, make_on_device: Make) -> None:
    one, other = make(0), make_on_device(1)
    one.save([1, 2], [5, 7])
    with held_transfer("aclrtMemcpyAsync") as copy:
        other.service.load("l", [1, 2], [0, 9])
        anyio.run(copy.arrived)
        anyio.run(copy.stopped, lambda: other.service.cancel("l"))
        ended = other.until(lambda ended: "l" in ended.received)
    assert ended.counters["load_cancelled"] == 1
    other.service.cancel("l")


def test_a_pool_that_dies_makes_misses_and_comes_back(make: Make) -> None:
    need_redis()
    server = RedisServer()
    with running(server):
        settings = {"pool": server.url, "load_seconds": 2, "save_seconds": 2}
        one, other = make(0, **settings), make(1, **settings)
        one.save([1, 2], [5, 7])
        assert other.look_up([1, 2]) == 2
        server.kill()
        with lasting(15):
            assert other.load([1, 2], [0, 9]).failed == {"l": (0, 9)}
            one.save([3], [4], "dead")
            assert other.look_up([1, 2]) == 0
        assert one.found.counters["unsaved_blocks"] == 1


def test_a_pool_that_is_not_there_yet(make: Make) -> None:
    end = make(0, pool="redis://127.0.0.1:1", lookup_seconds=0.2)
    assert end.look_up([1]) == 0
    assert end.load([1], [0]).failed == {"l": (0,)}


def test_many_at_a_time(make: Make) -> None:
    one, other = make(0), make(1)
    for i in range(100):
        one.service.save(f"s{i}", [i], [i % BLOCKS])
        one.service.finish(f"s{i}")
    one.until(lambda ended: len(ended.sent) == 100)
    for i in range(BLOCKS):
        other.service.load(f"l{i}", [i], [i])
    other.until(lambda ended: len(ended.received) == BLOCKS)
    assert other.found.failed == {}
    assert [other.holds(block) for block in range(BLOCKS)] == [{block} for block in range(BLOCKS)]


def test_what_cannot_be() -> None:
    with closing(CacheService(CacheSettings(pool="nothing://x"))) as service:
        with pytest.raises(EmsInvalidArgument, match="nothing"):
            service.open(CcConfig_v1(rank_id=0, device_id=0, model_id="m"))
        with pytest.raises(LLMException, match="not open"):
            service.look_up("r", [1])
    service.close()
    check_pool(CacheSettings(pool=POOL), True)
    check_pool(CacheSettings(pool="redis://x"), False)
    with pytest.raises(ParamInvalid, match="this engine has several"):
        check_pool(CacheSettings(pool=POOL), False)


def test_looking_for_the_life_while_another_thread_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[tuple[LoopDoor[Any], Any]] = []

    def close_behind_the_look(door: LoopDoor[Any]) -> Any:
        life, vars(door)["opened"] = vars(door)["opened"], None
        looks.append((door, life))
        return life

    with closing(CacheService(CacheSettings(pool=POOL))) as service:
        service.open(CcConfig_v1(rank_id=0, device_id=0, model_id="m"))
        with monkeypatch.context() as patch:
            opened = property(close_behind_the_look, lambda door, life: vars(door).update(opened=life))
            patch.setattr(LoopDoor, "opened", opened, raising=False)
            assert service.take().sent == set()
            ((door, life),) = looks
            door.opened = life
            assert door.life is life
        door.opened = life
