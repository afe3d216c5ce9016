"""Blocks that are kept for a peer until it has them, does not want them, is gone, or takes too long."""

from __future__ import annotations

import asyncio
import ctypes
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from aiodatadist import (
    BlockLease,
    BlockParts,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheManager,
    CacheNotFound,
    DataType,
    InternalError,
    LeaseEnd,
    LeaseMismatch,
    LeaseTicket,
    LinkError,
    LLMStatusCode,
    NotLinked,
    ParamInvalid,
    TransferError,
    TransferTimeout,
    new_lease_name,
)
from aiodatadist._link.transfers import transfers
from aiodatadist._testing.views import transfers_of
from aiodatadist.testing import (
    Cluster,
    cluster_info,
    inside,
    open_cluster,
    soft_fault,
    soft_faults_cleared,
    soft_hold,
    verify,
)
from tests.held import PULL, PUSH, held_transfer, there_and_back

DESC = CacheDesc(2, [16, 4096], DataType.DT_UINT8)
BLOCKS, TARGETS = [3, 9, 4], [1, 2, 7]
MINUTE = 60.0


class Pair:
    """Cluster 1, which pulls, and 2, which keeps."""

    def __init__(self, one: Cluster, two: Cluster, mine: Cache, theirs: Cache, mover: str) -> None:
        self.one, self.two, self.mine, self.theirs = one, two, mine, theirs
        self.mover = mover  # of a pull
        self.puller: CacheManager = one.datadist.cache_manager
        self.owner: CacheManager = two.datadist.cache_manager

    def lease(self, timeout: float = MINUTE, **options: Any) -> BlockLease:
        return self.owner.lease_blocks(self.theirs, BLOCKS, timeout, **options)

    def verify(self, blocks: list[int] = BLOCKS, targets: list[int] = TARGETS) -> None:
        moved = [(t, b, 2, a) for t in range(2) for a, b in zip(blocks, targets, strict=True)]
        verify(self.one.memory(self.mine), self.mine, moved)


@pytest.fixture(params=[True, False], ids=["one_sided", "requests"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with pair_of(enable_remote_cache_accessible=request.param) as made:
        yield made


@asynccontextmanager
async def pair_of(**options: Any) -> AsyncIterator[Pair]:
    async with open_cluster(1, **options) as one, open_cluster(2, device_id=1, **options) as two:
        mine, theirs = await one.blocks(DESC), await two.blocks(DESC)
        assert (await one.datadist.link_clusters([cluster_info(two)], 5000))[0] is LLMStatusCode.LLM_SUCCESS
        await two.datadist.wait_linked(1)
        yield Pair(one, two, mine, theirs, PULL if options.get("enable_remote_cache_accessible", True) else PUSH)


async def ended(lease: BlockLease) -> LeaseEnd:
    with anyio.fail_after(10):
        return await lease.wait_ended()


async def claimed(lease: BlockLease, pair: Pair) -> None:
    """Wait until a pull has claimed it."""
    while "being pulled" not in repr(lease):
        await there_and_back(pair.one, pair.two)


async def test_a_peer_has_them(pair: Pair) -> None:
    lease = pair.lease()
    ticket = json.loads(json.dumps(lease.ticket().model_dump(mode="json")))
    assert 59 < ticket["seconds"] <= 60
    report = await pair.puller.pull_leased(ticket, pair.mine, TARGETS)
    assert report.bytes == 2 * 3 * 4096
    pair.verify()
    assert await ended(lease) is LeaseEnd.TAKEN
    assert len(inside(pair.two.datadist).block_leases) == 0
    with pytest.raises(CacheNotFound, match="keeps no blocks") as caught:
        await pair.puller.pull_leased(ticket, pair.mine, TARGETS)
    assert not caught.value.retryable, "a lease that has ended does not begin again"
    with pytest.raises(ParamInvalid, match="taken"):
        lease.ticket()


async def test_a_peer_needs_the_last_ones_only(pair: Pair) -> None:
    lease = pair.lease()
    await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS[1:], first=1)
    pair.verify(BLOCKS[1:], TARGETS[1:])
    assert await ended(lease) is LeaseEnd.TAKEN


async def test_a_peer_needs_the_first_ones_only(pair: Pair) -> None:
    lease = pair.lease()
    await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS[:2])
    pair.verify(BLOCKS[:2], TARGETS[:2])
    assert await ended(lease) is LeaseEnd.TAKEN


