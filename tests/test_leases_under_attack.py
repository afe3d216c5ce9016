"""Leases of blocks when peers and callers misbehave, and pulls of them that end badly."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from pydantic import ValidationError

from aiodatadist import (
    CacheDesc,
    CacheNotFound,
    DataType,
    LeaseEnd,
    LeaseTicket,
    LinkError,
    ParamInvalid,
    Quotas,
    TransferError,
    TransferTimeout,
    new_lease_name,
)
from aiodatadist._device import TransferState
from aiodatadist._link.control import block_leases
from aiodatadist._link.control.peer_claim import PeerClaim
from aiodatadist._link.control.peer_leases import SLACK_SECONDS
from aiodatadist._link.transfers import leased_pull, transfers
from aiodatadist._testing.views import transfers_of
from aiodatadist._values.lease_ticket import MAX_TICKET_BLOCKS
from aiodatadist._wire.messages import Claimed, Message
from aiodatadist.testing import cluster_info, inside, open_cluster, soft_fault, soft_faults_cleared
from tests.clock import stop_for
from tests.held import held_transfer, there_and_back
from tests.test_block_leases import MINUTE, TARGETS, claimed, ended, pair_of

MANY = 2000


async def test_a_pull_of_many_portions_that_wait_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfers, "PORTION_BYTES", 1)
    desc = CacheDesc(1, [MANY, 64], DataType.DT_UINT8)
    async with open_cluster(1) as one, open_cluster(2, device_id=1) as two:
        mine, theirs = await one.blocks(desc), await two.blocks(desc)
        await one.datadist.link_clusters([cluster_info(two)], 5000)
        lease = two.datadist.cache_manager.lease_blocks(theirs, range(MANY), MINUTE)
        other = two.datadist.cache_manager.lease_blocks(theirs, [0], MINUTE)
        await one.datadist.cache_manager.pull_leased(other.ticket(), mine, [0])
        link = inside(one.datadist).links.find(2)
        stream = link.transfers.running.stream("ours", link.session.channels.current)
        stream.hold()
        task = one.datadist.cache_manager.pull_leased(lease.ticket(), mine, range(MANY))
        await there_and_back(one, two)
        task.cancel()
        with anyio.fail_after(20):
            await task.synchronize()
        stream.go_on()
        assert task.cancelled()
        assert await ended(lease) is LeaseEnd.RELEASED
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


@pytest.mark.autojump
async def test_a_pull_that_was_stopped_beyond_its_time_does_not_succeed() -> None:
    async with pair_of(sync_kv_timeout=10_000) as pair:
        lease = pair.lease()
        with held_transfer() as held:
            task = pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, deadline=3)
            await held.arrived()
            await claimed(lease, pair)
            stop_for(3 + SLACK_SECONDS + 1)
            held.release()
            with pytest.raises(TransferTimeout):
                await task


async def test_a_callback_that_fails_concerns_no_other_lease(caplog: pytest.LogCaptureFixture) -> None:
    async with pair_of() as pair:
        seen = []

        def fails(_: Any) -> None:
            raise RuntimeError("a caller's")

        first, second = pair.lease(), pair.lease()
        first.add_done_callback(fails)
        first.add_done_callback(lambda _: seen.append(1))
        await pair.puller.pull_leased(first.ticket(), pair.mine, TARGETS)
        assert await ended(first) is LeaseEnd.TAKEN
        assert seen == [1]
        await pair.puller.pull_leased(second.ticket(), pair.mine, TARGETS)
        third = pair.lease()
        third.add_done_callback(fails)
        fourth = pair.lease()
    assert fourth.ended is LeaseEnd.WITHDRAWN


@pytest.mark.parametrize("is_lost", [False, True], ids=["taken", "peer_lost"])
async def test_a_callback_that_asks_a_cancelled_future_for_its_result_concerns_no_link(
    is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Raise CancelledError, which is no Exception, from a callback.

    It passed for a cancellation of the link's own task, and ended the link, or kept it from being given back.
    """
    cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    seen: list[LeaseEnd | None] = []
    async with pair_of(sync_kv_timeout=10_000) as pair:
        lease = pair.lease()
        lease.add_done_callback(lambda _: cancelled.result())
        lease.add_done_callback(lambda done: seen.append(done.ended))
        if is_lost:
            with soft_faults_cleared():
                soft_fault("HcclBatchGet:hang")
                task = pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
                link = inside(pair.two.datadist).links.find(1)
                await claimed(lease, pair)
                link.session.lost("its network is gone")
                await link.wait_closed()
                with pytest.raises(LinkError):
                    await task
        else:
            await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
            assert await ended(lease) is LeaseEnd.TAKEN
            await pair.puller.pull_leased(pair.lease().ticket(), pair.mine, TARGETS)
    assert seen == [LeaseEnd.PEER_LOST if is_lost else LeaseEnd.TAKEN]
    assert "a done callback failed" in caplog.text


