"""Small transfers with a checksum have no task: whatever ends them gives everything back, and no damage passes."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheNotFound,
    DataCorrupted,
    DataType,
    FeatureNotEnabled,
    LinkError,
    LLMStatusCode,
    TransferError,
    TransferTimeout,
)
from aiodatadist._link.transfers.asked_checksums import AskedChecksums
from aiodatadist._link.transfers.checksums import AT_A_TIME
from aiodatadist._link.transfers.comparison import Comparison
from aiodatadist._wire.messages import Digest, Digests
from aiodatadist.testing import (
    Cluster,
    cluster_info,
    inside,
    linked_pair,
    open_cluster,
    soft_fault,
    soft_faults_cleared,
)
from tests.clock import took
from tests.held import there_and_back, turns
from tests.strict.marks import STRICT

DESC = CacheDesc(4, [16, 256], DataType.DT_UINT8)
KEY = BlocksCacheKey(1)
pytestmark = pytest.mark.skipif(STRICT == "roce", reason="RoCE: every transfer takes its turn in one stream")
calls = pytest.mark.parametrize("call", ["pull_blocks", "push_blocks"])


class Asked:
    """The questions for checksums that have come. They are answered once they are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ask = AskedChecksums.ask
        self._came = asyncio.Semaphore(0)
        self._is_open = False
        self.waiting: list[tuple[AskedChecksums, Digest]] = []
        held = self

        def hold(here: AskedChecksums, message: Digest) -> None:
            held._hold(here, message)

        monkeypatch.setattr(AskedChecksums, "ask", hold)

    def _hold(self, here: AskedChecksums, message: Digest) -> None:
        if self._is_open:
            self._ask(here, message)
        else:
            self.waiting.append((here, message))
            self._came.release()

    async def arrived(self, count: int = 1) -> None:
        async with asyncio.timeout(20):
            for _ in range(count):
                await self._came.acquire()

    def release(self) -> None:
        self._is_open = True
        for each in self.waiting:
            self._ask(*each)
        self.waiting.clear()


async def known(cluster: Cluster, target: Cache, call: str, **words: Any) -> None:
    """Make a form known: later transfers of it take the short way."""
    for _ in range(2):
        await getattr(cluster.datadist.cache_manager, call)(KEY, target, [1], [1], **words)


def check_quiet(cluster: Cluster, target: Cache) -> None:
    """Check that nothing is held for a comparison any longer."""
    engine = inside(cluster.datadist)
    entry, link = engine.registry.table.find(target.cache_id), engine.links.find(1)
    assert entry is not None
    assert entry.leases == 0
    found = link.session.catalogue.find(KEY)
    assert found is not None
    assert (found[0].uses, found[0].summing.taken) == (0, 0)
    checks = link.transfers.requester.checks
    assert [checks.take_turn() for _ in range(AT_A_TIME + 1)] == [True] * AT_A_TIME + [False]
    for _ in range(AT_A_TIME):
        checks.end_turn()
    assert not link.transfers.running.operations
    assert len(link.session.questions) == 0