async def test_a_pull_that_is_cancelled_releases_them(pair: Pair) -> None:
    lease = pair.lease()
    with held_transfer(pair.mover) as held:
        task = pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
        await held.arrived()
        assert lease.ended is None
        await held.stopped(task.cancel)
        await task.synchronize()
    assert task.cancelled()
    assert await ended(lease) is LeaseEnd.RELEASED


async def test_a_peer_does_not_want_them(pair: Pair) -> None:
    lease = pair.lease()
    await pair.puller.release_lease(lease.ticket())
    assert await ended(lease) is LeaseEnd.RELEASED


async def test_a_pull_that_fails_may_be_tried_again(pair: Pair) -> None:
    lease = pair.lease()
    with soft_faults_cleared():
        soft_fault("HcclBatchGet:exec=507053;HcclBatchPut:exec=507053")
        with pytest.raises(TransferError):
            await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
    assert lease.ended is None
    await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
    pair.verify()
    assert await ended(lease) is LeaseEnd.TAKEN


async def test_no_peer_comes(pair: Pair) -> None:
    lease = pair.lease(0.05)
    ticket = lease.ticket()
    assert await ended(lease) is LeaseEnd.EXPIRED
    with pytest.raises(CacheNotFound, match="keeps no blocks"):
        await pair.puller.pull_leased(ticket, pair.mine, TARGETS, patience=5)


async def test_a_pull_outlasts_the_lease_that_it_began_in() -> None:
    async with pair_of(sync_kv_timeout=10_000) as pair:
        lease = pair.lease(0.2)
        with held_transfer() as held:
            task = pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
            await held.arrived()
            while lease._closed is None:  # until its own timer has fired
                await there_and_back(pair.one, pair.two)
            assert lease.ended is None
            with pytest.raises(ParamInvalid, match="expired"):
                lease.ticket()
            held.release()
            await task
        pair.verify()
        assert await ended(lease) is LeaseEnd.TAKEN


async def test_the_owner_takes_them_back(pair: Pair) -> None:
    lease = pair.lease()
    ticket = lease.ticket()
    assert await lease.withdraw() is LeaseEnd.WITHDRAWN
    with pytest.raises(CacheNotFound, match="keeps no blocks"):
        await pair.puller.pull_leased(ticket, pair.mine, TARGETS)


async def test_what_is_taken_back_waits_for_a_pull_that_is_under_way() -> None:
    async with pair_of(sync_kv_timeout=10_000) as pair:
        lease = pair.lease()
        with held_transfer() as held:
            task = pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
            await held.arrived()
            withdrawal = asyncio.create_task(lease.withdraw())
            await there_and_back(pair.one, pair.two)
            assert not withdrawal.done()
            held.release()
            assert await withdrawal is LeaseEnd.TAKEN
            await task
        pair.verify()


async def test_one_pulls_at_a_time() -> None:
    async with pair_of(sync_kv_timeout=10_000) as pair:
        lease = pair.lease()
        with held_transfer() as held:
            task = pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
            await held.arrived()
            await pair.puller.release_lease(lease.ticket())  # of no effect: it is being pulled
            with pytest.raises(CacheNotFound, match="another pull"):
                await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
            held.release()
            await task
        pair.verify()
        assert await ended(lease) is LeaseEnd.TAKEN


async def test_the_link_to_the_peer_that_pulls_ends() -> None:
    async with pair_of(sync_kv_timeout=10_000) as pair:
        lease, other = pair.lease(), pair.lease()
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            task = pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
            await claimed(lease, pair)
            await pair.two.datadist.unlink_clusters([cluster_info(pair.one)], 5000, force=True)
            with pytest.raises(LinkError):
                await task
        assert await ended(lease) in {LeaseEnd.PEER_LOST, LeaseEnd.RELEASED}
        assert other.ended is None
        with pytest.raises((NotLinked, LinkError)):
            pair.puller.pull_leased(other.ticket(), pair.mine, TARGETS)


async def test_a_pull_that_takes_too_long_ends_at_its_own_time() -> None:
    async with pair_of(sync_kv_timeout=10_000) as pair:
        lease = pair.lease()
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            with pytest.raises(TransferTimeout, match=r"0\.2 s of the call"):
                await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, deadline=0.2)
        assert lease.ended is None


async def test_an_owner_that_does_not_answer_a_claim(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside(pair.two.datadist).block_leases, "claim", lambda *_: None)
    link = inside(pair.one.datadist).links.find(2)
    for _ in range(3):
        with pytest.raises(TransferTimeout, match=r"0\.1 s of the call"):
            await pair.puller.pull_leased(pair.lease().ticket(), pair.mine, TARGETS, deadline=0.1)
    task = pair.puller.pull_leased(pair.lease().ticket(), pair.mine, TARGETS)
    await there_and_back(pair.one, pair.two)
    task.cancel()
    await task.synchronize()
    await there_and_back(pair.one, pair.two)
    assert (len(link.session.questions), link.transfers.running.operations) == (0, set())


