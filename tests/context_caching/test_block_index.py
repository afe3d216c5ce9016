"""Questions of a scheduler: one for all ranks, and what the scheduler does without one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aiodatadist._context_caching.block_index import NAMES_AT_ONCE
from aiodatadist._context_caching.pools.contract import PoolKey, PoolUnreachable
from aiodatadist._testing.views import entries_of, pipeline_of, store_of
from aiodatadist.context_caching import CcConfig_v1, CcStatus, ContextCache, EmsInvalidArgument, MemoryPool
from tests.context_caching.fakes import Foreign, Misdeed, fails_with, from_then_on, never
from tests.context_caching.kit import ROOM, Kv, by_slots, opened, rank

RANKS = 4
HASHES = [1, 2, 3, 4]


class Listening(Foreign):
    """Keeps the keys of each question."""

    def __init__(self, inner: MemoryPool) -> None:
        super().__init__(inner)
        self.questions: list[list[PoolKey]] = []

    async def exists_many(self, keys: Sequence[PoolKey], *, lease: float = 0.0, deadline: float) -> list[bool]:
        self.questions.append(list(keys))
        return await super().exists_many(keys, lease=lease, deadline=deadline)


def one_of(number: int) -> CcConfig_v1:
    return rank(tp_world_size=RANKS, rank_in_tp_group=number)


async def save(pool: Listening, number: int, hashes: Sequence[int], layers: int = 2) -> None:
    """Save as a rank whose cache has ``layers`` layers."""
    async with opened(pool, Kv(rows=[[(8,)]] * layers), config=one_of(number)) as worker:
        result = await worker.save(hashes, **by_slots(range(len(hashes))))
        assert result.success == len(hashes)


@asynccontextmanager
async def asked(**options: Any) -> AsyncIterator[tuple[Listening, ContextCache]]:
    """Open a pool and a scheduler without a registered cache."""
    async with await MemoryPool.open(ROOM) as inner:
        pool = Listening(inner)
        async with opened(pool, config=one_of(0), **options) as scheduler:
            yield pool, scheduler


async def test_all_ranks_are_asked_for_in_one_question() -> None:
    async with asked() as (pool, scheduler):
        for number in range(RANKS):
            await save(pool, number, HASHES[: 4 - number // 2])
        pool.questions.clear()
        assert (await scheduler.exists(HASHES, all_ranks=True)).success == 3
        (question,) = pool.questions
        assert len(set(question)) == len(question) == RANKS * len(HASHES)
        assert {key.attribute_key for key in question} == {f"p0t{number}g0" for number in range(RANKS)}


async def test_the_layouts_of_all_ranks_are_read_at_the_same_time() -> None:
    async with asked() as (pool, scheduler):
        for number in range(RANKS):
            await save(pool, number, HASHES)
        all_asked, pool.asked["get_many"] = anyio.Event(), 0

        async def together() -> None:
            if pool.asked["get_many"] == RANKS:
                all_asked.set()
            await all_asked.wait()

        pool.misdeeds["get_many"] = together
        for _ in range(2):
            assert (await scheduler.exists(HASHES, all_ranks=True)).success == len(HASHES)
        assert pool.asked["get_many"] == RANKS  # once each


async def test_many_are_asked_for_in_several_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodatadist._context_caching.block_index.KEYS_AT_ONCE", 5)
    async with asked() as (pool, scheduler):
        for number in range(RANKS):
            await save(pool, number, HASHES[: 4 - number // 2])
        pool.questions.clear()
        assert (await scheduler.exists(HASHES, all_ranks=True)).success == 3
        assert [len(question) for question in pool.questions] == [5, 5, 5, 1]
        assert await scheduler.remove([*range(-20, 0), *HASHES]) == 4
        assert pool.asked["remove_many"] == 5


def names_of(scheduler: Any) -> Any:
    """Return what makes the names of a cache."""
    return scheduler._names


@pytest.mark.parametrize("text", [b"\xff" * 40, *(b"0" * 32 + n for n in (b"00000000", b"-0000001", b"00004097"))])
async def test_a_note_that_is_none_says_nothing(text: bytes) -> None:
    async with asked() as (pool, scheduler):
        await save(pool, 0, HASHES)
        note = names_of(scheduler).of_layout_record("p0t1g0"[:4])
        assert await pipeline_of(scheduler).write_layout_record(note, text, anyio.current_time() + 5)
        pool.questions.clear()
        assert (await scheduler.exists(HASHES, all_ranks=True)).details == (CcStatus.MISS,) * 4
        assert all(len(question) < len(HASHES) * RANKS for question in pool.questions)


async def test_a_note_with_very_many_groups_costs_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer of the pool may claim them: a lookup or a removal makes few names at a time, and does its work."""
    hashes, made = [*range(1, 1001)], []
    async with asked() as (_, scheduler):
        note = names_of(scheduler).of_layout_record("p0t0")
        text = b"0" * 32 + b"00004096"
        assert await pipeline_of(scheduler).write_layout_record(note, text, anyio.current_time() + 5)
        of_blocks = names_of(scheduler).of_blocks

        def counted(*args: Any) -> list[PoolKey]:
            names: list[PoolKey] = of_blocks(*args)
            made.append(len(names))
            return names

        monkeypatch.setattr(names_of(scheduler), "of_blocks", counted)
        found = await scheduler.exists(hashes)
        assert set(found.details) == {CcStatus.MISS, CcStatus.SKIPPED}
        assert await scheduler.remove(hashes[:8]) == 0
    assert made
    assert max(made) <= NAMES_AT_ONCE


