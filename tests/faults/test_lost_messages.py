"""Control messages that are lost, come twice or late: a request is repeated or fails alone, and its link goes on.

TCP does none of that. A peer with a defect does, and its link has to go on while the defect is looked for.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import anyio
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheNotFound,
    DataType,
    LLMException,
    NotLinked,
    ParamInvalid,
    Placement,
    TransferError,
    TransferTimeout,
)
from aiodatadist.testing import Cluster, cluster_info, inside, linked_pair, soft_fault, soft_faults_cleared
from tests.faults.mishaps import Fate, Heard, Mishaps, installed, once
from tests.held import held_transfer, there_and_back
from tests.profiles import at_night

BLOCKS = CacheDesc(2, [64, 512], DataType.DT_UINT8)
POOL = {"memory_size": 1 << 20, "page_shift": 12}
SHORT, LONG = 300, 20_000
"""Milliseconds for a pull that is not to succeed, and for one that is."""


@pytest.fixture
def mishaps(monkeypatch: pytest.MonkeyPatch) -> Mishaps:
    return installed(monkeypatch)


def request_mode(milliseconds: int) -> dict[str, Any]:
    return {"enable_remote_cache_accessible": False, "sync_kv_timeout": milliseconds, "mem_pool_cfg": POOL}


def block(cluster: Cluster, cache: Cache, tensor: int, number: int) -> bytes:
    start = tensor * BLOCKS.size + number * BLOCKS.stride
    return bytes(cluster.memory(cache).view()[start : start + BLOCKS.stride])


async def pull_works(prompt: Cluster, decoder: Cluster, source: Cache, cache: Cache) -> None:
    """Check that the link works, on a machine that may stand still for as long as a pull may take."""
    manager = decoder.datadist.cache_manager
    for _ in range(20):
        try:
            await manager.pull_blocks(BlocksCacheKey(1), cache, [33], [5])
        except TransferTimeout:
            continue
        break
    assert all(block(decoder, cache, tensor, 5) == block(prompt, source, tensor, 33) for tensor in range(2))
    await decoder.datadist.check_link_status(1)
    for cluster, peer in ((prompt, 2), (decoder, 1)):
        assert [link.cluster_id for link in cluster.datadist.statistics().links] == [peer]


SUCCEEDS = [
    [("grant", "lost")],
    [("grant", "twice")],
    [("grant", "late")],
    [("pull", "twice")],
    [("pulled", "twice")],
    [("grant", "lost"), ("pull", "twice"), ("pulled", "twice")],
]


@pytest.mark.parametrize("what", SUCCEEDS, ids=str)
async def test_a_request_is_repeated_and_served_once(mishaps: Mishaps, what: list[tuple[str, Fate]]) -> None:
    async with linked_pair(BLOCKS, **request_mode(LONG)) as (prompt, decoder, source, cache):
        mishaps.decide = once(*what)
        report = await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        assert report.bytes == 2 * BLOCKS.stride
        assert all(block(decoder, cache, tensor, 0) == block(prompt, source, tensor, 3) for tensor in range(2))
        await pull_works(prompt, decoder, source, cache)
        assert prompt.datadist.figures().transfers["served"].succeeded == 2


@pytest.mark.parametrize(
    ("one_sided", "what"),
    [
        *((True, [(kind, fate)]) for kind in ("digest", "digests") for fate in ("twice", "late")),
        *((False, what) for what in SUCCEEDS),
    ],
    ids=str,
)
async def test_so_it_is_where_checksums_are_compared(
    mishaps: Mishaps, one_sided: bool, what: list[tuple[str, Fate]]
) -> None:
    options = {**request_mode(LONG), "enable_remote_cache_accessible": one_sided}
    async with linked_pair(BLOCKS, **options) as (prompt, decoder, source, cache):
        mishaps.decide = once(*what)
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0], checksum=True)
        assert sum(count for name, count in mishaps.happened.items() if not name.endswith("None")) == len(what)
        await pull_works(prompt, decoder, source, cache)


async def test_what_was_said_again_and_what_came_too_late_is_counted_beyond_the_link(mishaps: Mishaps) -> None:
    async with linked_pair(BLOCKS, sync_kv_timeout=LONG) as (prompt, decoder, source, cache):
        mishaps.decide = once(("lookup", "lost"), ("found", "twice"))
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        await pull_works(prompt, decoder, source, cache)
        await decoder.datadist.unlink_clusters([cluster_info(prompt)])
        figures = decoder.datadist.figures()
        assert figures.messages_repeated >= 1
        assert figures.answers_late >= 1


@pytest.mark.parametrize("fate", ["lost", "twice", "late"])
@pytest.mark.parametrize("kind", ["disconnect", "bye"])
async def test_a_link_ends_at_both_ends_although_a_word_about_that_is(mishaps: Mishaps, kind: str, fate: Fate) -> None:
    async with linked_pair(BLOCKS) as (prompt, decoder, source, cache):
        await pull_works(prompt, decoder, source, cache)
        mishaps.decide = once((kind, fate))
        await decoder.datadist.unlink_clusters([cluster_info(prompt)], 20_000)
        assert mishaps.happened[f"{kind} {fate}"] == 1
        with anyio.fail_after(20):
            await inside(prompt.datadist).links.wait_parted()
        for cluster in (prompt, decoder):
            assert cluster.datadist.statistics().links == ()
        assert (await decoder.datadist.link_clusters([cluster_info(prompt)], 10_000))[0].name == "LLM_SUCCESS"
        await pull_works(prompt, decoder, source, cache)


@pytest.mark.parametrize("kind", ["digest", "digests"])
async def test_checksums_that_are_lost_cost_their_transfer_its_time(mishaps: Mishaps, kind: str) -> None:
    options = {**request_mode(SHORT), "enable_remote_cache_accessible": True}
    async with linked_pair(BLOCKS, **options) as (prompt, decoder, source, cache):
        mishaps.decide = once((kind, "lost"))
        with pytest.raises(TransferTimeout):
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0], checksum=True)
        assert mishaps.happened[f"{kind} lost"] == 1
        await pull_works(prompt, decoder, source, cache)


@pytest.mark.parametrize("fate", ["lost", "late"])
async def test_an_answer_that_is_lost_is_said_again(mishaps: Mishaps, fate: Fate) -> None:
    async with linked_pair(BLOCKS, **request_mode(SHORT)) as (prompt, decoder, source, cache):
        mishaps.decide = once(("pulled", fate))
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        assert "stop" in mishaps.heard
        assert all(block(decoder, cache, tensor, 0) == block(prompt, source, tensor, 3) for tensor in range(2))
        await pull_works(prompt, decoder, source, cache)


FAILS = [
    [("pull", "lost")],
    [("pull", "late")],
    [("pull", "lost"), ("stop", "lost")],
    [("pull", "lost"), ("stop", "twice")],
    [("pull", "lost"), ("pulled", "lost")],
    [("pull", "late"), ("pulled", "lost")],
    [("grant", "lost"), ("pulled", None), ("pull", "lost")],
    [("grant", "lost"), ("pulled", "lost")],
]


@pytest.mark.parametrize("what", FAILS, ids=str)
async def test_a_request_that_is_lost_fails_alone_and_in_time(mishaps: Mishaps, what: list[tuple[str, Fate]]) -> None:
    async with linked_pair(BLOCKS, **request_mode(SHORT)) as (prompt, decoder, source, cache):
        mishaps.decide = once(*what)
        view = decoder.memory(cache).view()
        view[:] = b"\xee" * len(view)
        with pytest.raises(TransferTimeout):
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        await pull_works(prompt, decoder, source, cache)
        assert block(decoder, cache, 0, 0) == b"\xee" * BLOCKS.stride, "it came after its own end, and was served"


async def test_a_destination_that_stays_unknown_is_refused_and_the_next_pull_tells_of_it_again(
    mishaps: Mishaps,
) -> None:
    async with linked_pair(BLOCKS, **request_mode(LONG)) as (prompt, decoder, source, cache):
        mishaps.decide = once(("grant", "lost"), ("grant", "lost"))
        with pytest.raises(ParamInvalid, match="was never announced"):
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        await pull_works(prompt, decoder, source, cache)


@pytest.mark.parametrize("answers", [1, 2])
async def test_a_pull_is_cancelled_also_where_the_peer_says_just_then_that_it_knows_no_destination(
    mishaps: Mishaps, answers: int
) -> None:
    """Also the second time, and then it is not asked for once more."""
    async with linked_pair(BLOCKS, **request_mode(LONG)) as (prompt, decoder, source, cache):
        lost: list[tuple[str, Fate]] = [("grant", "lost")] * answers
        first, heard = once(*lost), Counter[str]()

        def decide(message: Heard) -> Fate:
            heard[message.type] += 1
            if message.type == "pulled" and heard["pulled"] == answers:
                task.cancel()
            return first(message)

        mishaps.decide = decide
        task = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (mishaps.happened["grant lost"], task.cancelled()) == (answers, True)
        await decoder.datadist.check_link_status(1)  # what was said before has been heard
        assert (heard["pull"], heard["stop"]) == (answers, 0)
        mishaps.decide = lambda _: None
        await pull_works(prompt, decoder, source, cache)


@pytest.mark.parametrize("mishap", [("grant", None), ("grant", "lost")], ids=["first request", "second request"])
async def test_a_pull_whose_time_is_over_ends_also_if_it_is_cancelled_before_the_peer_stops(
    mishaps: Mishaps, mishap: tuple[str, Fate]
) -> None:
    async with linked_pair(BLOCKS, **request_mode(SHORT)) as (prompt, decoder, source, cache):
        first = once(mishap)

        def decide(message: Heard) -> Fate:
            if message.type == "stop":
                task.cancel()
            return first(message)

        mishaps.decide = decide
        with soft_faults_cleared():
            soft_fault("HcclBatchPut:hang")
            task = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
            ended = asyncio.Event()  # the test does not await the task, whose cancellation would be the test's
            task.add_done_callback(lambda _: ended.set())
            with anyio.fail_after(20):
                await ended.wait()
        assert task.cancelled() or isinstance(task.exception(), TransferTimeout)  # the peer's time was over as well
        mishaps.decide = lambda _: None
        await pull_works(prompt, decoder, source, cache)


@pytest.mark.parametrize("cancels", [True, False])
async def test_a_stop_that_is_lost_is_said_again(mishaps: Mishaps, cancels: bool) -> None:
    async with linked_pair(BLOCKS, **request_mode(LONG if cancels else SHORT)) as (prompt, decoder, source, cache):
        mishaps.decide = once(("stop", "lost"))
        with soft_faults_cleared():
            # Every put: a peer whose own time is over first is told no stop, and then the next pull has to hang, too.
            soft_fault("HcclBatchPut:hang@*")
            while not mishaps.happened["stop lost"]:  # a pull may time out before it is sent
                task = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
                if cancels:
                    await mishaps.wait_heard("pull")
                    task.cancel()
                with pytest.raises(asyncio.CancelledError if cancels else TransferTimeout):
                    await task
        assert mishaps.happened["stop lost"] == 1
        await pull_works(prompt, decoder, source, cache)


@pytest.mark.parametrize("fate", ["lost", "twice"])
@pytest.mark.parametrize("kind", ["revoke", "revoked"])
async def test_memory_is_given_back_although_a_word_about_it_is(mishaps: Mishaps, kind: str, fate: Fate) -> None:
    async with linked_pair(BLOCKS, **request_mode(SHORT)) as (prompt, decoder, source, cache):
        manager = decoder.datadist.cache_manager
        target = await manager.allocate_blocks_cache(BLOCKS)
        for _ in range(20):
            try:
                await manager.pull_blocks(BlocksCacheKey(1), target, [3], [0])
            except TransferTimeout:
                continue
            break
        mishaps.decide = once((kind, fate))
        await manager.deallocate_blocks_cache(target)
        assert mishaps.happened[f"{kind} {fate}"] == 1
        usage = manager.pool_usage()[Placement.DEVICE]
        assert usage.free == usage.total
        await pull_works(prompt, decoder, source, cache)


async def test_a_cache_that_is_asked_for_twice_is_given_back_when_it_is_not_used_any_more(mishaps: Mishaps) -> None:
    async with linked_pair(BLOCKS, mem_pool_cfg=POOL, sync_kv_timeout=LONG) as (prompt, decoder, source, cache):
        owner = prompt.datadist.cache_manager
        pooled = await owner.allocate_blocks_cache(BLOCKS, BlocksCacheKey(1, 7))
        puller = decoder.datadist.cache_manager
        await puller.pull_blocks(BlocksCacheKey(1, 7), cache, [0], [0])
        mishaps.decide = once(("revoke", "twice"))
        with held_transfer() as held:
            task = puller.pull_blocks(BlocksCacheKey(1, 7), cache, range(64), range(64))
            await held.arrived()
            deallocation = asyncio.create_task(owner.deallocate_blocks_cache(pooled))
            await there_and_back(prompt, decoder)
            assert not deallocation.done(), "its source was given back while it was read"
            held.release()
            await deallocation
        await task
        with pytest.raises(CacheNotFound):
            await puller.pull_blocks(BlocksCacheKey(1, 7), cache, [0], [0])
        await pull_works(prompt, decoder, source, cache)


class Chance:
    """Random fates: of ten messages one is lost, one repeated, one late. No two of a kind in a row are lost."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lost: dict[str, bool] = {}

    def __call__(self, message: Heard) -> Fate:
        fates: list[Fate] = ["lost", "twice", "late", None]
        fate = self._random.choices(fates, [1, 1, 1, 7])[0]
        if message.type not in {"grant", "pull", "pulled", "stop"} or (fate == "lost" and self._lost.get(message.type)):
            fate = None
        self._lost[message.type] = fate == "lost"
        return fate


