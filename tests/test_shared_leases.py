"""Leases that several requests may take, and leases whose time starts again."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from aiodatadist import CacheNotFound, LeaseEnd, ParamInvalid
from aiodatadist.testing import soft_fault, soft_faults_cleared
from tests.clock import took
from tests.held import there_and_back
from tests.test_block_leases import TARGETS, Pair, ended, pair, pair_of

__all__ = ["pair"]
MORE = [10, 11, 12]


async def test_a_lease_for_two_requests_is_taken_when_both_have_the_blocks(pair: Pair) -> None:
    lease = pair.lease(takers=2)
    await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, takers=2)
    assert lease.ended is None
    await pair.puller.pull_leased(lease.ticket(), pair.mine, MORE, takers=2)
    assert await ended(lease) is LeaseEnd.TAKEN


@pytest.mark.parametrize("takers", [1, 3, 5])
async def test_a_puller_does_not_decide_how_many_may_take_a_lease(pair: Pair, takers: int) -> None:
    lease = pair.lease(takers=2)
    with pytest.raises(CacheNotFound):
        await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, takers=takers)
    await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, takers=4)  # of two workers each
    assert lease.ended is None


async def test_a_request_that_does_not_want_a_lease_or_fails_ends_it_for_no_other(pair: Pair) -> None:
    lease = pair.lease(takers=2)
    await pair.puller.release_lease(lease.ticket())
    with soft_faults_cleared():
        soft_fault("HcclBatchGet:exec=507053;HcclBatchPut:exec=507053")
        with pytest.raises(Exception, match="507053"):
            await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, takers=2)
    await there_and_back(pair.one, pair.two)
    assert lease.ended is None
    for targets in (TARGETS, MORE):
        await pair.puller.pull_leased(lease.ticket(), pair.mine, targets, takers=2)
    assert await ended(lease) is LeaseEnd.TAKEN


async def test_the_loss_of_one_peer_ends_a_shared_lease_for_no_other() -> None:
    async with pair_of() as pair:
        lease = pair.lease(takers=2)
        await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, takers=2)
        await pair.one.datadist.finalize()
        await pair.two.datadist.wait_link_closed(1)
        assert lease.ended is None
        assert await lease.withdraw() is LeaseEnd.WITHDRAWN


@pytest.mark.autojump
async def test_the_time_of_a_lease_starts_again() -> None:
    async with pair_of() as pair:
        lease = pair.lease(10)
        with took(25):
            for _ in range(3):
                await anyio.sleep(5)
                assert lease.renew(10)
            assert await lease.wait_ended() is LeaseEnd.EXPIRED
        assert not lease.renew(10)


@pytest.mark.autojump
async def test_the_time_of_a_lease_can_be_cut() -> None:
    async with pair_of() as pair:
        lease = pair.lease(60)
        assert lease.renew(2)
        with took(2):
            assert await lease.wait_ended() is LeaseEnd.EXPIRED


async def test_bad_takers_and_times(pair: Pair) -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (0, ParamInvalid, "takers is 0: must be from 1 to 4096"),
        (4097, ParamInvalid, "takers is 4097: must be from 1 to 4096"),
        ("2", TypeError, "takers"),
    ]
    for takers, error, words in wrong:
        with pytest.raises(error, match=words):
            pair.lease(takers=takers)
    lease = pair.lease()
    with pytest.raises((ValueError, ParamInvalid)):
        lease.renew(-1)