async def test_a_pool_that_does_not_answer_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async with asked() as (pool, scheduler):
        await save(pool, 0, HASHES)
        assert (await scheduler.exists(HASHES)).success == 4
        pool.misdeeds["exists_many"] = fails_with(PoolUnreachable("the cable is cut"))
        await scheduler.exists(HASHES)
        assert "exists of 4 hashes found nothing: the cable is cut" in caplog.text


@pytest.mark.parametrize(
    ("answers", "found"), [([1, 2, 1, 0], 3), ([None, 1, 1, 1], 0), ([True] * 3, None), ([], None)]
)
async def test_answers_are_taken_for_what_they_are(
    answers: list[Any], found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def exists_many(keys: Sequence[PoolKey], **_: Any) -> list[Any]:
        return answers

    async with asked() as (pool, scheduler):
        await save(pool, 0, HASHES)
        monkeypatch.setattr(pool, "exists_many", exists_many)
        result = await scheduler.exists(HASHES)
        assert result.success == (found or 0)
        assert (CcStatus.IO_ERROR in result.details) == (found is None)


async def test_the_note_is_left_once_by_many_that_begin_together() -> None:
    async with await MemoryPool.open(ROOM) as inner, opened(pool := Foreign(inner), Kv()) as cache:
        all_put = anyio.Event()

        async def together() -> None:
            if pool.asked["put_many"] == 8:
                pool.misdeeds = dict.fromkeys(("exists_many", "stage"), anyio.lowlevel.checkpoint)
                all_put.set()
            await all_put.wait()

        pool.misdeeds["put_many"] = together
        async with anyio.create_task_group() as group:
            for i in range(8):
                group.start_soon(partial(cache.save, [i], **by_slots([i])))
        assert pool.asked["put_many"] == 8 + 1


@pytest.mark.parametrize("misdeed", [fails_with(PoolUnreachable("gone")), never], ids=["raises", "hangs"])
async def test_a_note_that_cannot_be_left_costs_no_save_and_is_left_later(
    misdeed: Misdeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await MemoryPool.open(ROOM) as inner, opened(pool := Foreign(inner), Kv()) as cache:
        pool.misdeeds["put_many"] = from_then_on(2, misdeed)
        assert (await cache.save([1], **by_slots([1]), timeout=3)).success == 1
        assert pool.asked["put_many"] == 2
        del pool.misdeeds["put_many"]
        await cache.save([2], **by_slots([2]))
        assert pool.asked["put_many"] == 3, "not so soon"
        monkeypatch.setattr(cache._block_index, "not_before", 0.0)
        await cache.save([2], **by_slots([2]))
        assert pool.asked["put_many"] == 4, "though nothing else was stored"


async def test_a_layout_that_has_more_groups_now_is_read_again() -> None:
    chunks = [[(0, 4)], [(0, 4)]]
    async with asked() as (pool, scheduler), opened(pool, Kv(), config=one_of(0)) as worker:
        await worker.save([1], **by_slots([0]))
        assert await scheduler.match_prefix([1], groups=[0]) == 1
        await worker.register_kvcache(Kv(rows=[[(8,)]] * 2).layers, [[0], [1]])
        await worker.save([2], chunks=chunks)
        await scheduler.match_prefix([2], groups=[1])
        assert await scheduler.match_prefix([2], groups=[1]) == 1


async def test_after_a_pool_has_lost_everything_the_next_save_says_again_what_it_is() -> None:
    async with asked() as (pool, scheduler), opened(pool, Kv(), config=one_of(0)) as worker:
        for begin in (0, 4):
            hashes = range(begin, begin + 4)
            await worker.save(hashes, **by_slots(hashes))
            assert (await scheduler.exists(hashes)).success == 4
            for key in list(entries_of(pool.inner)):
                store_of(pool.inner).drop(key)
            assert (await scheduler.exists(hashes)).success == 0


async def test_of_several_layer_groups_any_one_is_enough_unless_they_are_named() -> None:
    chunks = [[(0, 4), (4, 4), (8, 4)], [(0, 4), (4, 4), (8, 0)]]
    async with asked() as (pool, scheduler), opened(pool, config=one_of(0)) as worker:
        await worker.register_kvcache(Kv(rows=[[(8,)]] * 2).layers, [[0], [1]])
        assert (await worker.save([1, 2, 3], chunks=chunks)).success == 3
        asked_for: list[Any] = [None, [0], [1], [0, 1], [1, 0], [2], [0, 2]]
        assert [await scheduler.match_prefix([1, 2, 3], groups=g) for g in asked_for] == [3, 3, 2, 2, 2, 0, 0]
        first = next(key for key in entries_of(pool.inner) if key.attribute_key.endswith("g0"))
        store_of(pool.inner).drop(first)
        assert [await scheduler.match_prefix([1, 2, 3], groups=g) for g in asked_for] == [3, 0, 2, 0, 0, 0, 0]
        wrong: list[Any] = [[], [-1], [0, 0], 1, [True], [4096]]
        for groups in wrong:
            with pytest.raises(EmsInvalidArgument, match="groups"):
                await scheduler.exists([1], groups=groups)


async def test_to_remove_very_many_leaves_the_loop_to_others() -> None:
    rounds = 0

    async def others() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await anyio.lowlevel.checkpoint()

    async with await MemoryPool.open(ROOM) as pool, opened(pool) as cache, anyio.create_task_group() as group:
        group.start_soon(others)
        assert await cache.remove_values([str(i) for i in range(20 * 2048)]) == 0
        assert rounds >= 20
        group.cancel_scope.cancel()


async def test_a_layout_that_cannot_be_read_is_a_failure_of_the_pool() -> None:
    async with asked() as (pool, scheduler):
        await save(pool, 0, HASHES)
        pool.misdeeds["get_many"] = fails_with(PoolUnreachable("gone"))
        result = await scheduler.exists(HASHES, all_ranks=True)
        assert result.details == (CcStatus.IO_ERROR,) * len(HASHES)


async def test_what_has_a_copy_here_is_not_asked_for() -> None:
    async with asked(read_cache_bytes=ROOM) as (pool, first):
        await first.register_kvcache(Kv(rows=[[(8,)]] * 2).layers)
        await first.save(HASHES[:2], **by_slots(range(2)))
        await first.save(HASHES[2:], **by_slots(range(2, 4)), write_rcache=False)
        for number in range(1, RANKS):
            await save(pool, number, HASHES)
        pool.questions.clear()
        assert (await first.exists(HASHES, all_ranks=True)).success == len(HASHES)
        (question,) = pool.questions
        own = [key.distribute_key for key in question if key.attribute_key.startswith("p0t0")]
        assert own == ["3", "4"]
        assert len(question) == len(own) + (RANKS - 1) * len(HASHES)


async def test_a_rank_that_never_saved_has_nothing() -> None:
    async with asked() as (pool, scheduler):
        for number in (0, 2, 3):
            await save(pool, number, HASHES)
        result = await scheduler.exists(HASHES, all_ranks=True)
        assert result.details == (CcStatus.MISS,) * len(HASHES)
        assert (await scheduler.exists(HASHES)).success == len(HASHES)
        await save(pool, 1, HASHES)
        assert (await scheduler.exists(HASHES, all_ranks=True)).success == len(HASHES)


async def test_a_layout_under_which_nothing_is_there_is_looked_up_again() -> None:
    async with asked() as (pool, scheduler):
        for number in range(2):
            await save(pool, number, HASHES)
        assert (await scheduler.exists(HASHES, all_ranks=True)).success == 0  # but two layouts are known now
        for number in range(RANKS):
            await save(pool, number, [5, 6], layers=3)
        assert (await scheduler.exists([5, 6], all_ranks=True)).success == 0
        assert (await scheduler.exists([5, 6], all_ranks=True)).success == 2


async def test_a_layout_is_looked_up_again_also_while_another_rank_has_none() -> None:
    async with asked() as (pool, scheduler):
        await save(pool, 0, HASHES)
        assert (await scheduler.exists(HASHES)).success == len(HASHES)
        await save(pool, 0, [5, 6], layers=3)
        assert (await scheduler.exists([5, 6], all_ranks=True)).success == 0
        for number in range(1, RANKS):
            await save(pool, number, [5, 6], layers=3)
        assert (await scheduler.exists([5, 6], all_ranks=True)).success == 2


async def test_only_the_layout_under_which_nothing_is_there_is_looked_up_again() -> None:
    async with asked() as (pool, scheduler):
        for number in range(RANKS):
            await save(pool, number, [5] if number == 0 else HASHES)
        pool.asked["get_many"] = 0
        for _ in range(3):
            assert (await scheduler.exists(HASHES, all_ranks=True)).success == 0
        assert pool.asked["get_many"] == RANKS + 2