async def test_a_pull_that_is_cancelled_when_its_bytes_are_here_does_not_wait_for_the_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair_of() as pair:
        monkeypatch.setattr(inside(pair.two.datadist).block_leases, "claim", lambda *_: None)
        await pair.puller.pull_blocks(
            BlocksCacheKey(2), pair.mine, [0], [0]
        )  # from here on the pull waits for nothing else
        with soft_faults_cleared(), soft_hold(PULL, at="half") as copy:
            task = pair.puller.pull_leased(pair.lease().ticket(), pair.mine, TARGETS)
            await copy.arrived()
            task.cancel()
            copy.release()  # what was cut for the device arrives, so that the transfer itself succeeds
            await task.synchronize()
        assert task.cancelled()


async def test_a_pull_that_is_cancelled_at_any_turn_of_the_loop_starts_nothing_later(pair: Pair) -> None:
    """Also in the turn in which the owner's answer came, behind which the transfer would begin."""
    memory = pair.one.memory(pair.mine)
    ends = set()
    for turns in range(24):
        task = pair.puller.pull_leased(pair.lease().ticket(), pair.mine, TARGETS)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await task.synchronize()
        ends.add(task.cancelled())
        memory.view()[:] = bytes(memory.nbytes)
        for _ in range(3):  # whatever was asked of the owner has been done
            await there_and_back(pair.one, pair.two)
        assert not any(memory.view()), f"bytes came after the end of a pull that was cancelled in turn {turns}"
        assert not transfers_of(inside(pair.one.datadist).links.find(2))
    assert True in ends


async def test_a_peer_comes_before_the_lease(pair: Pair) -> None:
    """A router is faster than a worker that is told of its scheduler's decision with the next step."""
    name = new_lease_name()
    ticket = LeaseTicket(cluster_id=2, lease=name, cache_id=pair.theirs.cache_id, blocks=tuple(BLOCKS), seconds=60)
    task = pair.puller.pull_leased(ticket, pair.mine, TARGETS, patience=10)
    await there_and_back(pair.one, pair.two)
    assert not task.done()
    lease = pair.lease(name=name)
    await task
    pair.verify()
    assert await ended(lease) is LeaseEnd.TAKEN


async def test_a_peer_that_comes_too_early_is_told_after_its_patience(pair: Pair) -> None:
    ticket = LeaseTicket(
        cluster_id=2, lease=new_lease_name(), cache_id=pair.theirs.cache_id, blocks=tuple(BLOCKS), seconds=60
    )
    with anyio.fail_after(10), pytest.raises(CacheNotFound, match="keeps no blocks"):
        await pair.puller.pull_leased(ticket, pair.mine, TARGETS, patience=0.05)


async def test_what_is_released_before_it_comes_to_be_ends_at_once(pair: Pair) -> None:
    name = new_lease_name()
    ticket = LeaseTicket(cluster_id=2, lease=name, cache_id=pair.theirs.cache_id, blocks=tuple(BLOCKS), seconds=60)
    await pair.puller.release_lease(ticket)
    await pair.one.datadist.notify(2, b"behind it")
    await anext(pair.two.datadist.notifications())
    assert pair.lease(name=name).ended is LeaseEnd.RELEASED


async def test_pulls_whose_claim_is_not_answered_yet_have_no_tasks(pair: Pair) -> None:
    """Thousands may wait for a lease to come to be, and each task is some thirty objects that are collected."""
    await pair.puller.pull_leased(pair.lease().ticket(), pair.mine, TARGETS)  # the peer's cache is known
    await there_and_back(pair.one, pair.two)
    before = len(asyncio.all_tasks())
    names = [new_lease_name() for _ in range(20)]
    made = LeaseTicket(cluster_id=2, lease=names[0], cache_id=pair.theirs.cache_id, blocks=tuple(BLOCKS), seconds=60)
    pulls = [
        pair.puller.pull_leased(made.model_copy(update={"lease": name}), pair.mine, TARGETS, patience=MINUTE)
        for name in names
    ]
    await there_and_back(pair.one, pair.two)
    assert not any(pull.done() for pull in pulls)
    assert len(asyncio.all_tasks()) <= before
    leases = [pair.lease(name=name) for name in names]
    for pull in pulls:
        await pull
    for lease in leases:
        assert await ended(lease) is LeaseEnd.TAKEN


