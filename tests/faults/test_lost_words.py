"""Words that are lost, come twice or late, although no answer asks for them, or few callers wait for them.

They are notifications, claims of leases, pings, layers that landed, and memory that is taken back. A user sees at most a
delay, and the link goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio
import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheNotFound,
    DataType,
    LeaseEnd,
)
from aiodatadist.testing import Cluster, linked_pair
from tests.faults.mishaps import Fate, Mishaps, installed, once
from tests.held import held_transfer, there_and_back
from tests.test_block_leases import TARGETS, pair_of
from tests.test_layered import LAYERS, fan

DESC = CacheDesc(2, [64, 512], DataType.DT_UINT8)
POOL = {"memory_size": 1 << 20, "page_shift": 12}
KEY = CacheKey(1, 1000)
ENOUGH = 25
"""Seconds in which all that is said again has been heard, on any machine."""


@pytest.fixture
def mishaps(monkeypatch: pytest.MonkeyPatch) -> Mishaps:
    return installed(monkeypatch)


# ---- notifications ----

NOTES = [
    [("note", "lost")],
    [("note", "twice")],
    [("note", "late")],
    [("note", "lost"), ("note", "twice"), ("note", "lost"), ("note", "late")],
    [("taken", "lost")],
    [("taken", "twice"), ("taken", "twice")],
    [("taken", "late")],
    [("taken", "lost")] * 64,
]


async def received(cluster: Cluster, count: int) -> AsyncIterator[bytes]:
    async for note in cluster.datadist.notifications():
        yield note.payload
        count -= 1
        if not count:
            return


@pytest.mark.parametrize("what", NOTES, ids=lambda what: f"{len(what)} {what[0]}")
async def test_each_notification_arrives_once_and_in_order(mishaps: Mishaps, what: list[tuple[str, Fate]]) -> None:
    count = 150  # more than may be under way
    async with linked_pair(DESC) as (prompt, decoder, _, _):
        mishaps.decide = once(*what)

        async def send() -> None:
            for number in range(count):
                await prompt.datadist.notify(2, b"%d" % number)

        with anyio.fail_after(ENOUGH):
            async with anyio.create_task_group() as group:
                group.start_soon(send)
                came = [payload async for payload in received(decoder, count)]
        assert came == [b"%d" % number for number in range(count)]
        assert mishaps.happened[" ".join(map(str, what[0]))] >= 1
        await decoder.datadist.check_link_status(1)
        await prompt.datadist.notify(2, b"last")
        assert [payload async for payload in received(decoder, 1)] == [b"last"]


async def test_a_user_that_takes_none_for_long_loses_none_and_the_peer_does_not_repeat_them_all(
    mishaps: Mishaps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodatadist._link.control.notifications.AGAIN_SECONDS", 0.1)
    async with linked_pair(DESC) as (prompt, decoder, _, _):
        for number in range(10):
            await prompt.datadist.notify(2, b"%d" % number)
        await mishaps.wait_happened("taken None")  # it was asked, and says that it heard them
        assert [payload async for payload in received(decoder, 10)] == [b"%d" % number for number in range(10)]
        await decoder.datadist.check_link_status(1)
        assert 11 <= mishaps.happened["note None"] < 15


# ---- leases of blocks ----

CLAIMS = [
    [("claim", "lost")],
    [("claim", "twice")],
    [("claim", "late")],
    [("claimed", "lost")],
    [("claimed", "twice")],
    [("claim", "lost"), ("claimed", "lost")],
]


@pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "requests"])
@pytest.mark.parametrize("what", CLAIMS, ids=str)
async def test_a_pull_of_leased_blocks_succeeds_although_a_word_about_its_claim_is(
    mishaps: Mishaps, what: list[tuple[str, Fate]], one_sided: bool
) -> None:
    async with pair_of(enable_remote_cache_accessible=one_sided, sync_kv_timeout=ENOUGH * 1000) as pair:
        mishaps.decide = once(*what)
        lease = pair.lease()
        await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS)
        pair.verify()
        with anyio.fail_after(ENOUGH):
            assert await lease.wait_ended() is LeaseEnd.TAKEN


@pytest.mark.parametrize("kind", ["claim", "unclaim"])
async def test_one_of_two_takers_that_says_everything_twice_counts_once(mishaps: Mishaps, kind: str) -> None:
    async with pair_of() as pair:
        lease = pair.lease(60)
        mishaps.decide = once((kind, "twice"))
        ticket = lease.ticket()
        await pair.puller.pull_leased(ticket, pair.mine, TARGETS, takers=2)
        await pair.one.datadist.check_link_status(2)
        assert lease.ended is None, "one of two has them"
        await pair.puller.pull_leased(ticket, pair.mine, TARGETS, takers=2)
        with anyio.fail_after(ENOUGH):
            assert await lease.wait_ended() is LeaseEnd.TAKEN


async def test_a_claim_that_comes_again_when_its_pull_is_over_keeps_nothing(mishaps: Mishaps) -> None:
    async with pair_of() as pair:
        lease = pair.lease(60)
        mishaps.decide = once(("claim", "kept"))
        await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, takers=2)
        mishaps.again()
        await pair.one.datadist.check_link_status(2)
        await lease.withdraw()
        assert lease.ended is LeaseEnd.WITHDRAWN


async def test_an_end_of_a_pull_that_is_lost_costs_its_owner_the_blocks_for_the_pulls_time(mishaps: Mishaps) -> None:
    async with pair_of() as pair:
        lease = pair.lease(60)
        mishaps.decide = once(("unclaim", "lost"))
        await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, deadline=0.5)
        with anyio.fail_after(ENOUGH):
            assert await lease.wait_ended() is LeaseEnd.EXPIRED


# ---- pings ----


@pytest.mark.parametrize("fate", ["lost", "twice", "late"])
@pytest.mark.parametrize("kind", ["ping", "pong"])
async def test_a_link_is_well_although_a_word_about_it_is(mishaps: Mishaps, kind: str, fate: Fate) -> None:
    async with linked_pair(DESC, sync_kv_timeout=ENOUGH * 1000) as (_, decoder, _, _):
        mishaps.decide = once((kind, fate))
        await decoder.datadist.check_link_status(1)
        await decoder.datadist.check_link_status(1)
        assert mishaps.happened[f"{kind} {fate}"] == 1


@pytest.mark.parametrize("kind", ["lookup", "found"])
async def test_a_question_for_a_cache_is_asked_again(mishaps: Mishaps, kind: str) -> None:
    async with linked_pair(DESC, sync_kv_timeout=ENOUGH * 1000) as (_, decoder, _, cache):
        mishaps.decide = once((kind, "lost"))
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        assert mishaps.happened[f"{kind} lost"] == 1


# ---- layers ----


@pytest.mark.parametrize(
    "what",
    [[("landed", "lost")], [("landed", "twice")], [("landed", "late")], [("landed", "lost")] * LAYERS,
     [("watch", "lost")], [("watch", "twice")], [("watch", "late")], [("pong", "lost")]],
    ids=lambda what: f"{len(what)} {what[0]}",
)  # fmt: skip
async def test_each_layer_is_told_although_words_about_them_are(mishaps: Mishaps, what: list[tuple[str, Fate]]) -> None:
    async with fan() as made:
        mishaps.decide = once(*what)
        before, synchronizer = made.held(0), AwaitableLayerSynchronizer(LAYERS)
        with anyio.fail_after(ENOUGH):
            async with made.targets[0].datadist.cache_manager.receive_layers(1, made.dsts[0]) as receiver:
                task = made.blocks(synchronizer)
                for layer in range(LAYERS):
                    made.compute(layer)
                    synchronizer.ready(layer)
                await task
                for layer in range(LAYERS):
                    await receiver.layer(layer)
        assert made.held(0) == made.after_blocks(0, before)
        assert mishaps.happened[" ".join(map(str, what[0]))] >= 1


async def test_layers_of_an_earlier_transfer_are_none_of_the_next(mishaps: Mishaps) -> None:
    async with fan() as made:
        manager = made.targets[0].datadist.cache_manager
        mishaps.decide = lambda message: "kept" if message.type == "landed" else None
        async with manager.receive_layers(1, made.dsts[0]) as receiver:
            synchronizer = AwaitableLayerSynchronizer(LAYERS)
            task = made.blocks(synchronizer)
            for layer in range(LAYERS):
                made.compute(layer)
                synchronizer.ready(layer)
            await task
            await receiver.layer(LAYERS - 1)
        async with manager.receive_layers(1, made.dsts[0]) as receiver:
            mishaps.again()
            await made.targets[0].datadist.check_link_status(1)
            assert receiver.landed == []


# ---- memory that is taken back ----


async def test_an_answer_of_an_earlier_time_gives_no_memory_back_that_is_being_read(mishaps: Mishaps) -> None:
    options = {"mem_pool_cfg": POOL, "sync_kv_timeout": ENOUGH * 1000}
    async with linked_pair(DESC, slots=True, **options) as (prompt, decoder, _, cache):
        owner, puller = prompt.datadist.cache_manager, decoder.datadist.cache_manager
        pooled = await owner.allocate_cache(DESC, [KEY])
        by_id = CacheKeyByIdAndIndex(1, pooled.cache_id)
        await puller.pull_cache(KEY, cache, 0)
        mishaps.decide = once(("revoked", "kept"))
        await owner.remove_cache_key(KEY)  # what the peer knew it gave back
        await puller.pull_cache(by_id, cache, 0)
        with held_transfer() as held:
            task = puller.pull_cache(by_id, cache, 0)
            await held.arrived()
            mishaps.again()
            async with anyio.create_task_group() as group:
                group.start_soon(prompt.datadist.check_link_status, 2)  # the answer comes behind the earlier one
                deallocation = asyncio.create_task(owner.deallocate_cache(pooled))
                await there_and_back(prompt, decoder)
                assert not deallocation.done(), "its source was given back while it was read"
                held.release()
            await deallocation
        await task


@pytest.mark.parametrize("fate", ["late", "kept"])
async def test_a_cache_that_was_taken_back_is_not_found_in_an_answer_that_comes_behind(
    mishaps: Mishaps, fate: Fate
) -> None:
    """Its memory may be another cache's."""
    async with linked_pair(DESC, mem_pool_cfg=POOL, sync_kv_timeout=ENOUGH * 1000) as (prompt, decoder, _, cache):
        owner, puller = prompt.datadist.cache_manager, decoder.datadist.cache_manager
        pooled = await owner.allocate_blocks_cache(DESC, BlocksCacheKey(1, 7))
        mishaps.decide = once(("found", fate))
        async with anyio.create_task_group() as group:

            async def pull() -> None:
                if fate == "late":
                    with pytest.raises(CacheNotFound):
                        await puller.pull_blocks(BlocksCacheKey(1, 7), cache, [0], [0])
                else:
                    await puller.pull_blocks(BlocksCacheKey(1, 7), cache, [0], [0])

            group.start_soon(pull)
            await mishaps.wait_happened(f"found {fate}")
            if fate == "late":
                await owner.deallocate_blocks_cache(pooled)
        if fate == "kept":
            await owner.deallocate_blocks_cache(pooled)
            mishaps.again()
            await decoder.datadist.check_link_status(1)
        with pytest.raises(CacheNotFound):
            await puller.pull_blocks(BlocksCacheKey(1, 7), cache, [0], [0])


async def test_a_cache_is_not_forgotten_that_was_asked_for_at_an_earlier_time(mishaps: Mishaps) -> None:
    options = {"mem_pool_cfg": POOL, "sync_kv_timeout": ENOUGH * 1000}
    async with linked_pair(DESC, slots=True, **options) as (prompt, decoder, _, cache):
        owner, puller = prompt.datadist.cache_manager, decoder.datadist.cache_manager
        pooled = await owner.allocate_cache(DESC, [KEY])
        by_id = CacheKeyByIdAndIndex(1, pooled.cache_id)
        await puller.pull_cache(KEY, cache, 0)
        mishaps.decide = once(("revoke", "kept"))
        await owner.remove_cache_key(KEY)
        await puller.pull_cache(by_id, cache, 0)
        mishaps.again()
        await decoder.datadist.check_link_status(1)
        lookups = mishaps.happened["lookup None"]
        await puller.pull_cache(by_id, cache, 0)
        assert mishaps.happened["lookup None"] == lookups, "it was forgotten, and asked for again"
        await owner.deallocate_cache(pooled)