@pytest.mark.parametrize(("rounds", "seed"), [(3, 1), *(at_night(40, seed) for seed in range(2, 6))])
async def test_whatever_is_lost_each_request_ends_and_the_link_stays(mishaps: Mishaps, rounds: int, seed: int) -> None:
    async with linked_pair(BLOCKS, **request_mode(SHORT)) as (prompt, decoder, source, cache):
        mishaps.decide = Chance(seed)
        manager, ended, late = decoder.datadist.cache_manager, Counter[str](), dict[int, bytes]()
        view = decoder.memory(cache).view()

        async def pull(number: int) -> None:
            try:
                await manager.pull_blocks(BlocksCacheKey(1), cache, [63 - number], [number])
            except (TransferError, ParamInvalid) as error:
                ended[type(error).__name__] += 1
                late[number] = b"\xee" * BLOCKS.stride
                for tensor in range(2):
                    start = tensor * BLOCKS.size + number * BLOCKS.stride
                    view[start : start + BLOCKS.stride] = late[number]
            else:
                ended["done"] += 1
                late.pop(number, None)
                assert block(decoder, cache, 1, number) == block(prompt, source, 1, 63 - number), f"seed {seed}"

        for _ in range(rounds):
            async with anyio.create_task_group() as group:
                for number in range(16):
                    group.start_soon(pull, number)
        mishaps.decide = lambda _: None
        assert ended.total() == 16 * rounds
        assert ended["done"], ended
        for number, content in late.items():
            assert block(decoder, cache, 0, number) == content, f"seed {seed}: it was written after its end"
        await pull_works(prompt, decoder, source, cache)


async def test_a_peer_that_answers_nothing_at_all_loses_its_link(
    mishaps: Mishaps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodatadist._link.transfers.pull_requests.STOP_TIMEOUT", 0.2)
    monkeypatch.setattr("aiodatadist._link.transfers.pull_requests.BROKEN_TIMEOUT", 0.0)
    async with linked_pair(BLOCKS, **request_mode(SHORT)) as (_, decoder, _, cache):
        mishaps.decide = lambda message: "lost" if message.type == "pulled" else None
        with pytest.raises(LLMException, match=r"did not stop writing within 0\.2 s"):
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        assert mishaps.happened["pulled lost"] >= 2
        with pytest.raises(NotLinked, match="the last link ended"):
            await decoder.datadist.check_link_status(1)