@calls
async def test_it_has_no_task_and_is_counted_once(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    begin = Comparison.begin

    def noted(self: Comparison) -> bool:
        begun.append(begin(self))
        return begun[-1]

    monkeypatch.setattr(Comparison, "begin", noted)
    async with linked_pair(DESC) as (_, decoder, _, target):
        await known(decoder, target, call)
        for _ in range(5):
            report = await getattr(decoder.datadist.cache_manager, call)(KEY, target, [3, 4], [5, 6], checksum=True)
            assert (report.bytes, report.ranges) == (2048, 4)
        assert begun == [True] * 5
        check_quiet(decoder, target)
        assert decoder.datadist.figures().transfers[call].statuses == {"LLM_SUCCESS": 7}
        link = decoder.datadist.statistics().links[0]
        assert (link.transfers, link.running, link.failures) == (7, 0, {})


@calls
async def test_damage_is_found_each_time(call: str) -> None:
    async with linked_pair(DESC) as (_, decoder, _, target):
        await known(decoder, target, call, checksum=True)
        with soft_faults_cleared():
            for byte in (0, 700, -1):
                soft_fault(f"{'HcclBatchGet' if call == 'pull_blocks' else 'HcclBatchPut'}:flip={byte}@1")
                with pytest.raises(DataCorrupted) as caught:
                    await getattr(decoder.datadist.cache_manager, call)(KEY, target, [3], [5], checksum=True)
                assert caught.value.blocks == (5,)
                assert caught.value.peer == 1
        check_quiet(decoder, target)


@calls
async def test_a_cancelled_comparison_gives_all_back(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, target):
        await known(decoder, target, call)
        asked = Asked(monkeypatch)
        task = getattr(decoder.datadist.cache_manager, call)(KEY, target, [3], [5], checksum=True)
        await asked.arrived()
        assert not task.done()
        assert task.cancel()
        assert task.cancelled()
        check_quiet(decoder, target)
        asked.release()  # an answer that no transfer waits for
        await there_and_back(prompt, decoder)
        assert (await getattr(decoder.datadist.cache_manager, call)(KEY, target, [3], [5], checksum=True)).bytes == 1024
        assert decoder.datadist.statistics().links[0].state == "ready"


async def test_a_waiting_caller_that_is_cancelled_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked_pair(DESC) as (_, decoder, _, target):
        await known(decoder, target, "pull_blocks")
        asked = Asked(monkeypatch)

        async def pull() -> None:
            await decoder.datadist.cache_manager.pull_blocks(KEY, target, [3], [5], checksum=True)

        caller = asyncio.ensure_future(pull())
        await asked.arrived()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        check_quiet(decoder, target)


async def test_a_deadline_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked_pair(DESC) as (_, decoder, _, target):
        await known(decoder, target, "pull_blocks")
        Asked(monkeypatch)
        with anyio.fail_after(20), pytest.raises(TransferTimeout, match="deadline"):
            await decoder.datadist.cache_manager.pull_blocks(KEY, target, [3], [5], checksum=True, deadline=0.01)
        check_quiet(decoder, target)


async def test_a_peer_that_does_not_answer_costs_the_transfer_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked_pair(DESC, sync_kv_timeout=50) as (_, decoder, _, target):
        await known(decoder, target, "pull_blocks")
        Asked(monkeypatch)
        with anyio.fail_after(20), pytest.raises(TransferTimeout, match="the bytes have arrived"):
            await decoder.datadist.cache_manager.pull_blocks(KEY, target, [3], [5], checksum=True)
        check_quiet(decoder, target)


async def test_a_peer_that_has_no_checksums_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked_pair(DESC) as (_, decoder, _, target):
        await known(decoder, target, "pull_blocks")
        refusal = Digests(call=1, status=int(LLMStatusCode.LLM_FAILED), reason="out of order")

        def refuse(_: AskedChecksums, message: Digest) -> Digests:
            return refusal.model_copy(update={"call": message.call})

        monkeypatch.setattr(AskedChecksums, "_answer_now", refuse)
        with pytest.raises(TransferError, match=r"has no checksums: .*out of order"):
            await decoder.datadist.cache_manager.pull_blocks(KEY, target, [3], [5], checksum=True)
        check_quiet(decoder, target)


@pytest.mark.parametrize("end", ["this end", "the peer"])
async def test_the_end_of_the_link_ends_it(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked_pair(DESC, sync_kv_timeout=60_000) as (prompt, decoder, _, target):
        await known(decoder, target, "pull_blocks")
        asked = Asked(monkeypatch)
        task = decoder.datadist.cache_manager.pull_blocks(KEY, target, [3], [5], checksum=True)
        await asked.arrived()
        with anyio.fail_after(20):
            if end == "the peer":
                await prompt.datadist.unlink_clusters([cluster_info(decoder)], 5000, force=True)
            else:
                await decoder.datadist.finalize()
            with pytest.raises(LinkError):
                await task


async def test_an_owner_gets_its_cache_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        open_cluster(1, mem_pool_cfg='{"memory_size": 4194304}', sync_kv_timeout=200) as owner,
        open_cluster(2, device_id=1, sync_kv_timeout=60_000) as puller,
    ):
        source = await owner.datadist.cache_manager.allocate_blocks_cache(DESC, KEY)
        target = await puller.blocks(DESC)
        assert (await puller.datadist.link_clusters([cluster_info(owner)], 5000))[0] is LLMStatusCode.LLM_SUCCESS
        await known(puller, target, "pull_blocks")
        asked = Asked(monkeypatch)
        task = puller.datadist.cache_manager.pull_blocks(KEY, target, [3], [5], checksum=True)
        await asked.arrived()
        with anyio.fail_after(20):
            given_up = asyncio.ensure_future(owner.datadist.cache_manager.deallocate_blocks_cache(source))
            with pytest.raises(CacheNotFound, match="took its cache back"):
                await task
            await given_up
        assert owner.datadist.statistics().links[0].state == "ready"


async def test_few_are_compared_at_a_time_and_the_others_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked_pair(DESC) as (_, decoder, _, target):
        await known(decoder, target, "pull_blocks")
        asked = Asked(monkeypatch)
        pull = decoder.datadist.cache_manager.pull_blocks
        tasks = [pull(KEY, target, [3], [5], checksum=True) for _ in range(3 * AT_A_TIME)]
        await asked.arrived(AT_A_TIME)
        await turns()
        assert len(asked.waiting) == AT_A_TIME
        asked.release()
        with anyio.fail_after(20):
            for task in tasks:
                assert (await task).bytes == 1024
        check_quiet(decoder, target)


async def test_the_peer_is_notified_once_the_bytes_were_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, target):
        await known(decoder, target, "push_blocks")
        push = decoder.datadist.cache_manager.push_blocks
        with soft_faults_cleared():
            soft_fault("HcclBatchPut:flip=0@1")
            with pytest.raises(DataCorrupted):
                await push(KEY, target, [3], [5], checksum=True, notify=b"damaged")
        asked = Asked(monkeypatch)
        task = push(KEY, target, [3], [5], checksum=True, notify=b"whole")
        behind = push(KEY, target, [3], [5], notify=b"behind it")
        await asked.arrived()
        assert (task.done(), behind.done()) == (False, True)
        notes = prompt.datadist.notifications()
        first = asyncio.ensure_future(anext(notes))
        await inside(decoder.datadist).links.find(1).session.ping()
        await turns()
        assert not first.done()
        asked.release()
        await task
        with anyio.fail_after(20):
            assert [(await first).payload, (await anext(notes)).payload] == [b"whole", b"behind it"]


