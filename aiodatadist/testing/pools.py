"""The promises of every pool of :mod:`aiodatadist.context_caching`, as suites.

Subclass them in a test module, and say how to open your pool.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import math
import random
import uuid
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest

from aiodatadist._context_caching.pools.contract import GetStatus, KVPool, PoolKey, PoolTimeout, PutStatus
from aiodatadist._testing.cancelling import CancelAt

MIB = 1 << 20
PATIENCE = 20.0
"""Seconds that a working engine may take."""


def soon() -> float:
    """Return a deadline that a working engine meets."""
    return anyio.current_time() + PATIENCE


def new_key(name: str = "a") -> PoolKey:
    """Return a key that was not used before, with its own distribute key."""
    return PoolKey("contract", uuid.uuid4().hex, name)


def content(seed: int, nbytes: int) -> bytes:
    """Return bytes that identify their value."""
    return random.Random(seed).randbytes(nbytes)


async def store(
    pool: KVPool, keys: Sequence[PoolKey], values: Sequence[bytes], deadline: float | None = None
) -> list[PutStatus]:
    """Put values, and return their statuses; values without room are ``REJECTED``."""
    stages = await pool.stage([len(value) for value in values], deadline=soon())
    fits = [i for i, stage in enumerate(stages) if stage is not None]
    taken = [stage for stage in stages if stage is not None]
    for i, stage in zip(fits, taken, strict=True):
        stage.view()[:] = values[i]
    statuses = [PutStatus.REJECTED] * len(keys)
    limit = soon() if deadline is None else deadline
    for i, status in zip(fits, await pool.put_many([keys[i] for i in fits], taken, deadline=limit), strict=True):
        statuses[i] = status
    return statuses


async def fetch(pool: KVPool, keys: Sequence[PoolKey], sizes: Sequence[int]) -> list[bytes | GetStatus]:
    """Return values as bytes, or the reason why there is none, and release them."""
    found: list[bytes | GetStatus] = []
    for value in await pool.get_many(keys, sizes, deadline=soon()):
        if isinstance(value, GetStatus):
            found.append(value)
        else:
            data = bytes(value.view())
            assert ctypes.string_at(value.address, value.nbytes) == data
            found.append(data)
            value.release()
    return found


class PoolContract:
    """The promises of a :class:`~aiodatadist._context_caching.pools.contract.KVPool`.

    Attributes:
        lendable: bytes that a pool under test can stage at once if nothing else is staged.
    """

    lendable: ClassVar[int] = 16 * MIB

    @abstractmethod
    def open_pool(self) -> AbstractAsyncContextManager[KVPool]:
        """Return a context with an open pool. Pools that are opened one after the other may have the same values."""

    async def all_is_back(self, pool: KVPool) -> None:
        """Check that everything lent was released, and that the pool works."""
        stages = await pool.stage([MIB] * (self.lendable // MIB - 1), deadline=soon())
        try:
            assert all(stage is not None for stage in stages)
        finally:
            for stage in stages:
                if stage is not None:
                    stage.release()
        key, value = new_key(), content(7, 5000)
        assert await store(pool, [key], [value]) == [PutStatus.STORED]
        assert await fetch(pool, [key], [5000]) == [value]

    async def test_what_was_put_is_what_is_got(self) -> None:
        async with self.open_pool() as pool:
            sizes = [1, 4096, 70_001, MIB + 3]
            keys, values = [new_key() for _ in sizes], [content(size, size) for size in sizes]
            assert await store(pool, keys, values) == [PutStatus.STORED] * 4
            absent = new_key()
            order = [keys[2], absent, keys[0], keys[3], keys[1]]
            found = await fetch(pool, order, [70_001, 5, 1, MIB + 3, 4096])
            assert found == [values[2], GetStatus.MISS, values[0], values[3], values[1]]

    async def test_another_length_is_not_there(self) -> None:
        async with self.open_pool() as pool:
            key, value = new_key(), content(1, 1000)
            await store(pool, [key], [value])
            assert await fetch(pool, [key, key], [999, 1001]) == [GetStatus.WRONG_LENGTH] * 2
            assert await fetch(pool, [key], [1000]) == [value]

    async def test_the_first_writer_wins(self) -> None:
        async with self.open_pool() as pool:
            key, first = new_key(), content(1, 3000)
            assert await store(pool, [key], [first]) == [PutStatus.STORED]
            assert await store(pool, [key], [content(2, 3000)]) == [PutStatus.PRESENT]
            assert await store(pool, [key], [content(3, 10)]) == [PutStatus.PRESENT]
            assert await fetch(pool, [key], [3000]) == [first]

    async def test_one_of_two_writers_at_the_same_time_wins(self) -> None:
        async with self.open_pool() as pool:
            key, values = new_key(), [content(i, MIB) for i in range(4)]

            async def write(value: bytes) -> None:
                assert (await store(pool, [key], [value]))[0] >= PutStatus.FAILED

            async with anyio.create_task_group() as group:
                for value in values:
                    group.start_soon(write, value)
            (found,) = await fetch(pool, [key], [MIB])
            assert found in values

    async def test_exists(self) -> None:
        async with self.open_pool() as pool:
            keys = [new_key() for _ in range(7)]
            await store(pool, keys[::2], [b"value"] * 4)
            there = await pool.exists_many(keys, lease=0.1, deadline=soon())
            assert there == [True, False, True, False, True, False, True]

    async def test_removed_is_gone_and_can_be_put_again(self) -> None:
        async with self.open_pool() as pool:
            keys = [new_key(), new_key(), new_key()]
            await store(pool, keys[:2], [b"one", b"two"])
            assert await fetch(pool, keys[:1], [3]) == [b"one"]  # it has just been read, and is removed nevertheless
            assert await pool.remove_many([keys[0], keys[2]], deadline=soon()) == 1
            assert await pool.exists_many(keys, deadline=soon()) == [False, True, False]
            assert await fetch(pool, keys[:2], [3, 3]) == [GetStatus.MISS, b"two"]
            assert await store(pool, keys[:1], [b"new"]) == [PutStatus.STORED]
            assert await fetch(pool, keys[:1], [3]) == [b"new"]

    async def test_different_keys_are_different_values(self) -> None:
        odd = ["a", "a:b", "{a}", "a}", "{", "%7B", "%", "{}", "a:{b}:c", "ü \n\0"]
        unique = uuid.uuid4().hex
        parts = list(itertools.product([f"{unique}{name}" for name in odd], [*odd, ""], ["a", "b}:a", ""]))
        keys = [PoolKey(*three) for three in random.Random(1).sample(parts, 150)]
        values = [f"{i:08}".encode() for i in range(len(keys))]
        async with self.open_pool() as pool:
            assert await store(pool, keys, values) == [PutStatus.STORED] * len(keys)
            assert await fetch(pool, keys, [8] * len(keys)) == values

    async def test_no_call_needs_a_key(self) -> None:
        async with self.open_pool() as pool:
            assert await pool.stage([], deadline=soon()) == []
            assert await pool.put_many([], [], deadline=soon()) == []
            assert await pool.get_many([], [], deadline=soon()) == []
            assert await pool.exists_many([], deadline=soon()) == []
            assert await pool.remove_many([], deadline=soon()) == 0

    async def test_only_as_much_memory_is_lent_as_there_is(self) -> None:
        async with self.open_pool() as pool:
            most = self.lendable // MIB - 1
            (large,) = await pool.stage([most * MIB], deadline=soon())
            assert large is not None
            with pytest.raises(PoolTimeout):
                await pool.stage([2 * MIB], deadline=anyio.current_time() + 0.02)

            async def wait(nbytes: int) -> None:
                (stage,) = await pool.stage([nbytes], deadline=soon())
                assert stage is not None
                stage.release()

            async with anyio.create_task_group() as group:
                for nbytes in (most * MIB, 2 * MIB, most * MIB):
                    group.start_soon(wait, nbytes)
                    await anyio.lowlevel.checkpoint()
                large.release()
                large.release()
            assert await pool.stage([1 << 50], deadline=soon()) == [None]
            for wrong in (0, -1):
                with pytest.raises(ValueError, match="sizes"):
                    await pool.stage([wrong], deadline=soon())

    async def test_a_stage_that_was_put_is_the_pools(self) -> None:
        async with self.open_pool() as pool:
            key = new_key()
            (stage,) = await pool.stage([100], deadline=soon())
            assert stage is not None
            assert (stage.nbytes, stage.view().nbytes, stage.view().readonly) == (100, 100, False)
            stage.view()[:] = b"x" * 100
            assert ctypes.string_at(stage.address, 100) == b"x" * 100
            await pool.put_many([key], [stage], deadline=soon())
            stage.release()
            (value,) = await pool.get_many([key], [100], deadline=soon())
            assert not isinstance(value, GetStatus)
            assert value.view().readonly
            value.release()
            value.release()
            await self.all_is_back(pool)

    async def test_a_value_stays_until_it_is_released(self) -> None:
        async with self.open_pool() as pool:
            key, content_ = new_key(), content(1, MIB)
            await store(pool, [key], [content_])
            (value,) = await pool.get_many([key], [MIB], deadline=soon())
            assert not isinstance(value, GetStatus)
            await pool.remove_many([key], deadline=soon())
            for i in range(3):
                await store(pool, [new_key()], [content(i + 2, MIB)])
            assert bytes(value.view()) == content_
            value.release()

    async def test_a_deadline_that_has_passed(self) -> None:
        async with self.open_pool() as pool:
            key, past = new_key(), anyio.current_time() - 1
            await store(pool, [key], [b"value"])
            calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
                lambda: pool.get_many([key], [5], deadline=past),
                lambda: pool.exists_many([key], deadline=past),
                lambda: store(pool, [new_key()], [b"other"], past),
                lambda: pool.remove_many([new_key()], deadline=past),
                lambda: pool.nodes(deadline=past),
            ]
            for call in calls:
                with suppress(PoolTimeout):
                    for value in found if isinstance(found := await call(), list) else []:
                        if hasattr(value, "release"):
                            value.release()
                if not pool.capabilities.in_process:
                    with pytest.raises(PoolTimeout):
                        await call()
            assert await pool.healthy(deadline=past) in {True, False}
            await self.all_is_back(pool)

    async def test_cancelled_at_every_await(self) -> None:
        async with self.open_pool() as pool:
            key, value = new_key(), content(1, 300_000)
            await store(pool, [key], [value])

            async def get() -> None:
                for found in await pool.get_many([key] * 3, [300_000] * 3, deadline=soon()):
                    assert not isinstance(found, GetStatus)
                    found.release()

            async def put() -> None:
                fresh = [new_key() for _ in range(3)]
                assert await store(pool, fresh, [value] * 3) == [PutStatus.STORED] * 3

            async def look() -> None:
                assert await pool.exists_many([key, new_key()], deadline=soon()) == [True, False]
                await pool.remove_many([new_key()], deadline=soon())

            for operation, natively in itertools.product((get, put, look), (True, False)):
                for k in range(1, 200):
                    if not await _cancelled_at(k, operation, natively):
                        break
                    assert await fetch(pool, [key], [300_000]) == [value], f"after {operation.__name__}, await {k}"
                await self.all_is_back(pool)
                await store(pool, [key], [value])  # if stages and values share memory, it was evicted

    async def test_what_timed_out_touches_no_memory_that_is_lent_later(self) -> None:
        seed = random.randrange(1 << 30)
        print(f"seed {seed}")
        delays = random.Random(seed)
        async with self.open_pool() as pool:
            keys, values = [new_key() for _ in range(4)], [content(i, MIB) for i in range(4)]
            await store(pool, keys, values)
            late = 0
            for _ in range(12):
                try:
                    deadline = anyio.current_time() + delays.uniform(0, 0.004)
                    for value in await pool.get_many(keys, [MIB] * 4, deadline=deadline):
                        if not isinstance(value, GetStatus):
                            value.release()
                except PoolTimeout:
                    late += 1
                stages = await pool.stage([MIB] * 6, deadline=soon())
                marks = [(stage, bytes([0x5A + i]) * MIB) for i, stage in enumerate(stages) if stage is not None]
                for stage, mark in marks:
                    stage.view()[:] = mark
                assert await fetch(pool, keys[:2], [MIB] * 2) == values[:2]
                for stage, mark in marks:
                    assert bytes(stage.view()) == mark
                    stage.release()
            assert late or pool.capabilities.in_process, "no deadline was short enough: this shows nothing"
            await self.all_is_back(pool)

    async def test_many_callers_at_the_same_time(self) -> None:
        async with self.open_pool() as pool:

            async def work(number: int) -> None:
                sizes = [1000 * number + i + 1 for i in range(3)]
                keys, values = [new_key() for _ in sizes], [content(size, size) for size in sizes]
                assert await store(pool, keys, values) == [PutStatus.STORED] * 3
                assert await fetch(pool, keys, sizes) == values

            async with anyio.create_task_group() as group:
                for number in range(60):
                    group.start_soon(work, number)
            await self.all_is_back(pool)

    async def test_it_says_that_it_works_and_of_whom_it_consists(self) -> None:
        async with self.open_pool() as pool:
            assert await pool.healthy(deadline=soon())
            nodes = await pool.nodes(deadline=math.inf)
            assert nodes
            assert all(node.is_alive for node in nodes)

    async def test_closing_twice(self) -> None:
        async with self.open_pool() as pool:
            await pool.aclose()
            await pool.aclose()
            assert not await pool.healthy(deadline=soon())


class FullPoolContract:
    """The promises of a pool without room."""

    @abstractmethod
    def open_small_pool(self) -> AbstractAsyncContextManager[KVPool]:
        """Return a context with a pool that has room for more than six and fewer than 40 values of a MiB."""

    async def test_a_full_pool_evicts_or_rejects_and_never_fails(self) -> None:
        async with self.open_small_pool() as pool:
            keys, values = [new_key() for _ in range(60)], [content(i, MIB) for i in range(60)]
            statuses = []
            for first in range(0, 60, 6):
                statuses += await store(pool, keys[first : first + 6], values[first : first + 6])
            assert set(statuses) <= {PutStatus.STORED, PutStatus.REJECTED}, statuses
            assert statuses[0] is PutStatus.STORED
            found: list[bytes | GetStatus] = []
            for key in keys:
                found += await fetch(pool, [key], [MIB])
            there = [i for i, value in enumerate(found) if not isinstance(value, GetStatus)]
            assert 0 < len(there) < 40
            assert all(found[i] == values[i] for i in there)
            assert {value for value in found if isinstance(value, GetStatus)} == {GetStatus.MISS}


async def _cancelled_at(k: int, operation: Callable[[], Coroutine[Any, Any, Any]], natively: bool) -> bool:
    """Cancel an operation at its k-th await, by its task or by a scope. Return False if it has fewer awaits."""
    suspensions = 0

    async def run() -> None:
        nonlocal suspensions
        with anyio.CancelScope() as scope:
            steps = CancelAt(k, operation(), None if natively else scope.cancel)
            try:
                await steps
            finally:
                suspensions = steps.suspensions

    task = asyncio.create_task(run())
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
    return suspensions >= k