async def test_a_cluster_that_is_finalized_keeps_nothing() -> None:
    async with pair_of() as pair:
        lease = pair.lease()
        told: list[BlockLease] = []
        lease.add_done_callback(told.append)
    assert lease.ended is LeaseEnd.WITHDRAWN
    assert told == [lease]


# ---- parts of blocks ----


@pytest.mark.parametrize(
    ("block", "src", "dst"),
    [
        (2048, [5, 0, 3], [0, 2, 1]),
        (8192, [0, 1, 2, 3, 4, 5], [2, 3, 0, 1, 6, 7]),
        (4096, [1, 3], [2, 4]),
        (6144, [0, 2, 4], [1, 3, 5]),
    ],
    ids=["smaller", "greater", "a half of each", "no multiple of each other"],
)
async def test_parts_of_blocks_go_to_blocks_of_another_size(
    pair: Pair, block: int, src: Sequence[int], dst: Sequence[int]
) -> None:
    part, targets = 2048, [3, 0, 2]
    cache = await pair.one.blocks(CacheDesc(2, [4, block], DataType.DT_UINT8), model_id=7)
    lease, wanted, theirs = pair.lease(), tensors(cache), tensors(pair.theirs)
    report = await pair.puller.pull_leased(lease.ticket(), cache, targets, parts=BlockParts(part, src, dst))
    assert report.bytes == 2 * len(src) * part
    for tensor, source in zip(wanted, theirs, strict=True):
        for a, b in zip(src, dst, strict=True):
            fro = BLOCKS[a * part // 4096] * 4096 + a * part % 4096
            to = targets[b * part // block] * block + b * part % block
            tensor[to : to + part] = source[fro : fro + part]
    assert tensors(cache) == wanted
    assert await ended(lease) is LeaseEnd.TAKEN


def tensors(cache: Cache) -> list[bytearray]:
    nbytes = cache.cache_desc.size
    return [bytearray(ctypes.string_at(address, nbytes)) for address in cache.tensor_addrs]


async def test_bad_parts(pair: Pair) -> None:
    lease = pair.lease()
    for nbytes, src, dst, words in (
        (3000, [0], [0], "must be a multiple of a part's 3000"),
        (2048, [6], [0], r"parts\.src\[0\] is 6: 3 blocks of 2 parts"),
        (2048, [0], [6], r"parts\.dst\[0\] is 6: 3 blocks of 2 parts"),
    ):
        with pytest.raises(ParamInvalid, match=words):
            await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, parts=BlockParts(nbytes, src, dst))
    with pytest.raises(ParamInvalid, match="the same length, at least 1"):
        BlockParts(2048, [1, 2], [1])
    with pytest.raises(ParamInvalid, match="nbytes is 0"):
        BlockParts(0, [1], [1])
    with pytest.raises(TypeError, match="parts"):
        pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, parts=2048)  # type: ignore[arg-type]
    assert lease.ended is None


async def test_parts_are_made_once_the_owner_has_confirmed_the_claim(pair: Pair) -> None:
    asked: list[str] = []
    lease = pair.lease(prompt_digest=bytes(16))
    other = lease.ticket().model_copy(update={"blocks": (3, 9, 5)})

    def parts() -> BlockParts:
        asked.append(repr(lease))
        return BlockParts(2048, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])

    for ticket, prompt in ((other, bytes(16)), (lease.ticket(), b"\1" * 16)):
        with pytest.raises(LeaseMismatch):
            await pair.puller.pull_leased(ticket, pair.mine, TARGETS, parts=parts, prompt_digest=prompt)
    assert asked == []
    await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, parts=parts, prompt_digest=bytes(16))
    assert len(asked) == 1
    assert "being pulled" in asked[0]
    pair.verify()
    assert await ended(lease) is LeaseEnd.TAKEN


async def test_parts_that_cannot_be_made_fail_the_pull_alone(pair: Pair) -> None:
    lease = pair.lease()
    with pytest.raises(ParamInvalid, match="the same length, at least 1"):
        await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, parts=lambda: BlockParts(2048, [1, 2], [1]))
    with pytest.raises(InternalError, match="parts"):
        await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, parts=lambda: 2048)  # type: ignore[arg-type,return-value]
    assert lease.ended is None
    await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
    pair.verify()


# ---- what landed of a pull that failed ----


