"""The embedded pool: a plain model of what it holds, room, leases, and those who wait."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodatadist._context_caching.pools.contract import (
    GetStatus,
    PoolKey,
    PoolTimeout,
    PoolUnreachable,
    PutStatus,
    Stage,
    Value,
)
from aiodatadist._context_caching.pools.lru_store import machine_bytes
from aiodatadist._testing.cancelling import CancelAt
from aiodatadist.context_caching import CcConfig, ContextCache, EmsInvalidArgument, MemoryPool
from tests.profiles import examples

PAGE = 1024
NOW = -math.inf


def key(name: object) -> PoolKey:
    return PoolKey("test", str(name), "")


async def put(pool: MemoryPool, name: object, data: bytes) -> PutStatus:
    (stage,) = await pool.stage([len(data)], deadline=NOW)
    if stage is None:
        return PutStatus.REJECTED
    with stage.view() as view:
        view[:] = data
    return (await pool.put_many([key(name)], [stage], deadline=NOW))[0]


async def get(pool: MemoryPool, name: object, nbytes: int) -> Value | GetStatus:
    return (await pool.get_many([key(name)], [nbytes], deadline=NOW))[0]


async def read(pool: MemoryPool, name: object, nbytes: int) -> bytes | GetStatus:
    value = await get(pool, name, nbytes)
    if isinstance(value, GetStatus):
        return value
    with value.view() as view:
        data = bytes(view)
    value.release()
    return data


# ---- a model ----

PAGES = 8
NAMES = st.sampled_from("abcdefghij")


@dataclass
class Model:
    """A model of the pool for values of one size: names in order of use, and those that are lent."""

    held: OrderedDict[str, bytes]
    lent: dict[int, tuple[str, Value]]

    def pins(self, name: str) -> int:
        return sum(1 for lent, _ in self.lent.values() if lent == name)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, st.integers(0, 255)),
        st.tuples(st.just("read"), NAMES),
        st.tuples(st.just("lend"), NAMES),
        st.tuples(st.just("give"), st.integers(0, 5)),
        st.tuples(st.just("exists"), st.lists(NAMES, min_size=1, max_size=4)),
        st.tuples(st.just("remove"), NAMES),
    ),
    min_size=20,
    max_size=60,
)


@settings(max_examples=examples(50))
@given(steps=steps, pages_each=st.integers(1, 4))
def test_it_does_what_a_model_does(steps: list[tuple[Any, ...]], pages_each: int) -> None:
    asyncio.run(follow(steps, pages_each * PAGE - 7))


async def follow(steps: list[tuple[Any, ...]], nbytes: int) -> None:
    model, room = Model(OrderedDict(), {}), PAGES * PAGE // (-(-nbytes // PAGE) * PAGE)
    orphans: list[tuple[Value, bytes]] = []
    async with await MemoryPool.open(PAGES * PAGE) as pool:
        for step in steps:
            await do(step, pool, model, room - len(orphans), nbytes, orphans)
            assert len(pool) == len(model.held)
            assert len(model.held) + len(orphans) <= room
        for name, data in model.held.items():
            assert await read(pool, name, nbytes) == data
        for _, value in model.lent.values():
            value.release()
        for value, data in orphans:
            assert bytes(value.view()) == data
            value.release()
        for i in range(room):  # nothing leaked, and room is whole
            assert await put(pool, f"new {i}", bytes(nbytes)) is PutStatus.STORED
        assert [await read(pool, f"new {i}", nbytes) for i in range(room)] == [bytes(nbytes)] * room


async def do(
    step: tuple[Any, ...], pool: MemoryPool, model: Model, room: int, nbytes: int, orphans: list[tuple[Value, bytes]]
) -> None:
    held = model.held
    match step:
        case ("put", name, byte):
            await do_put(name, bytes([byte]) * nbytes, pool, model, room)
        case ("read", name):
            assert await read(pool, name, nbytes) == held.get(name, GetStatus.MISS)
            if name in held:
                held.move_to_end(name)
                assert await get(pool, name, nbytes + 1) is GetStatus.WRONG_LENGTH
        case ("lend", name):
            value = await get(pool, name, nbytes)
            if not isinstance(value, GetStatus):
                model.lent[max(model.lent, default=0) + 1] = name, value
                held.move_to_end(name)
        case ("give", which) if model.lent:
            name, value = model.lent.pop(sorted(model.lent)[which % len(model.lent)])
            assert bytes(value.view()) == held[name]
            value.release()
            value.release()
            held.move_to_end(name)
        case ("exists", names):
            assert await pool.exists_many(list(map(key, names)), deadline=NOW) == [name in held for name in names]
            for name in names:
                if name in held and not model.pins(name):
                    held.move_to_end(name)
        case ("remove", name):
            await do_remove(name, pool, model, orphans)


async def do_put(name: str, data: bytes, pool: MemoryPool, model: Model, room: int) -> None:
    held = model.held
    evictable = [other for other in held if not model.pins(other)]
    try:
        status = await put(pool, name, data)
    except PoolTimeout:
        assert len(held) - len(evictable) == room  # all of it is lent
        return
    # memory is lent first: who gives way for it is gone even if the name turns out to be there
    if len(held) == room:
        del held[evictable[0]]
    assert status is (PutStatus.PRESENT if name in held else PutStatus.STORED)
    held.setdefault(name, data)
    if not model.pins(name):
        held.move_to_end(name)


async def do_remove(name: str, pool: MemoryPool, model: Model, orphans: list[tuple[Value, bytes]]) -> None:
    """Remove a value. Its memory stays taken while a caller has the value, which the first one keeps to the end."""
    data = model.held.pop(name, b"")
    taken = [model.lent.pop(number)[1] for number in [n for n, (lent, _) in model.lent.items() if lent == name]]
    for value in taken[1:]:
        value.release()
    orphans.extend((value, data) for value in taken[:1])
    assert await pool.remove_many([key(name)], deadline=NOW) == bool(data)


# ---- what the model does not show ----


async def test_values_of_equal_size_find_room_among_others_that_are_lent() -> None:
    async with await MemoryPool.open(8 * PAGE) as pool:
        for i in range(8):
            await put(pool, i, bytes([i]) * PAGE)
        lent = [await get(pool, i, PAGE) for i in range(0, 8, 2)]
        for i in range(100, 104):
            assert await put(pool, i, bytes([i]) * PAGE) is PutStatus.STORED
        stages = [await stage_one(pool, PAGE) for _ in range(4)]
        with pytest.raises(PoolTimeout, match="all of it is lent"):
            await pool.stage([PAGE], deadline=NOW)
        for i, value in enumerate(lent):
            assert not isinstance(value, GetStatus)
            assert bytes(value.view()) == bytes([2 * i]) * PAGE
            value.release()
        for stage in stages:
            stage.release()


async def test_what_is_too_large_is_refused_and_evicts_nothing() -> None:
    async with await MemoryPool.open(4 * PAGE) as pool:
        await put(pool, "a", bytes(PAGE))
        assert await pool.stage([5 * PAGE, 4 * PAGE + 1], deadline=NOW) == [None, None]
        assert len(pool) == 1
        large, small = await pool.stage([5 * PAGE, PAGE], deadline=NOW)
        assert large is None
        assert small is not None
        small.release()
        small.release()
        assert pool.evicted == 0


async def test_who_waits_gets_room_in_order() -> None:
    async with await MemoryPool.open(2 * PAGE) as pool:
        first = await stage_one(pool, 2 * PAGE)
        order: list[int] = []

        async def want(number: int, nbytes: int) -> None:
            stage = await stage_one(pool, nbytes)
            order.append(number)
            await anyio.lowlevel.checkpoint()
            stage.release()

        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(want, number, PAGE * (1 + number % 2))
                await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            assert not order
            first.release()
        assert order == [0, 1, 2, 3, 4]


async def stage_one(pool: MemoryPool, nbytes: int) -> Stage:
    (stage,) = await pool.stage([nbytes], deadline=math.inf)
    assert stage is not None
    return stage


async def test_a_deadline_or_a_cancellation_while_waiting_takes_nothing() -> None:
    async with await MemoryPool.open(PAGE) as pool:
        stage = await stage_one(pool, PAGE)
        with pytest.raises(PoolTimeout):
            await pool.stage([PAGE], deadline=anyio.current_time() + 0.01)
        waiting = asyncio.create_task(pool.stage([PAGE], deadline=math.inf))
        behind = asyncio.create_task(pool.stage([PAGE], deadline=math.inf))
        await anyio.lowlevel.checkpoint()
        stage.release()
        waiting.cancel()  # its turn had come in this very tick
        (second,) = await behind
        assert second is not None
        second.release()
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            (taken,) = waiting.result()
            assert taken is not None
            taken.release()
        (await stage_one(pool, PAGE)).release()


async def test_many_keys_at_once_do_not_block_the_loop() -> None:
    async with await MemoryPool.open(PAGE) as pool:
        await put(pool, 7, b"x")
        rounds = 0

        async def count() -> None:
            nonlocal rounds
            while True:
                rounds += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(count)
            found = await pool.exists_many([key(i) for i in range(10_000)], deadline=math.inf)
            group.cancel_scope.cancel()
        assert [i for i, is_there in enumerate(found) if is_there] == [7]
        assert rounds > 20


async def test_stages_and_values_cannot_be_used_twice() -> None:
    async with await MemoryPool.open(4 * PAGE) as pool, await MemoryPool.open(PAGE) as other:
        stage = await stage_one(pool, 5)
        with pytest.raises(ValueError, match="not lent by this pool"):
            await other.put_many([key("a")], [stage], deadline=NOW)
        await pool.put_many([key("a")], [stage], deadline=NOW)
        with pytest.raises(ValueError, match="stored or released before"):
            await pool.put_many([key("b")], [stage], deadline=NOW)
        with pytest.raises(ValueError, match="was stored or released"):
            stage.view()
        value = await get(pool, "a", 5)
        assert not isinstance(value, GetStatus)
        with value.view() as view, pytest.raises(TypeError, match="read-only"):
            view[0] = 1
        value.release()
        with pytest.raises(ValueError, match="was released"):
            value.view()


async def test_closing_ends_who_waits_and_memory_that_is_lent_stays(caplog: pytest.LogCaptureFixture) -> None:
    pool = await MemoryPool.open(PAGE)
    stage = await stage_one(pool, PAGE)
    waiting = asyncio.create_task(pool.stage([PAGE], deadline=math.inf))
    await anyio.lowlevel.checkpoint()
    await pool.aclose()
    await pool.aclose()
    with pytest.raises(PoolUnreachable):
        await waiting
    assert "closed while 1 values or stages are lent" in caplog.text
    with stage.view() as view:
        view[:] = bytes(PAGE)  # no crash
    assert not await pool.healthy(deadline=NOW)
    calls: Sequence[Any] = (pool.stage([1], deadline=NOW), pool.exists_many([key("a")], deadline=NOW))
    for call in calls:
        with pytest.raises(PoolUnreachable):
            await call


async def test_a_pool_has_at_least_a_byte_and_tells_how_full_it_is() -> None:
    for nbytes in (0, -1, 1.5, True):
        with pytest.raises(EmsInvalidArgument):
            await MemoryPool.open(nbytes)  # type: ignore[arg-type]
    async with await MemoryPool.open(PAGE + 1) as pool:
        assert pool.capacity == 2 * PAGE
        await put(pool, "a", b"x")
        (node,) = await pool.nodes(deadline=NOW)
        assert (node.capacity, node.used, node.is_alive) == (2 * PAGE, PAGE, True)


async def test_a_pool_has_no_more_than_the_machine() -> None:
    for nbytes in (machine_bytes() + 1, 2**42, 2**64):
        with pytest.raises(EmsInvalidArgument, match=rf"memory pool has {nbytes} bytes: must have at most [0-9]+ "):
            await MemoryPool.open(nbytes)
    with pytest.raises(EmsInvalidArgument, match=f"local read cache has {2**50} bytes: must have at most"):
        await ContextCache.open(CcConfig(0, 0, "model"), read_cache_bytes=2**50)


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ([PAGE] * 8, 8),
        ([PAGE] * 9, 8),
        ([PAGE + 1] * 5, 4),
        ([8 * PAGE, 1], 1),
        ([8 * PAGE + 1] * 3, 3),  # for none of them there is ever room
        ([PAGE, 9 * PAGE, 6 * PAGE, 1, 1], 4),
        ([9 * PAGE, 8 * PAGE, 1], 2),
        ([], 0),
    ],
)
async def test_a_pool_keeps_values_from_the_first_on_as_whole_pages(sizes: list[int], kept: int) -> None:
    async with await MemoryPool.open(8 * PAGE) as pool:
        assert pool.keeps(sizes) == kept


async def test_opening_cancelled_at_any_await_leaves_nothing(no_leaks: None) -> None:
    k = 1
    while True:
        lens = CancelAt(k, MemoryPool.open(PAGE))
        task = asyncio.ensure_future(_await(lens))
        await asyncio.wait([task])
        if not task.cancelled():
            await task.result().aclose()
            break
        k += 1
    assert k > 2


async def _await(lens: CancelAt) -> Any:
    return await lens
