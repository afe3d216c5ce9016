"""Small transfers between the same two caches take a shortcut from the second one on: callers see no difference."""

from __future__ import annotations

import asyncio
import inspect
import random
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheNotFound,
    CacheTask,
    DataType,
    DeviceError,
    LLMException,
    LLMStatusCode,
    NotLinked,
)
from aiodatadist._cache.task import EndedTask
from aiodatadist._device.block_run import MOST_BLOCKS
from aiodatadist._link.transfers.running import RunningTransfers
from aiodatadist.testing import Cluster, cluster_info, inside, linked_pair, soft_fault, soft_faults_cleared, verify
from tests.held import held_transfer
from tests.strict.marks import STRICT

BLOCKS = 16
DESC = CacheDesc(4, [BLOCKS, 1024], DataType.DT_UINT8)
KEY = BlocksCacheKey(1)
short = pytest.mark.skipif(STRICT == "roce", reason="RoCE: every transfer takes its turn in one stream")


class Pair:
    """Two linked clusters, and how many transfers took the long way."""

    def __init__(self, prompt: Cluster, decoder: Cluster, source: Cache, target: Cache) -> None:
        self.prompt, self.decoder, self.source, self.target = prompt, decoder, source, target
        self.manager = decoder.datadist.cache_manager
        self.long = 0

    def check(self, moved: dict[int, int], owner: int = 2) -> None:
        """Block ``moved[i]`` of the peer is in block ``i``; all others are as they were."""
        at = [(t, p, 1, moved[p]) if p in moved else (t, p, 2, p) for t in range(4) for p in range(BLOCKS)]
        verify(self.decoder.memory(self.target), self.target, at)


@asynccontextmanager
async def pair(monkeypatch: pytest.MonkeyPatch, desc: CacheDesc = DESC) -> AsyncIterator[Pair]:
    async with linked_pair(desc) as (prompt, decoder, source, target):
        made = Pair(prompt, decoder, source, target)
        submit = RunningTransfers.submit

        def counted(self: RunningTransfers, *args: Any) -> Any:
            made.long += 1
            return submit(self, *args)

        monkeypatch.setattr(RunningTransfers, "submit", counted)
        yield made


@short
async def test_the_third_pull_is_short_and_moves_what_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(1)
    async with pair(monkeypatch) as p:
        moved: dict[int, int] = {}
        for _ in range(50):
            mine, theirs = (choose.sample(range(BLOCKS), 3) for _ in range(2))
            task = p.manager.pull_blocks(KEY, p.target, theirs, tuple(mine))
            assert (await task).bytes == 3 * 4 * 1024
            moved.update(zip(mine, theirs, strict=True))
        p.check(moved)
        assert p.long == 2, "one that asks the peer, and one that finds all at hand"
        assert "3 blocks, all layers" in repr(task)
        link = p.decoder.datadist.statistics().links[0]
        assert (link.transfers, link.pulled_bytes, link.running) == (50, 50 * 12288, 0)
        assert link.longest_seconds > 0


@short
async def test_so_is_the_third_push(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch) as p:
        for block in range(BLOCKS):
            await p.manager.push_blocks(KEY, p.target, [block], [BLOCKS - 1 - block])
        at = [(t, b, 2, BLOCKS - 1 - b) for t in range(4) for b in range(BLOCKS)]
        verify(p.prompt.memory(p.source), p.source, at)
        assert p.long == 2
        assert p.decoder.datadist.statistics().links[0].pushed_bytes == BLOCKS * 4096


@short
async def test_what_ended_in_its_call_answers_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch) as p:
        for _ in range(3):
            await p.manager.pull_blocks(KEY, p.target, [1], [1])
        assert p.long == 2
        told: list[CacheTask] = []
        task = p.manager.pull_blocks(KEY, p.target, array("Q", [4, 6]), range(5, 7))
        assert (p.long, task.peer, task.done(), task.cancelled(), task.exception()) == (2, 1, True, False, None)
        assert repr(task) == f"<CacheTask pull_blocks peer 1: {KEY}, 2 blocks, all layers, 8192 bytes, done>"
        task.add_done_callback(told.append)
        assert told == [task]
        assert not task.cancel()
        report = task.result()
        assert report == await task == await task
        assert (report.bytes, report.ranges) == (8192, 8)
        assert report.transfer_seconds > 0 <= report.queue_seconds
        assert await task.get_results() == [LLMStatusCode.LLM_SUCCESS]
        assert await task.synchronize(1) is LLMStatusCode.LLM_SUCCESS
        assert [done async for done in task.progress()] == []
        with pytest.raises(LLMException, match="event loop"):
            await asyncio.to_thread(task.cancel)
        p.check({1: 1, 5: 4, 6: 6})


def test_the_class_of_what_ended_in_its_call_can_be_looked_at() -> None:
    assert {"peer", "cancel", "result"} <= {name for name, _ in inspect.getmembers(EndedTask)}


@short
async def test_many_blocks_take_the_long_way_and_move_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    many = MOST_BLOCKS + 1
    async with pair(monkeypatch, CacheDesc(1, [2 * many, 16], DataType.DT_UINT8)) as p:
        for _ in range(2):
            await p.manager.pull_blocks(KEY, p.target, [0], [0])
        for count, long in ((MOST_BLOCKS, 2), (many, 3)):
            even, odd = range(0, 2 * count, 2), range(1, 2 * count, 2)
            assert (await p.manager.pull_blocks(KEY, p.target, odd, even)).bytes == count * 16
            assert p.long == long
        at = [(0, i, 2, i) if i % 2 else (0, i, 1, i + 1) for i in range(2 * many)]
        verify(p.decoder.memory(p.target), p.target, at)


