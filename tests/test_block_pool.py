"""Free blocks: each comes back exactly once, whichever way its request or its lease ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

from aiodatadist import BlockPool, LeaseEnd, LinkError, OutOfMemory, ParamInvalid, TakenBlocks
from aiodatadist._testing.views import cut_link
from aiodatadist.testing import inside, soft_fault, soft_faults_cleared
from tests.held import held_transfer
from tests.test_block_leases import Pair, claimed, pair_of


@asynccontextmanager
async def pool_of() -> AsyncIterator[tuple[Pair, BlockPool]]:
    async with pair_of(sync_kv_timeout=10_000) as pair:
        yield pair, BlockPool(pair.owner, pair.theirs)


def is_whole(pool: BlockPool) -> bool:
    """Return True if every block is free once."""
    return sorted(pool._free) == list(range(pool.count))


async def test_blocks_belong_to_a_request_until_its_block_ends() -> None:
    async with pool_of() as (_, pool):
        assert (pool.count, pool.free, pool.waiting) == (16, 16, 0)
        async with pool.take(5) as one, pool.take(11) as other:
            assert pool.free == 0
            assert sorted([*one.blocks, *other.blocks]) == list(range(16))
            assert "0 of 16 blocks are free" in repr(pool)
        assert is_whole(pool)
        with pytest.raises(ZeroDivisionError):
            async with pool.take(3):
                raise ZeroDivisionError
        assert is_whole(pool)


async def test_blocks_that_were_leased_come_back_when_a_peer_has_them() -> None:
    async with pool_of() as (pair, pool):
        async with pool.take(3) as taken:
            lease = taken.lease(60, prompt_digest=b"0" * 16)
            assert "of a lease" in repr(taken)
        assert pool.free == 13
        await pair.puller.pull_leased(lease.ticket(), pair.mine, [1, 2, 7], prompt_digest=b"0" * 16)
        assert await lease.wait_ended() is LeaseEnd.TAKEN
        assert is_whole(pool)


async def test_a_lease_that_ends_inside_the_block_gives_back_once() -> None:
    async with pool_of() as (_, pool):
        async with pool.take(3) as taken:
            lease = taken.lease(60)
            assert await lease.withdraw() is LeaseEnd.WITHDRAWN
            assert is_whole(pool)
            async with pool.take(16):  # another request has them meanwhile
                assert pool.free == 0
        assert is_whole(pool)


@pytest.mark.parametrize("way", ["expired", "released", "cut"])
async def test_every_end_of_a_lease_gives_back(way: str) -> None:
    async with pool_of() as (pair, pool):
        async with pool.take(3) as taken:
            lease = taken.lease(0.01 if way == "expired" else 60)
        if way == "released":
            await pair.puller.release_lease(lease.ticket())
        elif way == "cut":
            with soft_faults_cleared():
                soft_fault("HcclBatchGet:hang")
                task = pair.puller.pull_leased(lease.ticket(), pair.mine, [1, 2, 7])
                await claimed(lease, pair)
                await cut_link(inside(pair.one.datadist).links.find(2))  # as if its process had been killed
                with pytest.raises(LinkError):
                    await task
        ended = {"expired": LeaseEnd.EXPIRED, "released": LeaseEnd.RELEASED, "cut": LeaseEnd.PEER_LOST}[way]
        assert await lease.wait_ended() is ended
        assert is_whole(pool)


async def test_a_block_that_fails_withdraws_its_lease_and_a_pull_under_way_keeps_the_blocks() -> None:
    async with pool_of() as (pair, pool):
        with suppress(ZeroDivisionError):
            async with pool.take(3) as taken:
                lease = taken.lease(60)
                raise ZeroDivisionError
        assert (lease.ended, is_whole(pool)) == (LeaseEnd.WITHDRAWN, True)
        with held_transfer(pair.mover) as copy:
            with suppress(ZeroDivisionError):
                async with pool.take(3) as taken:
                    lease = taken.lease(60)
                    task = pair.puller.pull_leased(lease.ticket(), pair.mine, [1, 2, 7])
                    await copy.arrived()
                    await claimed(lease, pair)
                    raise ZeroDivisionError
            assert (lease.ended, pool.free) == (None, 13), "the peer still reads them"
            copy.release()
            await task
        assert await lease.wait_ended() is LeaseEnd.TAKEN
        assert is_whole(pool)


async def test_a_cancelled_block_withdraws_its_lease() -> None:
    async with pool_of() as (_, pool):
        with anyio.CancelScope() as scope:
            async with pool.take(3) as taken:
                lease = taken.lease(60)
                scope.cancel()
                await anyio.sleep_forever()
        assert (lease.ended, is_whole(pool)) == (LeaseEnd.WITHDRAWN, True)


async def test_finalize_gives_back() -> None:
    async with pool_of() as (pair, pool):
        async with pool.take(3) as taken:
            lease = taken.lease(60)
        await pair.two.datadist.finalize()
        assert (lease.ended, is_whole(pool)) == (LeaseEnd.WITHDRAWN, True)


async def test_requests_wait_in_order_and_a_small_one_does_not_overtake() -> None:
    async with pool_of() as (_, pool):
        order: list[int] = []

        async def wait(count: int) -> None:
            async with pool.take(count):
                order.append(count)

        async with anyio.create_task_group() as group, pool.take(15):
            for count in (16, 1, 2):
                group.start_soon(wait, count)
                await anyio.wait_all_tasks_blocked()
            assert (order, pool.waiting, pool.free) == ([], 3, 1)
        assert order == [16, 1, 2]
        assert is_whole(pool)


async def test_a_request_that_is_cancelled_while_it_waits_takes_nothing_and_holds_up_no_other() -> None:
    async with pool_of() as (_, pool):
        order: list[int] = []

        async def wait(count: int, scope: anyio.CancelScope) -> None:
            with scope:
                async with pool.take(count):
                    order.append(count)

        large, small = anyio.CancelScope(), anyio.CancelScope()
        async with pool.take(15), anyio.create_task_group() as group:
            group.start_soon(wait, 16, large)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(wait, 1, small)
            await anyio.wait_all_tasks_blocked()
            large.cancel()
        assert order == [1]
        assert is_whole(pool)


async def test_a_request_for_more_than_is_free_in_time_fails_and_takes_nothing() -> None:
    async with pool_of() as (_, pool):
        async with pool.take(15):
            for seconds in (0, 0.001):
                with pytest.raises(OutOfMemory, match=r"2 blocks were not free within .* 1 of 16 are free"):
                    async with pool.take(2, timeout=seconds):
                        raise AssertionError
            async with pool.take(1, timeout=0):
                assert pool.free == 0
        assert is_whole(pool)


async def test_all_free_is_waited_for() -> None:
    async with pool_of() as (_, pool):
        await pool.wait_all_free()
        async with anyio.create_task_group() as group, pool.take(1):
            group.start_soon(pool.wait_all_free)
            await anyio.wait_all_tasks_blocked()
            assert pool.waiting == 1
        assert pool.waiting == 0


async def test_blocks_are_leased_once_and_only_while_they_are_taken() -> None:
    async with pool_of() as (_, pool):
        async with pool.take(1) as taken:
            with pytest.raises(ParamInvalid, match="timeout is 0"):
                taken.lease(0)
            lease = taken.lease(60)
            with pytest.raises(ParamInvalid, match="belong to a lease"):
                taken.lease(60)
        await lease.withdraw()
        async with pool.take(1) as late:
            pass
        with pytest.raises(ParamInvalid, match="belong to the pool"):
            late.lease(60)
        assert is_whole(pool)


@pytest.mark.parametrize(
    ("count", "error"), [(17, ParamInvalid), (-1, ParamInvalid), ("1", TypeError), (None, TypeError)]
)
async def test_wrong_numbers_are_refused(count: Any, error: type[Exception]) -> None:
    async with pool_of() as (_, pool):
        with pytest.raises(error, match="count is"):
            async with pool.take(count):
                raise AssertionError
        with pytest.raises(ParamInvalid, match="timeout is -1"):
            async with pool.take(1, timeout=-1):
                raise AssertionError
        async with pool.take(0) as none:
            assert isinstance(none, TakenBlocks)
            assert none.blocks == []


CHANGES: dict[str, Callable[[list[int]], object]] = {
    "one more": lambda blocks: blocks.append(blocks[0]),
    "another's": lambda blocks: blocks.append(0),
    "one fewer": lambda blocks: blocks.pop(),
    "none": lambda blocks: blocks.clear(),
    "one twice": lambda blocks: blocks.__setitem__(0, blocks[1]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_what_a_caller_makes_of_the_list_changes_nothing_in_the_pool(
    change: Callable[[list[int]], object],
) -> None:
    async with pool_of() as (_, pool):
        async with pool.take(3) as taken:
            assert isinstance(taken.blocks, list)
            change(taken.blocks)
            with pytest.raises(ParamInvalid, match="must be those that were taken"):
                taken.lease(60)
        assert is_whole(pool)


async def test_blocks_are_leased_in_the_order_that_their_caller_gave_them() -> None:
    async with pool_of() as (_, pool):
        async with pool.take(3) as taken:
            assert isinstance(taken.blocks, list)
            taken.blocks.reverse()
            lease = taken.lease(60)
            assert list(lease.ticket().blocks) == taken.blocks
            await lease.withdraw()
        assert is_whole(pool)