@calls
@pytest.mark.parametrize("turns_left", [AT_A_TIME, 0], ids=["at once", "in a task"])
async def test_the_peers_cache_is_held_from_the_call_on(call: str, turns_left: int) -> None:
    """Otherwise a peer that gives its cache up in the same tick has no checksums, although the bytes are right."""
    async with linked_pair(DESC) as (_, puller, _, target):
        await known(puller, target, call)
        link = inside(puller.datadist).links.find(1)
        checks = link.transfers.requester.checks
        for _ in range(AT_A_TIME - turns_left):
            assert checks.take_turn()
        task = getattr(puller.datadist.cache_manager, call)(KEY, target, [2], [3], checksum=True)
        found = link.session.catalogue.find(KEY)
        assert found is not None
        assert found[0].uses == 1
        for _ in range(AT_A_TIME - turns_left):
            checks.end_turn()
        await task
        check_quiet(puller, target)


@pytest.mark.autojump
@calls
@pytest.mark.parametrize("turns_left", [AT_A_TIME, 0], ids=["at once", "in a task"])
async def test_a_peer_that_refuses_the_question_is_named_at_once(
    call: str, turns_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    async with linked_pair(DESC) as (_, puller, _, target):
        await known(puller, target, call)
        link = inside(puller.datadist).links.find(1)
        checks = link.transfers.requester.checks
        for _ in range(AT_A_TIME - turns_left):
            assert checks.take_turn()
        task = getattr(puller.datadist.cache_manager, call)(KEY, target, [2], [3], checksum=True)
        for _ in range(AT_A_TIME - turns_left):
            checks.end_turn()
        await asked.arrived()
        with took(0):
            assert link.session.questions.refused(asked.waiting[0][1].call)
            with pytest.raises(FeatureNotEnabled, match="cluster 1 refuses to be asked for checksums"):
                await task
        asked.release()
        check_quiet(puller, target)