WRONG: dict[str, tuple[Any, Any]] = {
    "a block that the peer has not": ([BLOCKS], [0]),
    "a block that is not here": ([0], [BLOCKS]),
    "more of one": ([0, 1], [2]),
    "none": ([], []),
    "below 0": ([-1], [0]),
    "beyond 64 bits": ([2**64], [0]),
    "no number": (["1"], [0]),
    "half a number": ([0.5], [0]),
    "no list": (5, [0]),
    "bytes": (b"12345678", b"12345678"),
    "nothing": (None, None),
}


@pytest.mark.parametrize("lists", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("call", ["pull_blocks", "push_blocks"])
async def test_what_is_wrong_is_said_as_it_is_on_the_long_way(call: str, lists: tuple[Any, Any]) -> None:
    async def said() -> str:
        with pytest.raises((TypeError, ValueError, LLMException)) as caught:
            await getattr(manager, call)(KEY, target, *lists)
        return f"{type(caught.value).__name__}: {caught.value}"

    async with linked_pair(DESC) as (_, decoder, _, target):
        manager = decoder.datadist.cache_manager
        first = await said()
        for _ in range(3):
            await getattr(manager, call)(KEY, target, [1], [1])
        assert await said() == first


@short
async def test_a_cache_that_is_given_up_is_not_reached_by_its_old_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = '{"memory_size": 1048576}'
    async with linked_pair(DESC, mem_pool_cfg=pool) as (prompt, decoder, _, target):
        owner, manager = prompt.datadist.cache_manager, decoder.datadist.cache_manager
        for value in (11, 22, 33):
            lent = await owner.allocate_blocks_cache(DESC, BlocksCacheKey(1, 7))
            arrays = owner.arrays(lent)
            for array in arrays:
                array[:] = value
            del array, arrays
            for _ in range(4):
                await manager.pull_blocks(BlocksCacheKey(1, 7), target, [2], [3])
            assert set(bytes(decoder.memory(target).view()[3 * 1024 : 4 * 1024])) == {value}
            await owner.deallocate_blocks_cache(lent)
            with pytest.raises(LLMException):
                await manager.pull_blocks(BlocksCacheKey(1, 7), target, [2], [3])
        await decoder.datadist.unlink_clusters([cluster_info(prompt)])
        with pytest.raises(NotLinked):
            manager.pull_blocks(KEY, target, [2], [3])


@short
async def test_a_destination_that_is_given_up_is_filled_by_no_shortcut() -> None:
    async with linked_pair(DESC, mem_pool_cfg='{"memory_size": 1048576}') as (_, decoder, _, _):
        manager = decoder.datadist.cache_manager
        lent = await manager.allocate_blocks_cache(DESC)
        for _ in range(4):
            await manager.pull_blocks(KEY, lent, [2], [3])
        await manager.deallocate_blocks_cache(lent)
        with pytest.raises(CacheNotFound):
            manager.pull_blocks(KEY, lent, [2], [3])


@short
async def test_one_that_takes_longer_is_under_way_and_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch) as p:
        for _ in range(3):
            await p.manager.pull_blocks(KEY, p.target, [1], [1])
        entry = inside(p.decoder.datadist).registry.table.find(p.target.cache_id)
        assert entry is not None
        with held_transfer() as held:
            task = p.manager.pull_blocks(KEY, p.target, [4], [5])
            await held.arrived()
            assert (task.done(), entry.leases) == (False, 1)
            held.release()
            await task
            assert entry.leases == 0
            p.check({1: 1, 5: 4})
            for _ in range(3):
                await p.manager.pull_blocks(KEY, p.target, [1], [1])
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang@1")
            task = p.manager.pull_blocks(KEY, p.target, [6], [7])
            assert task.cancel()
            with pytest.raises(BaseException, match="cancelled"):
                await task
            assert entry.leases == 0
        await p.manager.pull_blocks(KEY, p.target, [8], [9])
        p.check({1: 1, 5: 4, 9: 8})


@short
async def test_one_that_fails_says_so_and_the_next_works(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch) as p:
        for _ in range(3):
            await p.manager.pull_blocks(KEY, p.target, [1], [1])
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:exec=507000@1")
            with pytest.raises(DeviceError) as caught:
                await p.manager.pull_blocks(KEY, p.target, [4], [5])
            assert caught.value.peer == 1
        assert p.decoder.datadist.statistics().links[0].failures
        await p.manager.pull_blocks(KEY, p.target, [8], [9])
        p.check({1: 1, 9: 8})


class Number:
    """A block number that pulls another block when it is read for the first time."""

    def __init__(self, number: int, pull: Callable[[], CacheTask]) -> None:
        self._number = number
        self._pull = pull
        self.pulled: CacheTask | None = None

    def __index__(self) -> int:
        if self.pulled is None:
            self.pulled = self._pull()
        return self._number


@short
@pytest.mark.parametrize("is_held", [False, True], ids=["that ends at once", "that is under way"])
async def test_a_number_that_pulls_another_block_when_it_is_read_changes_no_other_number(
    is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(monkeypatch) as p:
        for _ in range(3):
            await p.manager.pull_blocks(KEY, p.target, [1], [1])
        number: Any = Number(4, lambda: p.manager.pull_blocks(KEY, p.target, [9, 10], [8, 9]))
        with held_transfer() if is_held else nullcontext() as held:
            task = p.manager.pull_blocks(KEY, p.target, [number, 5], [6, 7])
            if held is not None:
                await held.arrived()
                assert not number.pulled.done()
                held.release()
            await number.pulled
            await task
        p.check({1: 1, 6: 4, 7: 5, 8: 9, 9: 10})