async def test_a_peer_that_names_wrong_takers_and_fails_is_corrected() -> None:
    async with pair_of() as pair:
        lease = pair.lease()
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:exec=507053")
            with pytest.raises(TransferError):
                await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, takers=3)
        await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
        assert await ended(lease) is LeaseEnd.TAKEN


async def test_a_peer_that_claims_what_does_not_come_to_be_is_in_no_others_way() -> None:
    async with pair_of(quotas=Quotas(early_claims=8)) as pair:
        leases = inside(pair.two.datadist).block_leases
        liar = object()
        for i in range(20):
            leases.claim(new_lease_name(), PeerClaim(liar, i, 10, lambda kept: None), 60)
        lease_name = new_lease_name()
        ticket = pair.lease().ticket().model_copy(update={"lease": lease_name})
        task = pair.puller.pull_leased(ticket, pair.mine, TARGETS, patience=5)
        await there_and_back(pair.one, pair.two)
        pair.lease(name=lease_name)
        await task


async def test_a_peer_that_releases_what_there_is_not_makes_no_others_word_forgotten() -> None:
    async with pair_of(quotas=Quotas(released_names=8)) as pair:
        leases, liar, names = inside(pair.two.datadist).block_leases, object(), [new_lease_name() for _ in range(3)]
        taken = pair.lease()
        ticket = taken.ticket()
        await pair.puller.pull_leased(ticket, pair.mine, TARGETS)
        await ended(taken)
        await pair.puller.release_lease(ticket.model_copy(update={"lease": names[0]}))
        await pair.one.datadist.notify(2, b"behind it")
        await anext(pair.two.datadist.notifications())
        for _ in range(20):
            leases.unclaim(liar, 0, new_lease_name(), LeaseEnd.RELEASED)
        leases.unclaim(liar, 0, names[1], LeaseEnd.RELEASED)
        leases.peer_gone(liar)
        leases.unclaim(object(), 0, names[2], LeaseEnd.RELEASED)
        with anyio.fail_after(10), pytest.raises(CacheNotFound, match="keeps no blocks"):  # and not after its patience
            await pair.puller.pull_leased(ticket, pair.mine, TARGETS, patience=60)
        assert [pair.lease(name=name).ended for name in names] == [LeaseEnd.RELEASED] * 3
        assert pair.lease().ended is None


def test_a_ticket_of_a_million_wrong_blocks_is_refused_at_its_first() -> None:
    """A router that lies would hold the event loop: for ten seconds, if each of them were told."""
    ticket = {"cluster_id": 2, "lease": new_lease_name(), "cache_id": 1, "seconds": 1, "blocks": [-1] * 1000}
    with pytest.raises(ValidationError) as refused:
        LeaseTicket.model_validate(ticket)
    assert len(refused.value.errors()) <= 2  # it, and that fewer are right than there have to be


async def test_a_lease_keeps_as_many_blocks_as_a_ticket_has_and_no_more() -> None:
    desc = CacheDesc(1, [MAX_TICKET_BLOCKS + 1, 16], DataType.DT_UINT8)
    async with open_cluster(1) as one, open_cluster(2, device_id=1) as two:
        mine, theirs = await one.blocks(desc), await two.blocks(desc)
        await one.datadist.link_clusters([cluster_info(two)], 5000)
        manager = two.datadist.cache_manager
        with pytest.raises(ParamInvalid, match="blocks has 65537 numbers: a lease keeps at most 65536"):
            manager.lease_blocks(theirs, range(MAX_TICKET_BLOCKS + 1), MINUTE)
        assert two.datadist.figures().leases == 0
        lease = manager.lease_blocks(theirs, range(1, MAX_TICKET_BLOCKS + 1), MINUTE)
        ticket = lease.ticket().model_dump(mode="json")
        with pytest.raises(ParamInvalid, match="65537 block numbers: there must be 1 to 65536"):
            one.datadist.cache_manager.pull_leased({**ticket, "blocks": [0, *ticket["blocks"]]}, mine, [0])
        report = await one.datadist.cache_manager.pull_leased(ticket, mine, range(MAX_TICKET_BLOCKS))
        assert report.bytes == MAX_TICKET_BLOCKS * 16
        assert await ended(lease) is LeaseEnd.TAKEN