async def test_blocks_that_landed_before_a_pull_failed_are_told(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PORTION_BYTES", 2 * 4096)
    await pair.puller.pull_leased(pair.lease().ticket(), pair.mine, [10, 11, 12])  # all that is asked once is known
    lease = pair.lease()
    with soft_faults_cleared():
        soft_fault("HcclBatchGet:exec=507053@3;HcclBatchPut:exec=507053@3")
        with pytest.raises(TransferError) as failed:
            await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
    assert failed.value.landed_blocks == 2
    pair.verify(BLOCKS[:2], TARGETS[:2])
    assert lease.ended is None
    await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS[2:], first=2)
    pair.verify()
    assert await ended(lease) is LeaseEnd.TAKEN


async def test_portions_of_a_pull_are_cancelled_together(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PORTION_BYTES", 1)
    lease = pair.lease()
    with held_transfer(pair.mover) as held:
        task = pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
        await held.arrived()
        await held.stopped(task.cancel)
        await task.synchronize()
    assert task.cancelled()
    assert await ended(lease) is LeaseEnd.RELEASED


# ---- peers that share blocks ----


async def test_blocks_that_two_pulls_share_are_kept_until_both_have_them(pair: Pair) -> None:
    lease = pair.lease()
    await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, takers=2)
    assert lease.ended is None
    with pytest.raises(CacheNotFound):  # it says that it is alone
        await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
    await pair.puller.pull_leased(lease.ticket(), pair.mine, [10, 11, 12], takers=2)
    pair.verify()
    pair.verify(BLOCKS, [10, 11, 12])
    assert await ended(lease) is LeaseEnd.TAKEN
    with pytest.raises(ParamInvalid, match="takers is 0"):
        pair.puller.pull_leased(pair.lease().ticket(), pair.mine, TARGETS, takers=0)


async def test_two_pulls_share_blocks_at_the_same_time(pair: Pair) -> None:
    lease = pair.lease()
    tasks = [pair.puller.pull_leased(lease.ticket(), pair.mine, to, takers=2) for to in (TARGETS, [10, 11, 12])]
    for task in tasks:
        await task
    assert await ended(lease) is LeaseEnd.TAKEN


async def test_blocks_that_one_of_two_does_not_want_are_over_when_the_other_has_them() -> None:
    async with pair_of(sync_kv_timeout=10_000) as pair:
        lease = pair.lease()
        with held_transfer() as held:
            task = pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, takers=2)
            await held.arrived()
            await pair.puller.release_lease(lease.ticket())
            await there_and_back(pair.one, pair.two)
            assert lease.ended is None
            held.release()
            await task
        assert await ended(lease) is LeaseEnd.RELEASED


async def test_bad_arguments(pair: Pair) -> None:
    owner, puller = pair.owner, pair.puller
    with pytest.raises(ParamInvalid, match="has 16 blocks"):
        owner.lease_blocks(pair.theirs, [16], MINUTE)
    with pytest.raises(ParamInvalid, match="empty"):
        owner.lease_blocks(pair.theirs, [], MINUTE)
    with pytest.raises(ParamInvalid, match="32 hexadecimal"):
        owner.lease_blocks(pair.theirs, [1], MINUTE, name="mine")
    lease = pair.lease()
    with pytest.raises(ParamInvalid, match="a lease of this name exists already"):
        pair.lease(name=lease.name)
    good = lease.ticket().model_dump()
    for change, words in (
        ({"lease": "no"}, "lease"),
        ({"blocks": []}, "blocks"),
        ({"seconds": "soon"}, "seconds"),
        ({"other": 1}, "other"),
    ):
        with pytest.raises(ParamInvalid, match=words):
            puller.pull_leased({**good, **change}, pair.mine, TARGETS)
    with pytest.raises(TypeError):
        puller.pull_leased("ticket", pair.mine, TARGETS)  # type: ignore[arg-type]
    with pytest.raises(ParamInvalid, match="dst_blocks has 4 entries: the ticket has 3 blocks"):
        puller.pull_leased(good, pair.mine, [1, 2, 3, 4])
    with pytest.raises(ParamInvalid, match="dst_blocks has 3 entries: the ticket has 2 blocks from first=1 on"):
        puller.pull_leased(good, pair.mine, [1, 2, 3], first=1)
    with pytest.raises(ParamInvalid, match="first is 3"):
        puller.pull_leased(good, pair.mine, [1], first=3)
    with pytest.raises(NotLinked):
        puller.pull_leased({**good, "cluster_id": 9}, pair.mine, TARGETS)
    assert lease.ended is None