# ---- the owner's limit of a pull ----


async def test_a_peer_that_asks_for_days_holds_the_blocks_no_longer_than_the_owner_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_leases, "SLACK_SECONDS", 0.05)
    async with pair_of() as pair:
        leases = inside(pair.two.datadist).block_leases
        told: list[bool] = []
        lease = pair.lease(pull_timeout=0.1)
        claim = PeerClaim(object(), 1, 864_000, told.append)
        leases.claim(lease.name, claim, 0)
        assert (told, claim.seconds) == ([True], 0.1)
        assert await ended(lease) is LeaseEnd.EXPIRED


async def test_a_peer_that_cannot_be_told_of_the_limit_may_not_ask_for_more() -> None:
    async with pair_of() as pair:
        leases = inside(pair.two.datadist).block_leases
        told: list[bool] = []
        lease = pair.lease(pull_timeout=0.1)
        leases.claim(lease.name, PeerClaim(object(), 1, 0.11, told.append, is_limited=False), 0)
        assert (told, lease.ended) == ([False], None)
        leases.claim(lease.name, PeerClaim(object(), 1, 0.1, told.append, is_limited=False), 0)
        assert told == [False, True]


@pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "requests"])
async def test_a_pull_that_takes_longer_than_the_owner_allows_fails(one_sided: bool) -> None:
    async with pair_of(enable_remote_cache_accessible=one_sided, sync_kv_timeout=10_000) as pair:
        lease = pair.lease(pull_timeout=0.2)
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang;HcclBatchPut:hang")
            with pytest.raises(TransferTimeout, match=r"0\.2 s of the call, and the owner keeps its blocks no longer"):
                await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, deadline=MINUTE)
        assert lease.ended is None
        await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, deadline=MINUTE)
        pair.verify()
        assert await ended(lease) is LeaseEnd.TAKEN


async def test_the_owners_limit_is_told_again_where_its_first_answer_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodatadist._link.control.questions.AGAIN_SECONDS", 0.05)
    async with pair_of(sync_kv_timeout=10_000) as pair:
        session = inside(pair.two.datadist).links.find(1).session
        lost: list[Claimed] = []
        lease, post = pair.lease(pull_timeout=0.5), session.post

        def lose_the_first(message: Message) -> None:
            if isinstance(message, Claimed) and not lost:
                lost.append(message)
            else:
                post(message)

        monkeypatch.setattr(session, "post", lose_the_first)
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            with pytest.raises(TransferTimeout, match=r"0\.5 s of the call, and the owner keeps its blocks no longer"):
                await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, deadline=MINUTE)
        assert lost[0].seconds == 0.5


async def test_bytes_that_came_after_the_owners_limit_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore bytes that landed before this end hears of the limit: they may be another request's."""
    monkeypatch.setattr(block_leases, "SLACK_SECONDS", 0.0)
    monkeypatch.setattr(leased_pull, "SLACK_SECONDS", 0.0)
    async with pair_of(sync_kv_timeout=10_000) as pair:
        other = pair.lease()
        await pair.puller.pull_leased(other.ticket(), pair.mine, TARGETS)  # all that is asked once is known
        session, mine = inside(pair.two.datadist).links.find(1).session, inside(pair.one.datadist).links.find(2)
        late: list[Claimed] = []
        lease, post = pair.lease(pull_timeout=0.001), session.post

        def hold_answers(message: Message) -> None:
            if isinstance(message, Claimed):
                late.append(message)
            else:
                post(message)

        monkeypatch.setattr(session, "post", hold_answers)
        with held_transfer() as held:
            task = pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
            await held.arrived()
            (transfer,) = transfers_of(mine)
            assert await ended(lease) is LeaseEnd.EXPIRED
            held.release()
            await transfer.join()
        assert transfer.state is TransferState.DONE
        assert not task.done()
        for message in late:
            post(message)
        with pytest.raises(TransferTimeout, match="the owner keeps its blocks no longer") as failed:
            await task
        assert failed.value.landed_blocks == 0


@pytest.mark.parametrize(
    ("wrong", "error"), [(0, ParamInvalid), (-1, ParamInvalid), (True, TypeError), (2**32, ParamInvalid)]
)
async def test_limits_that_cannot_be(wrong: Any, error: type[Exception]) -> None:
    async with pair_of() as pair:
        with pytest.raises(error, match=f"pull_timeout is {wrong}"):
            pair.lease(pull_timeout=wrong)
        assert pair.two.datadist.figures().leases == 0
